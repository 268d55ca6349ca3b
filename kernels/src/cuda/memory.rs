//! Device memory: blocks that are zero when handed out and zeroed when given back, and the way in and out for the host's data.
//!
//! Never hands out a block that still holds what somebody wrote.
#![expect(unsafe_code, reason = "the address of device memory")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Address, Event, Gpu, Pinned};
use crate::DeviceError;

/// Keeps freed blocks for the next ask of their size.
#[derive(Debug)]
pub(crate) struct Pool {
    gpu: Arc<Gpu>,
    buffer_bytes_max: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Zeroed blocks by size.
    free: BTreeMap<usize, Vec<Address>>,
    free_bytes: u64,
    buffer_bytes: u64,
}

/// Whose a block is: counted among the buffers, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Buffer,
    Device,
}

/// A block of device memory.
#[derive(Debug)]
pub(crate) struct Block {
    pool: Arc<Pool>,
    address: Address,
    bytes: usize,
    owner: Owner,
}

/// Sizes in steps of an eighth of their power of two, so that a pass that grows a little finds its blocks again.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.max(1).next_power_of_two() / 16).max(512);
    bytes.max(1).next_multiple_of(step)
}

impl Pool {
    pub(crate) fn new(gpu: &Arc<Gpu>, buffer_bytes_max: u64) -> Arc<Self> {
        Arc::new(Self { gpu: Arc::clone(gpu), buffer_bytes_max, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A zeroed block.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, owner: Owner) -> Result<Block, DeviceError> {
        let size = size_class(bytes);
        let left = self.buffer_bytes_max.saturating_sub(self.buffer_bytes());
        if owner == Owner::Buffer && size as u64 > left {
            return Err(DeviceError::OutOfMemory { needed_bytes: size as u64, free_bytes: left });
        }
        let kept = {
            let mut state = self.state();
            let kept = state.free.get_mut(&size).and_then(Vec::pop);
            if kept.is_some() {
                state.free_bytes -= size as u64;
            }
            kept
        };
        let address = match kept {
            Some(address) => address,
            None => self.fresh(size)?,
        };
        if owner == Owner::Buffer {
            self.state().buffer_bytes += size as u64;
        }
        Ok(Block { pool: Arc::clone(self), address, bytes: size, owner })
    }

    fn fresh(&self, size: usize) -> Result<Address, DeviceError> {
        let address = match self.gpu.malloc(size) {
            Err(DeviceError::OutOfMemory { .. }) => {
                self.trim()?;
                self.gpu.malloc(size)?
            }
            other => other?,
        };
        // SAFETY: just allocated with this size.
        unsafe { self.gpu.zero(address, size) }?;
        Ok(address)
    }

    /// Gives what is kept back to the driver.
    fn trim(&self) -> Result<(), DeviceError> {
        self.gpu.synchronize()?;
        let free = {
            let mut state = self.state();
            state.free_bytes = 0;
            std::mem::take(&mut state.free)
        };
        for address in free.into_values().flatten() {
            // SAFETY: from `malloc`, taken out of the list, and the stream has just drained.
            unsafe { self.gpu.free(address) }?;
        }
        Ok(())
    }

    /// Bytes of live buffers.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        self.state().buffer_bytes
    }

    /// Bytes that may still be allocated.
    pub(crate) fn available_bytes(&self) -> u64 {
        let (kept, used) = {
            let state = self.state();
            (state.free_bytes, state.buffer_bytes)
        };
        (self.gpu.free_bytes().unwrap_or(0) + kept).min(self.buffer_bytes_max.saturating_sub(used))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // A card that failed frees its memory with its context.
        let _ = self.trim();
    }
}

impl Block {
    pub(crate) fn address(&self) -> Address {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Block {
    /// Copies `bytes` from `offset` of another block on to `to_offset`.
    pub(crate) fn copy_from(&mut self, to_offset: usize, from: &Self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        assert!(to_offset + bytes <= self.bytes && offset + bytes <= from.bytes, "a copy past the end of a buffer");
        if bytes == 0 {
            return Ok(());
        }
        let (from, to) = (from.address + offset as u64, self.address + to_offset as u64);
        // SAFETY: both ranges were just checked; this block is borrowed uniquely, so the other is another.
        unsafe { self.pool.gpu.copy_within(from, to, bytes) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the block is this value's alone; the stream orders the zeroing after the work that used it.
        let zeroed = unsafe { self.pool.gpu.zero(self.address, self.bytes) };
        let mut state = self.pool.state();
        if self.owner == Owner::Buffer {
            state.buffer_bytes -= self.bytes as u64;
        }
        // A block that could not be zeroed is never handed out again.
        if zeroed.is_ok() {
            state.free.entry(self.bytes).or_default().push(self.address);
            state.free_bytes += self.bytes as u64;
        }
    }
}

/// Bytes of pinned memory; the ring's two halves are used in turn, each again only after the stream has passed its copies.
const STAGING_BYTES: usize = 32 << 20;
const HALF: usize = STAGING_BYTES / 2;

/// The way between the host and the card.
#[derive(Debug)]
pub(crate) struct Staging {
    gpu: Arc<Gpu>,
    pinned: Pinned,
    /// Where tables for one operation go; as large as the pinned ring, and in step with it.
    tables: Block,
    /// The half in use, and how much of it is taken.
    half: usize,
    at: usize,
    /// The stream's end when a half was last left.
    passed: [Event; 2],
}

impl Staging {
    pub(crate) fn new(gpu: &Arc<Gpu>, pool: &Arc<Pool>) -> Result<Self, DeviceError> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            pinned: Pinned::new(gpu, STAGING_BYTES)?,
            tables: pool.alloc(STAGING_BYTES, Owner::Device)?,
            half: 0,
            at: 0,
            passed: [Event::new(gpu)?, Event::new(gpu)?],
        })
    }

