//! The memory of passes: where in it a pass's buffers stand.
//!
//! Never asks the driver for anything, and never hands out a place twice in a pass.

use super::driver::Address;

/// What one pass is given is handed out from the start again in the next, so that a pass that asks for the same sizes in
/// the same order finds them at the same addresses.
#[derive(Debug, Default)]
pub(super) struct Arena {
    pub(super) chunks: Vec<Chunk>,
    pub(super) open: bool,
    /// Blocks that are held.
    pub(super) live: usize,
    /// Whether each pass finds it without a number in it.
    pub(super) is_poisoned: bool,
}

#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) address: Address,
    pub(super) bytes: usize,
    pub(super) used: usize,
    /// Bytes from its start that passes may have written since it was zeroed.
    pub(super) left: usize,
}

/// What the arena grows by at least.
const CHUNK_BYTES: usize = 64 << 20;

impl Arena {
    /// A place for so many bytes; none where no chunk has room.
    pub(super) fn place(&mut self, bytes: usize) -> Option<Address> {
        let chunk = self.chunks.iter_mut().find(|chunk| chunk.bytes - chunk.used >= bytes)?;
        let address = chunk.address + chunk.used as u64;
        chunk.used += bytes;
        Some(address)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.bytes as u64).sum()
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.used as u64).sum()
    }
}

/// Bytes of a new chunk for a place of `size`, where `room` bytes are left to grow by: none where that is too little.
pub(super) fn chunk_bytes(size: usize, room: u64) -> Option<usize> {
    [size.max(CHUNK_BYTES), size].into_iter().find(|bytes| *bytes as u64 <= room)
}

#[cfg(test)]
mod tests {
    use super::{CHUNK_BYTES, chunk_bytes};

    #[test]
    fn the_arena_grows_by_no_more_than_there_is_room_for() {
        let mebibytes = |n: usize| n << 20;
        assert_eq!(chunk_bytes(mebibytes(30), u64::MAX), Some(CHUNK_BYTES));
        assert_eq!(chunk_bytes(mebibytes(90), u64::MAX), Some(mebibytes(90)));
        assert_eq!(chunk_bytes(mebibytes(30), mebibytes(36) as u64), Some(mebibytes(30)), "no room to round up");
        assert_eq!(chunk_bytes(mebibytes(30), mebibytes(29) as u64), None);
    }
}
