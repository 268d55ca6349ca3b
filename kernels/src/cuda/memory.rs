//! Device memory: blocks that are zero when handed out and zeroed when given back; those of a pass stand at the same places in every pass.
//!
//! Never hands out a block that still holds what somebody wrote, but for those of a pass, which hold what passes left since they were last forgotten.
#![expect(unsafe_code, reason = "the address of device memory")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::arena::{Arena, Chunk, chunk_bytes};
use super::driver::{Address, Gpu};
use super::shared::{Extent, Room, Shelf};
use crate::{DeviceError, SharedWeights};

/// Keeps freed blocks for the next ask of their size.
#[derive(Debug)]
pub(crate) struct Pool {
    gpu: Arc<Gpu>,
    buffer_bytes_max: AtomicU64,
    shelf: Mutex<Shelf>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Zeroed blocks by size.
    free: BTreeMap<usize, Vec<Address>>,
    free_bytes: u64,
    /// Of live buffers, and of those among them that are not of the arena.
    buffer_bytes: u64,
    outside_bytes: u64,
    arena: Arena,
}

impl State {
    /// What buffers have of the card: those that live, what is kept for the next, and all of the arena, in use or not.
    fn held_bytes(&self) -> u64 {
        self.outside_bytes + self.free_bytes + self.arena.bytes()
    }

    /// The part of it that no new buffer can have: amid a pass, places of buffers that were dropped are not handed out again.
    fn taken_bytes(&self) -> u64 {
        if self.arena.open { self.outside_bytes + self.arena.used_bytes() } else { self.buffer_bytes }
    }
}

/// Whose a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The engine's; of the arena while a pass is open.
    Buffer,
    /// A weight's, or the device's own.
    Device,
}

/// A block of device memory.
#[derive(Debug)]
pub(crate) struct Block {
    pool: Arc<Pool>,
    address: Address,
    bytes: usize,
    owner: Owner,
    of_arena: bool,
    /// Memory that is shared with other processes, in which it lies.
    extent: Option<Arc<Extent>>,
}

/// Sizes in steps of an eighth of their power of two, so that a pass that grows a little finds its blocks again.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.max(1).next_power_of_two() / 16).max(512);
    bytes.max(1).next_multiple_of(step)
}

impl Pool {
    pub(crate) fn new(gpu: &Arc<Gpu>, buffer_bytes_max: u64) -> Arc<Self> {
        let (shelf, buffer_bytes_max) = (Mutex::new(Shelf::Own), AtomicU64::new(buffer_bytes_max));
        Arc::new(Self { gpu: Arc::clone(gpu), buffer_bytes_max, shelf, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A zeroed block.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize, owner: Owner) -> Result<Block, DeviceError> {
        let of_arena = owner == Owner::Buffer && self.state().arena.open;
        let size = size_class(bytes);
        let left = self.buffer_bytes_max().saturating_sub(self.buffer_bytes());
        if owner == Owner::Buffer && size as u64 > left {
            return Err(DeviceError::OutOfMemory { needed_bytes: size as u64, free_bytes: left });
        }
        let address = if of_arena { self.in_arena(size)? } else { self.outside(size, owner)? };
        let mut state = self.state();
        if owner == Owner::Buffer {
            state.buffer_bytes += size as u64;
            state.outside_bytes += if of_arena { 0 } else { size as u64 };
        }
        state.arena.live += usize::from(of_arena);
        Ok(Block { pool: Arc::clone(self), address, bytes: size, owner, of_arena, extent: None })
    }

    /// A block for the next weight, and whether the weight is there already.
    pub(crate) fn weight(self: &Arc<Self>, bytes: usize) -> Result<(Block, bool), DeviceError> {
        let room = self.shelf.lock().unwrap_or_else(PoisonError::into_inner).room(&self.gpu, bytes)?;
        let Some(Room { extent, address, is_filled }) = room else { return Ok((self.alloc(bytes, Owner::Device)?, false)) };
        let block = Block { pool: Arc::clone(self), address, bytes, owner: Owner::Device, of_arena: false, extent: Some(extent) };
        Ok((block, is_filled))
    }

    /// Where weights go from here on.
    pub(crate) fn open_shelf(&self, shelf: Shelf) {
        *self.shelf.lock().unwrap_or_else(PoisonError::into_inner) = shelf;
    }

    /// Weights are only read from here on; what other processes can be handed of them.
    pub(crate) fn close_shelf(&self) -> Result<Option<SharedWeights>, DeviceError> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner).close(&self.gpu)
    }