    /// A place in the ring for `bytes` (at most half of it) that no pending copy uses.
    fn reserve(&mut self, bytes: usize) -> Result<usize, DeviceError> {
        if bytes > HALF {
            return Err(DeviceError::Unsupported(format!("a table of {bytes} bytes for one operation; at most {HALF}")));
        }
        if self.at + bytes > HALF {
            self.passed[self.half].record()?;
            self.half = 1 - self.half;
            self.passed[self.half].wait()?;
            self.at = 0;
        }
        let place = self.half * HALF + self.at;
        self.at += bytes.next_multiple_of(256);
        Ok(place)
    }

    /// Copies a table to the card for the operations that follow; it lasts until about 16 MiB more have been copied and those operations were launched.
    pub(crate) fn table<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> Result<Address, DeviceError> {
        let data: &[u8] = bytemuck::cast_slice(data);
        let place = self.reserve(data.len())?;
        let pinned = &mut self.pinned.bytes()[place..place + data.len()];
        pinned.copy_from_slice(data);
        let address = self.tables.address() + place as u64;
        if !data.is_empty() {
            self.gpu.bind()?;
            // SAFETY: pinned memory that `reserve` gives again only after the stream has passed this copy; the tables' block is as large as the ring.
            unsafe { self.gpu.copy_in(pinned, address) }?;
        }
        Ok(address)
    }

    /// Fills `bytes` from `offset` of `block` on by chunks that `write` produces: it is given the chunk's place in the whole and its memory.
    pub(crate) fn upload(
        &mut self,
        block: &Block,
        offset: usize,
        bytes: usize,
        mut write: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), DeviceError> {
        assert!(offset + bytes <= block.bytes, "an upload past the end of its buffer");
        self.gpu.bind()?;
        let mut done = 0;
        while done < bytes {
            let chunk = (bytes - done).min(HALF / 2);
            let place = self.reserve(chunk)?;
            let pinned = &mut self.pinned.bytes()[place..place + chunk];
            write(done, pinned);
            // SAFETY: as in `table`; the range was checked above.
            unsafe { self.gpu.copy_in(pinned, block.address + (offset + done) as u64) }?;
            done += chunk;
        }
        Ok(())
    }

    /// Reads `bytes` from `offset` of `block` on, by chunks that `read` is given; waits for all work before.
    pub(crate) fn download(
        &mut self,
        block: &Block,
        offset: usize,
        bytes: usize,
        mut read: impl FnMut(usize, &[u8]),
    ) -> Result<(), DeviceError> {
        assert!(offset + bytes <= block.bytes, "a download past the end of its buffer");
        self.gpu.bind()?;
        let mut done = 0;
        while done < bytes {
            let chunk = (bytes - done).min(HALF / 2);
            let place = self.reserve(chunk)?;
            let pinned = &mut self.pinned.bytes()[place..place + chunk];
            // SAFETY: as in `table`; the stream is synchronised before the bytes are read.
            unsafe { self.gpu.copy_out(block.address + (offset + done) as u64, pinned) }?;
            self.gpu.synchronize()?;
            read(done, pinned);
            done += chunk;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn size_classes_waste_at_most_an_eighth() {
        for bytes in [0_usize, 1, 511, 512, 513, 5000, 1 << 20, (1 << 20) + 1, 3 << 29] {
            let size = size_class(bytes);
            assert!(size >= bytes && size.is_multiple_of(512));
            assert!(size <= bytes + (bytes / 8).max(512), "{bytes} -> {size}");
            assert_eq!(size_class(size), size, "a class is its own class");
        }
    }
}
