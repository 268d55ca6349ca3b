//! Gate, up and SwiGLU: Hopper's kernel for all of it, or the product and then SwiGLU's kernel.
//!
//! Never a choice that results could show: the gate has seen that both give the same bytes, or a shape has the two kernels for good. Which is taken of so
//! many rows is a matter of time.
#![expect(unsafe_code, reason = "launches kernels")]

use super::blas::Operands;
use super::device::{CudaBuffer, CudaDevice, CudaWeight};
use super::driver::Address;
use super::linear::{launch_product, linear_together};
use super::plan::{Choice, Key, Product};
use super::record::Access;
use super::rows;
use super::tables::runs;
use super::tiles::{ALIGN_COLUMNS, PRODUCT_BYTES, PRODUCT_THREADS, TiledProduct};
use super::weights::together;
use crate::{DeviceError, Layout, Use};

/// The parameters of gate_up.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct GateUp {
    product: TiledProduct,
    out: Address,
    width: u32,
    zero: [u32; 29],
}

/// The longest inner length that the one kernel is for. Many rows of a long one are bound by the card's power, not by time: there SwiGLU's kernel, in which
/// the multiplying units rest, costs little, and cuBLASLt's products need less power than ours (NOTES.md, version 21).
const INPUTS_MAX: usize = 2048;

/// Rows from which on it is the shorter: with fewer its tiles leave multiprocessors idle, for which cuBLASLt has others.
pub(super) const ROWS_MIN: usize = 1024;

/// Whether a weight of this shape may be gate and up, for this card's kernel: each wider than what it reads, as gates are, and not as wide as a head.
pub(super) fn is_for(device: &CudaDevice, outputs: usize, inputs: usize) -> bool {
    let width = outputs / 2;
    let whole = outputs.is_multiple_of(2) && width.is_multiple_of(ALIGN_COLUMNS) && inputs.is_multiple_of(ALIGN_COLUMNS);
    whole && inputs <= INPUTS_MAX && (inputs + 1..=6 * inputs).contains(&width) && device.kernels.find("gate_up").is_some()
}

/// out = SwiGLU of the halves of x W, for `rows` rows, as planned.
///
/// # Safety
/// As `linear::launch_product`.
pub(super) unsafe fn launch(
    device: &mut CudaDevice,
    key: Key,
    rows: usize,
    operands: Operands,
    access: Access<'_>,
) -> Result<(), DeviceError> {
    let Key { outputs, inputs, .. } = key;
    let width = outputs / 2;
    if device.plan.get(key) != Some(Choice::Own) {
        let gate = device.scratch("gate and up", rows * outputs * device.precision.bytes())?;
        let up = gate + (width * device.precision.bytes()) as u64;
        let product = Key { product: Product::Linear, ..key };
        // SAFETY: the caller's, and the scratch is as large as the product's out.
        unsafe { launch_product(device, product, rows, Operands { out: gate, ..operands }, Access { writes: &[gate], ..access }) }?;
        let positions = device.table(&vec![0_u32; rows])?;
        // SAFETY: gate and up were just written; out is the caller's.
        return unsafe { rows::launch_swiglu(device, [gate, up, operands.out, positions], (rows, width, outputs), access) };
    }
    let multiprocessors = device.gpu.properties.multiprocessors.unsigned_abs() as usize;
    let (product, blocks) = TiledProduct::new((operands.x, operands.weight), rows, (outputs, inputs), multiprocessors)?;
    let arguments = GateUp { product, out: operands.out, width: width as u32, zero: [0; 29] };
    let kernel = device.kernels.get("gate_up");
    // SAFETY: `GateUp` is gate_up.cu's struct; x and weight are as large as their maps say, and no row or column past them is written; the rest is the
    // caller's.
    unsafe { device.launch(kernel, [blocks, 1, 1], PRODUCT_THREADS, PRODUCT_BYTES, &arguments, access) }
}

impl CudaDevice {
    /// The one kernel is taken from so many rows on, where it is planned. For tests: results are the same.
    #[doc(hidden)]
    pub fn gate_up_from(&mut self, rows: usize) {
        self.gate_up_rows = rows;
        self.forget_graphs();
    }
}

pub(super) fn linear_swiglu(
    device: &mut CudaDevice,
    layout: &Layout,
    x: &CudaBuffer,
    weights: [&CudaWeight; 2],
    gate_up: &mut [CudaBuffer],
    out: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let ((width, inputs), outputs) = (weights[0].shape, together(weights.into_iter()));
    let key = outputs.map(|outputs| Key { product: Product::LinearSwiglu, outputs, inputs });
    let rows: usize = runs(layout).iter().map(ExactSizeIterator::len).sum();
    let is_own = |key: &Key| weights[1].shape.0 == width && device.plan.get(*key) == Some(Choice::Own) && !device.unpinned;
    let Some(key) = key.filter(|key| rows >= device.gate_up_rows && is_own(key)) else {
        linear_together(device, layout, x, &weights.map(|weight| (weight, None)), gate_up)?;
        return rows::swiglu(device, layout, &gate_up[0], &gate_up[1], out);
    };
    assert!(x.len == layout.rows() * inputs && out.len == layout.rows() * width, "x or out is not of the weights' width");
    let (from, to) = (device.read("x", x, Use::Activation), device.read("out", out, Use::Activation));
    let at = |first: Address, row: usize, width: usize| first + (row * width * device.precision.bytes()) as u64;
    let parts: Vec<_> = runs(layout).into_iter().map(|run| (run.len(), at(from, run.start, inputs), at(to, run.start, width))).collect();
    for (rows, x, out) in parts {
        let operands = Operands { weight: weights[0].address(), x, bias: 0, out, accumulate: false, added: 0 };
        // SAFETY: the sizes were checked above; a run lies inside the layout and begins at a multiple of 128 rows; `out` is the only unique reference.
        unsafe { launch(device, key, rows, operands, Access { reads: &[from], writes: &[to] }) }?;
    }
    Ok(())
}
