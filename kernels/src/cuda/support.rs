//! Random fills, comparison on the card and busy work: for the gate, for benchmarks and for models of random weights.
//!
//! Never part of a pass.
#![expect(unsafe_code, reason = "launches kernels")]

use super::device::{CudaBuffer, CudaDevice, Element};
use super::driver::Address;
use super::memory::{Block, Owner};
use crate::{DType, DeviceError, Numbers, Use};

/// Of support.cu.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::NoUninit)]
struct Fill {
    out: Address,
    len: u64,
    key: u64,
    range: f32,
    centre: f32,
    word: u32,
    stored: u32,
    period: u64,
    half: u64,
}

impl Fill {
    fn uniform(key: u64, range: f32) -> Self {
        Self { key, range, ..Self::default() }
    }
}

/// Of support.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Compare {
    a: Address,
    b: Address,
    count: Address,
    len: u64,
}

/// Of support.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Busy {
    out: Address,
    rounds: u32,
    zero: u32,
}

const FILL_BLOCKS: u32 = 1024;

/// Launches at once, and not as part of a pass.
///
/// # Safety
/// As `CudaDevice::launch`.
unsafe fn launch<A: bytemuck::NoUninit>(device: &CudaDevice, kernel: &'static str, arguments: &A) -> Result<(), DeviceError> {
    device.gpu.bind()?;
    // SAFETY: the caller's.
    unsafe { device.gpu.launch_words(device.kernels.get(kernel), [FILL_BLOCKS, 1, 1], 256, 0, bytemuck::cast_slice(&[*arguments])) }
}

/// # Safety
/// `len` elements of the kernel's type from `out` on lie in one live allocation.
unsafe fn fill(device: &CudaDevice, kernel: &'static str, out: Address, len: usize, what: Fill) -> Result<(), DeviceError> {
    // SAFETY: `Fill` is support.cu's struct; the rest is the caller's.
    unsafe { launch(device, kernel, &Fill { out, len: len as u64, ..what }) }
}

/// Random numbers of a weight, from `out` on.
///
/// # Safety
/// So many elements from `out` on lie in one live allocation.
pub(super) unsafe fn fill_random(
    device: &CudaDevice,
    out: Address,
    (len, element): (usize, Element),
    dtype: DType,
    numbers: Numbers,
) -> Result<(), DeviceError> {
    let Numbers { key, centre, range } = numbers;
    let stored = [DType::F32, DType::F16, DType::BF16].iter().position(|known| *known == dtype).unwrap_or(0) as u32;
    let kernel = if element == Element::F32 { "fill_uniform_state" } else { "fill_uniform" };
    // SAFETY: the caller's.
    unsafe { fill(device, kernel, out, len, Fill { key, range, centre, stored, ..Fill::default() }) }
}

impl CudaDevice {
    /// Whether the memory of a pass holds no numbers when it begins. For tests: nothing may read what it did not write.
    #[doc(hidden)]
    pub fn poison_passes(&mut self, is_poisoned: bool) {
        self.pool.poison_passes(is_poisoned);
    }

    /// What buffers have of the card's memory, in use or kept for the next. For tests.
    #[doc(hidden)]
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.pool.held_bytes()
    }

    /// Fills a buffer with numbers in [-range, range): element 4 i + j is `(2 uniform(philox(key, [i, i >> 32, 0, 1])[j]) - 1) range`.
    ///
    /// # Errors
    /// A failed device.
    pub fn fill_uniform(&mut self, buffer: &mut CudaBuffer, key: u64, range: f32) -> Result<(), DeviceError> {
        let kernel = if buffer.element == self.element(Use::Activation) { "fill_uniform" } else { "fill_uniform_state" };
        // SAFETY: the buffer's own length and type.
        unsafe { fill(self, kernel, buffer.address(), buffer.len, Fill::uniform(key, range)) }
    }

    /// Writes one 32-bit word everywhere in a block.
    pub(super) fn fill_word(&self, block: &Block, word: u32) -> Result<(), DeviceError> {
        // SAFETY: the block's own length.
        unsafe { fill(self, "fill_word", block.address(), block.bytes() / 4, Fill { word, ..Fill::default() }) }
    }

    /// Random activations in part of a block.
    pub(super) fn fill_part(
        &self,
        block: &Block,
        offset: usize,
        element: Element,
        len: usize,
        key: u64,
        range: f32,
    ) -> Result<(), DeviceError> {
        assert!(offset + len * element.bytes() <= block.bytes(), "a fill past the end of its block");
        let kernel = if element == self.element(Use::Activation) { "fill_uniform" } else { "fill_uniform_state" };
        // SAFETY: checked just above.
        unsafe { fill(self, kernel, block.address() + offset as u64, len, Fill::uniform(key, range)) }
    }

    /// Random activations in part of a block, in rows of `period`: the second `half` of a row is the first again, negated or not, and what is left is
    /// zero. A product of such rows with negated ones along the inner dimension is zero but for rounding, and that depends on the order of its sum.
    pub(super) fn fill_cancelling(
        &self,
        (block, offset): (&Block, usize),
        len: usize,
        key: u64,
        range: f32,
        (period, half, negated): (usize, usize, bool),
    ) -> Result<(), DeviceError> {
        assert!(offset + len * self.precision.bytes() <= block.bytes() && period > 0, "a fill past the end of its block");
        let what = Fill { word: u32::from(negated), period: period as u64, half: half as u64, ..Fill::uniform(key, range) };
        // SAFETY: checked just above.
        unsafe { fill(self, "fill_cancelling", block.address() + offset as u64, len, what) }
    }

    /// How many of the first `bytes / 4` words of two places differ; waits.
    pub(super) fn unequal(
        &mut self,
        (a, a_offset): (&Block, usize),
        (b, b_offset): (&Block, usize),
        bytes: usize,
    ) -> Result<u32, DeviceError> {
        assert!(
            bytes.is_multiple_of(4) && a_offset + bytes <= a.bytes() && b_offset + bytes <= b.bytes(),
            "a comparison past the end of a block"
        );
        let count = self.pool.alloc(4, Owner::Device)?;
        let arguments =
            Compare { a: a.address() + a_offset as u64, b: b.address() + b_offset as u64, count: count.address(), len: (bytes / 4) as u64 };
        // SAFETY: `Compare` is support.cu's struct; ranges were checked; the count, zero in a fresh block, is all that is written.
        unsafe { launch(self, "count_unequal", &arguments) }?;
        let mut unequal = 0;
        self.staging.download(&count, 0, 4, |_, bytes| {
            if let &[a, b, c, d] = bytes {
                unequal = u32::from_le_bytes([a, b, c, d]);
            }
        })?;
        Ok(unequal)
    }

    /// Keeps the card's multiprocessors busy on the side stream, for some milliseconds.
    pub(super) fn busy(&self, spare: &Block) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        let blocks = self.gpu.properties.multiprocessors.unsigned_abs();
        let arguments = [Busy { out: spare.address(), rounds: 1 << 20, zero: 0 }];
        // SAFETY: `Busy` is support.cu's struct; the one element it might write is the spare block's.
        unsafe { self.gpu.launch_beside(self.kernels.get("busy"), [blocks, 1, 1], 256, bytemuck::cast_slice(&arguments)) }
    }
}
