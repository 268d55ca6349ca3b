//! The head and the loss, in chunks of rows whose size is a function of the vocabulary alone.
//!
//! Never holds the logits of more than one chunk.
#![expect(unsafe_code, reason = "launches kernels")]

use super::ROW_ALIGN;
use super::blas::{Operands, logits_pitch};
use super::device::{CudaBuffer, CudaDevice, CudaWeight};
use super::driver::{Address, Kernel};
use super::linear::launch_product;
use super::plan::{Key, Product, Slices};
use super::record::Access;
use super::tables::runs;
use crate::{DeviceError, Layout, Use};

/// Bytes of float32 logits of a chunk, about.
pub(super) const LOGITS_BYTES: usize = 512 << 20;

/// Rows of a chunk.
pub(super) fn chunk_rows(vocabulary: usize) -> usize {
    (LOGITS_BYTES / 4 / vocabulary.max(1) / ROW_ALIGN).clamp(1, 64) * ROW_ALIGN
}

/// The parameters of head_loss.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct HeadLoss {
    logits: Address,
    dlogits: Address,
    losses: Address,
    targets: Address,
    weights: Address,
    positions: Address,
    first_row: u32,
    vocabulary: u32,
    pitch: u32,
    piece: u32,
    rows: u32,
    zero: u32,
}

/// The kernels of head_loss_cluster.cu: blocks that hold a row, and columns of it that a block can have.
const CLUSTERS: [(&str, usize, usize); 5] = [
    ("head_loss_1", 1, 16_384),
    ("head_loss_2", 2, 16_384),
    ("head_loss_4", 4, 16_384),
    ("head_loss_8", 8, 16_384),
    ("head_loss_8_wide", 8, PIECE_MAX),
];

/// The most of them.
const PIECE_MAX: usize = 20_480;

/// Shared memory that these kernels are allowed.
pub(super) const CLUSTER_BYTES: u32 = (PIECE_MAX * size_of::<f32>()) as u32;

/// Rows that the blocks of a cluster do one after another; `ROWS` there.
const CLUSTER_ROWS: usize = 4;

/// Columns of a row that each block of a cluster has; the last has what is left.
fn piece(pitch: usize, blocks: usize) -> usize {
    pitch.div_ceil(blocks).next_multiple_of(8)
}

/// How the rows of a vocabulary are taken: by which kernel, how many by a group of how many blocks, and how many columns of a row a block has. Where
/// blocks can hold a row between them and the card lets them read one another, it is read once.
struct Rows {
    kernel: Kernel,
    rows: usize,
    blocks: usize,
    piece: usize,
    shared: u32,
}