    fn outside(&self, size: usize, owner: Owner) -> Result<Address, DeviceError> {
        let kept = {
            let mut state = self.state();
            let kept = state.free.get_mut(&size).and_then(Vec::pop);
            if kept.is_some() {
                state.free_bytes -= size as u64;
            }
            kept
        };
        match kept {
            Some(address) => Ok(address),
            None if owner == Owner::Device => self.fresh(size),
            None => {
                self.room(size)?;
                self.fresh(size)
            }
        }
    }

    fn in_arena(&self, size: usize) -> Result<Address, DeviceError> {
        let placed = self.state().arena.place(size);
        if let Some(address) = placed {
            return Ok(address);
        }
        // `alloc` has seen that the bound admits what lives. Of places that were dropped and of what chunks have unused at their ends no plan knows: a
        // pass on its way is not refused for them.
        let room = match self.room(size) {
            Err(DeviceError::OutOfMemory { .. }) => size as u64,
            room => room?,
        };
        let most = chunk_bytes(size, room).unwrap_or(size);
        let (address, bytes) = match self.fresh(most) {
            Ok(address) => (address, most),
            Err(DeviceError::OutOfMemory { .. }) => (self.fresh(size)?, size),
            Err(other) => return Err(other),
        };
        self.state().arena.chunks.push(Chunk { address, bytes, used: size, left: 0 });
        Ok(address)
    }

    /// Bytes that buffers may still take of the card, at least `size`: where that lacks, what is kept goes back first.
    fn room(&self, size: usize) -> Result<u64, DeviceError> {
        let room = || self.buffer_bytes_max().saturating_sub(self.state().held_bytes());
        if room() < size as u64 {
            self.trim()?;
        }
        Some(room()).filter(|room| *room >= size as u64).ok_or(DeviceError::OutOfMemory { needed_bytes: size as u64, free_bytes: room() })
    }

    /// From here on buffers are those of a pass.
    pub(crate) fn begin_pass(&self) -> Result<(), DeviceError> {
        self.end_pass();
        let mut state = self.state();
        if state.arena.live > 0 {
            return Err(DeviceError::Failed(format!("{} buffers of the last pass are still held", state.arena.live)));
        }
        state.arena.chunks.iter_mut().for_each(|chunk| chunk.used = 0);
        state.arena.open = true;
        for chunk in state.arena.chunks.iter().filter(|_| state.arena.is_poisoned) {
            // SAFETY: the chunk's own range; the stream orders the filling after the work that used it.
            unsafe { self.gpu.fill(chunk.address, 0xff, chunk.bytes) }?;
        }
        Ok(())
    }

    /// Whether each pass finds memory that holds no numbers: a test's way to see that nothing is read before it is written.
    pub(crate) fn poison_passes(&self, is_poisoned: bool) {
        self.state().arena.is_poisoned = is_poisoned;
    }

    /// The pass's buffers are read no more. What is in them stays until [`Pool::forget_passes`].
    pub(crate) fn end_pass(&self) {
        let arena = &mut self.state().arena;
        arena.open = false;
        arena.chunks.iter_mut().for_each(|chunk| chunk.left = chunk.left.max(chunk.used));
    }

