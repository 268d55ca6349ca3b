//! Gate, up and SwiGLU: Hopper's kernel for all of it, or the product and then SwiGLU's kernel.
//!
//! Never a choice that results could show: a shape has the two kernels until the gate has seen that both give the same bytes. Which is taken of so many rows
//! from then on is a matter of time.
#![expect(unsafe_code, reason = "launches kernels")]

use super::device::{CudaBuffer, CudaDevice, CudaWeight};
use super::driver::Address;
use super::linear::linear_together;
use super::plan::GateUp as Choice;
use super::record::Access;
use super::rows;
use super::tables::runs;
use super::tiles::{ALIGN_COLUMNS, PRODUCT_BYTES, PRODUCT_THREADS, TensorMap, TiledProduct};
use super::weights::together;
use crate::{DeviceError, Layout, Use};

/// The parameters of gate_up.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct GateUp {
    product: TiledProduct,
    out: TensorMap,
    width: u32,
    zero: [u32; 31],
}

/// The longest inner length that the one kernel is for: as far as it was measured. The longer, the less of the whole SwiGLU's kernel is, which it saves.
const INPUTS_MAX: usize = 4096;

/// Rows from which on it is the shorter: with fewer its tiles leave multiprocessors idle, for which cuBLASLt has others.
pub(super) const ROWS_MIN: usize = 1024;

/// Whether a weight of this shape (outputs and inputs) may be gate and up, for this card's kernel: each wider than what it reads, as gates are, and not as
/// wide as a head.
fn is_for(device: &CudaDevice, (outputs, inputs): (usize, usize)) -> bool {
    let width = outputs / 2;
    let whole = outputs.is_multiple_of(2) && width.is_multiple_of(ALIGN_COLUMNS) && inputs.is_multiple_of(ALIGN_COLUMNS);
    whole && inputs <= INPUTS_MAX && (inputs + 1..=6 * inputs).contains(&width) && device.kernels.find("gate_up").is_some()
}

/// Plans a weight as gate and up, if it may be those.
pub(super) fn plan(device: &mut CudaDevice, shape: (usize, usize)) {
    if device.plan.gate_up(shape).is_none() && is_for(device, shape) {
        device.plan.set_gate_up(shape, Choice::Apart);
    }
}

/// out = SwiGLU of the halves of x W by the one kernel, for `rows` rows, a multiple of 128, and a weight of `shape` (outputs of both halves, and inputs).
///
/// # Safety
/// x, weight and out begin live memory of these sizes, 256-byte aligned; `access` names the buffers that x and out are parts of, and out overlaps nothing.
pub(super) unsafe fn launch(
    device: &mut CudaDevice,
    shape: (usize, usize),
    rows: usize,
    [x, weight, out]: [Address; 3],
    access: Access<'_>,
) -> Result<(), DeviceError> {
    let width = shape.0 / 2;
    let (product, blocks) = TiledProduct::new((x, weight), rows, shape, device.multiprocessors())?;
    let arguments = GateUp { product, out: TiledProduct::out(out, rows, width)?, width: width as u32, zero: [0; 31] };
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

    /// Plans gate, up and SwiGLU of this shape (outputs of both, and inputs) otherwise; for tests and measurements. What the gate found of it no longer counts.
    #[doc(hidden)]
    pub fn pin_gate_up(&mut self, shape: (usize, usize), choice: Choice) {
        self.plan.set_gate_up(shape, choice);
        self.forget_graphs();
        if let Some(report) = &mut self.verdict {
            report.gate_ups.retain(|check| check.shape != shape);
        }
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
    let shape = outputs.filter(|outputs| *outputs == 2 * width).map(|outputs| (outputs, inputs));
    let rows: usize = runs(layout).iter().map(ExactSizeIterator::len).sum();
    let is_own = |shape: &(usize, usize)| device.plan.gate_up(*shape) == Some(Choice::Own) && !device.unpinned;
    let Some(shape) = shape.filter(|shape| rows >= device.gate_up_rows && is_own(shape)) else {
        linear_together(device, layout, x, &weights.map(|weight| (weight, None)), gate_up)?;
        return rows::swiglu(device, layout, &gate_up[0], &gate_up[1], out);
    };
    assert!(x.len == layout.rows() * inputs && out.len == layout.rows() * width, "x or out is not of the weights' width");
    let (from, to) = (device.read("x", x, Use::Activation), device.read("out", out, Use::Activation));
    let at = |first: Address, row: usize, width: usize| first + (row * width * device.precision.bytes()) as u64;
    let parts: Vec<_> = runs(layout).into_iter().map(|run| (run.len(), at(from, run.start, inputs), at(to, run.start, width))).collect();
    for (rows, x, out) in parts {
        // SAFETY: the sizes were checked above; a run lies inside the layout and begins at a multiple of 128 rows; `out` is the only unique reference.
        unsafe { launch(device, shape, rows, [x, weights[0].address(), out], Access { reads: &[from], writes: &[to] }) }?;
    }
    Ok(())
}