impl Rows {
    fn of(device: &CudaDevice, pitch: usize) -> Self {
        let fits = CLUSTERS.into_iter().find(|(_, blocks, most)| piece(pitch, *blocks) <= *most);
        match fits.and_then(|(name, blocks, _)| Some((device.kernels.find(name)?, blocks))) {
            Some((kernel, blocks)) => {
                let piece = piece(pitch, blocks);
                Self { kernel, rows: CLUSTER_ROWS, blocks, piece, shared: (piece * size_of::<f32>()) as u32 }
            }
            None => Self { kernel: device.kernels.get("head_loss"), rows: 1, blocks: 1, piece: pitch, shared: 0 },
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct HeadGradient {
    parts: Address,
    dx: Address,
    len: u64,
    count: u32,
    zero: u32,
}

/// dx of a chunk of `rows` rows: a product for each slice of the vocabulary, then their sum.
///
/// # Safety
/// `dlogits` and `dx`, a part of `whole_dx`, hold so many rows; `parts` holds a float32 result for each slice.
unsafe fn gradient(
    device: &mut CudaDevice,
    head: &CudaWeight,
    rows: usize,
    [dlogits, parts, dx]: [Address; 3],
    whole_dx: Address,
) -> Result<(), DeviceError> {
    let (outputs, inputs) = head.shape;
    let (slices, len) = (Slices::new(outputs, inputs), rows * inputs);
    let operands = Operands { weight: head.address(), x: dlogits, bias: 0, out: parts, accumulate: false, added: 0 };
    let access = Access { reads: &[dlogits], writes: &[parts] };
    // SAFETY: the caller's.
    unsafe { launch_product(device, Key { product: Product::LogitsBackward, outputs, inputs }, rows, operands, access) }?;
    if slices.rest > 0 {
        let operands = Operands { out: parts + (slices.count * len * 4) as u64, ..operands };
        // SAFETY: the caller's; the rest's part follows the slices'.
        unsafe { launch_product(device, Key { product: Product::LogitsBackwardRest, outputs, inputs }, rows, operands, access) }?;
    }
    let arguments = HeadGradient { parts, dx, len: len as u64, count: slices.parts() as u32, zero: 0 };
    let kernel = device.kernels.get("head_gradient");
    // SAFETY: `HeadGradient` is head_loss.cu's struct; a thread eight elements, and rows are a multiple of 128; dx is all that is written.
    unsafe { device.launch(kernel, [len.div_ceil(8 * 256), 1, 1], 256, 0, &arguments, Access { reads: &[parts], writes: &[whole_dx] }) }
}

#[expect(clippy::too_many_arguments, reason = "one argument an operand")]
pub(super) fn head_loss(
    device: &mut CudaDevice,
    layout: &Layout,
    x: &CudaBuffer,
    head: &CudaWeight,
    targets: &[u32],
    weights: &[f32],
    losses: &mut CudaBuffer,
    dx: Option<&mut CudaBuffer>,
) -> Result<(), DeviceError> {
    let (vocabulary, inputs) = head.shape;
    let rows = layout.rows();
    assert!(x.len == rows * inputs && losses.len == rows, "x or losses is not of the layout's rows");
    assert!(targets.len() == rows && weights.len() == rows, "one target and one weight a row");
    assert!(dx.as_ref().is_none_or(|dx| dx.len == x.len), "dx is not of x's size");
    let live = layout.positions().iter().zip(targets).filter(|(position, _)| **position != u32::MAX);
    assert!(live.clone().all(|(_, target)| (*target as usize) < vocabulary), "a target is not below {vocabulary}");

    let positions = device.positions(layout)?;
    let (chunk, pitch, bytes) = (chunk_rows(vocabulary), logits_pitch(vocabulary), device.precision.bytes());
    let logits = device.scratch("logits", chunk.min(rows) * pitch * 4)?;
    let parts = if dx.is_some() {
        device.scratch("head parts", chunk.min(rows) * Slices::new(vocabulary, inputs).parts() * inputs * 4)?
    } else {
        0
    };
    let dlogits = if dx.is_some() { device.scratch("dlogits", chunk.min(rows) * pitch * bytes)? } else { 0 };
    let (x, losses) = (device.read("x", x, Use::Activation), device.read("losses", losses, Use::State));
    let dx = dx.map(|dx| device.read("dx", dx, Use::Activation));
    let (targets, weights) = (device.table(targets)?, device.table(weights)?);

    let by = Rows::of(device, pitch);
    for run in runs(layout) {
        for first in run.clone().step_by(chunk) {
            let rows = chunk.min(run.end - first);
            let offset = (first * inputs * bytes) as u64;
            let forward = Operands { weight: head.address(), x: x + offset, bias: 0, out: logits, accumulate: false, added: 0 };
            let access = Access { reads: &[x], writes: &[logits] };
            // SAFETY: the sizes were checked above; the scratch holds a chunk's logits; chunks start at multiples of 128 rows.
            unsafe { launch_product(device, Key { product: Product::Logits, outputs: vocabulary, inputs }, rows, forward, access) }?;
            let arguments = HeadLoss {
                logits,
                dlogits,
                losses,
                targets,
                weights,
                positions,
                first_row: first as u32,
                vocabulary: vocabulary as u32,
                pitch: pitch as u32,
                piece: by.piece as u32,
                rows: rows as u32,
                zero: 0,
            };
            let access = Access { reads: &[logits], writes: &[losses, dlogits] };
            let grid = [rows.div_ceil(by.rows) * by.blocks, 1, 1];
            // SAFETY: `HeadLoss` is head_loss.cuh's struct; the kernel's blocks for all rows of the chunk, a piece of a row in the shared memory of
            // each; losses is the only buffer written beside scratch.
            unsafe { device.launch(by.kernel, grid, 512, by.shared, &arguments, access) }?;
            if let Some(dx) = dx {
                // SAFETY: as the forward product; dx is of x's size, the scratch of a chunk's.
                unsafe { gradient(device, head, rows, [dlogits, parts, dx + offset], dx) }?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{CLUSTERS, PIECE_MAX, chunk_rows, logits_pitch, piece};

    /// So no block waits for a copy of nothing, and none has padding alone, whose gradients would be made of no logits.
    #[test]
    fn every_block_of_a_cluster_has_columns_of_the_vocabulary() {
        for vocabulary in 1..=8 * PIECE_MAX {
            let pitch = logits_pitch(vocabulary);
            let fits = CLUSTERS.into_iter().find(|(_, blocks, most)| piece(pitch, *blocks) <= *most);
            let (name, blocks, most) = fits.unwrap();
            let piece = piece(pitch, blocks);
            assert!((blocks - 1) * piece < vocabulary && blocks * piece >= pitch, "{name} of {vocabulary}");
            assert!(piece.is_multiple_of(8) && piece <= most && pitch - vocabulary < 8, "{name} of {vocabulary}");
        }
    }

    #[test]
    fn chunks_are_whole_tiles() {
        assert_eq!(chunk_rows(32_000), 4096);
        assert_eq!(chunk_rows(128_256), 1024);
        assert_eq!(chunk_rows(152_064), 768);
        assert_eq!(chunk_rows(256), 8192);
        assert_eq!(chunk_rows(1 << 24), 128);
    }
}