    /// Zeroes what passes left. A pass that is open ends.
    pub(crate) fn forget_passes(&self) -> Result<(), DeviceError> {
        self.end_pass();
        for chunk in self.state().arena.chunks.iter_mut().filter(|chunk| chunk.left > 0) {
            // SAFETY: the chunk's own range; the stream orders the zeroing after the work that used it.
            unsafe { self.gpu.zero(chunk.address, chunk.left) }?;
            chunk.left = 0;
        }
        Ok(())
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

    /// Gives what is kept back to the driver, zeroed.
    fn trim(&self) -> Result<(), DeviceError> {
        let free = {
            let mut state = self.state();
            state.free_bytes = 0;
            let (mut free, open): (Vec<Address>, bool) =
                (std::mem::take(&mut state.free).into_values().flatten().collect(), state.arena.open);
            // Between passes nothing of the arena is in use but what is still held.
            let unused = |chunk: &Chunk| if open { chunk.used == 0 } else { state.arena.live == 0 };
            for chunk in state.arena.chunks.iter().filter(|chunk| unused(chunk)) {
                // SAFETY: the chunk's own range; the stream orders the zeroing after the work that used it.
                unsafe { self.gpu.zero(chunk.address, chunk.bytes) }?;
                free.push(chunk.address);
            }
            let keep: Vec<bool> = state.arena.chunks.iter().map(|chunk| !unused(chunk)).collect();
            let mut keep = keep.into_iter();
            state.arena.chunks.retain(|_| keep.next().unwrap_or(true));
            free
        };
        self.gpu.synchronize()?;
        for address in free {
            // SAFETY: from `malloc`, taken out of its list, and the stream has just drained.
            unsafe { self.gpu.free(address) }?;
        }
        Ok(())
    }

    fn buffer_bytes_max(&self) -> u64 {
        self.buffer_bytes_max.load(Relaxed)
    }

    /// Buffers take no more than so many bytes from now on; what is kept for later beyond them goes back to the driver: others may have been promised
    /// the card's memory.
    pub(crate) fn bound(&self, bytes: u64) -> Result<(), DeviceError> {
        self.buffer_bytes_max.store(bytes, Relaxed);
        if self.held_bytes() > bytes { self.trim() } else { Ok(()) }
    }

    /// What buffers have of the card, in use or kept for the next. Never more than the bound, but for buffers that lived beyond it when it was set, and for
    /// places of a pass that were dropped or are too small.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.state().held_bytes()
    }

    /// Bytes of live buffers.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        self.state().buffer_bytes
    }

    /// Bytes that may still be allocated, where `reserved` of the card's are spoken for.
    pub(crate) fn available_bytes(&self, reserved: u64) -> u64 {
        let (kept, used) = {
            let state = self.state();
            (state.held_bytes().saturating_sub(state.taken_bytes()), state.taken_bytes())
        };
        (self.gpu.free_bytes().unwrap_or(0) + kept).saturating_sub(reserved).min(self.buffer_bytes_max().saturating_sub(used))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // A card that failed frees its memory with its context.
        let _ = self.trim();
    }
}

/// Whether the driver refuses this process so many bytes on a card, as a limit makes it. Tries it.
///
/// # Errors
/// There is no such card, or the driver fails otherwise.
pub fn refuses(ordinal: usize, bytes: usize) -> Result<bool, DeviceError> {
    match Pool::new(&Gpu::open(ordinal)?, u64::MAX).alloc(bytes, Owner::Device) {
        Ok(_) => Ok(false),
        Err(DeviceError::OutOfMemory { .. }) => Ok(true),
        Err(other) => Err(other),
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

impl Drop for Block {
    fn drop(&mut self) {
        // What is shared goes with the last of its extent, here and elsewhere.
        if self.extent.is_some() {
            return;
        }
        if self.of_arena {
            let mut state = self.pool.state();
            state.arena.live -= 1;
            state.buffer_bytes -= self.bytes as u64;
            return;
        }
        // SAFETY: the block is this value's alone; the stream orders the zeroing after the work that used it.
        let zeroed = unsafe { self.pool.gpu.zero(self.address, self.bytes) };
        let mut state = self.pool.state();
        if self.owner == Owner::Buffer {
            state.buffer_bytes -= self.bytes as u64;
            state.outside_bytes -= self.bytes as u64;
        }
        // A block that could not be zeroed is never handed out again.
        if zeroed.is_ok() {
            state.free.entry(self.bytes).or_default().push(self.address);
            state.free_bytes += self.bytes as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Arena, Chunk, State, size_class};

    #[test]
    fn what_a_pass_has_used_is_taken_until_it_ends() {
        let chunk = |bytes| Chunk { address: 0, bytes, used: 0, left: 0 };
        let arena = Arena { chunks: vec![chunk(1000), chunk(500)], open: true, ..Arena::default() };
        let mut state = State { outside_bytes: 10, buffer_bytes: 10, free_bytes: 7, arena, ..State::default() };
        for (bytes, live) in [(600, 600), (450, 450), (300, 0)] {
            assert!(state.arena.place(bytes).is_some());
            state.buffer_bytes += live;
        }
        assert!(state.arena.place(200).is_none());
        assert_eq!((state.held_bytes(), state.taken_bytes()), (1517, 1360), "the third was dropped, and its place is not handed out again");
        state.arena.open = false;
        assert_eq!((state.held_bytes(), state.taken_bytes()), (1517, 1060));
    }

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
