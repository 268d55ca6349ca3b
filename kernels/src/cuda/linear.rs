//! Products with frozen weights: the pinned algorithm, or the fixed-tile kernel where there is none.
//!
//! Never chooses by the number of rows but among what was found equal byte for byte, and never falls back while a pass runs.
#![expect(unsafe_code, reason = "launches products")]

use std::sync::Arc;

use super::blas::{Operands, Prepared, logits_pitch, number};
use super::device::{Beside, CudaBuffer, CudaDevice, CudaWeight};
use super::driver::Address;
use super::plan::{Choice, Key, Product, Slices};
use super::record::Access;
use super::tables::runs;
use super::weights::together;
use super::{ROW_ALIGN, buckets, energy, gate_up, head};
use crate::{DeviceError, Layout, Use};

/// Rows for which the heuristic is asked: many, since fused passes are where the time goes.
const REPRESENTATIVE_ROWS: usize = 4096;

/// Row counts that a pinned algorithm must take before it is pinned: every one up to 4096, then steps to 65,536.
fn row_counts() -> impl Iterator<Item = usize> {
    (1..=32).chain([48, 64, 96, 128, 192, 256, 384, 512]).map(|tiles| tiles * ROW_ALIGN)
}

/// The parameters of gemm.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Gemm {
    x: Address,
    weight: Address,
    bias: Address,
    added: Address,
    out: Address,
    inner: u32,
    columns: u32,
    x_pitch: u32,
    out_pitch: u32,
    accumulate: u32,
    wide_out: u32,
}

/// The products of a weight of this shape.
fn products(outputs: usize, inputs: usize) -> Vec<Product> {
    let rest = Slices::new(outputs, inputs).rest > 0;
    Product::all().into_iter().filter(|product| *product != Product::LogitsBackwardRest || rest).collect()
}

/// Pins an algorithm for every product of a weight of this shape, and plans it as gate and up where it may be those.
pub(super) fn plan(device: &mut CudaDevice, outputs: usize, inputs: usize) -> Result<(), DeviceError> {
    for product in products(outputs, inputs) {
        let key = Key { product, outputs, inputs };
        let choice = match device.plan.get(key) {
            Some(Choice::Own) => continue,
            Some(Choice::CublasLt(words)) if takes_every_count(device, key, words)? => continue,
            Some(Choice::CublasLt(_)) => {
                return Err(DeviceError::Unsupported(format!(
                    "cuBLASLt refuses the plan's algorithm for {} {outputs} {inputs}",
                    product.name()
                )));
            }
            None if device.plans_fixed_tiles => Choice::Own,
            None => choose(device, key)?,
        };
        device.plan.set(key, choice);
        if let Choice::CublasLt(words) = choice {
            buckets::pin(device, key, words)?;
        }
    }
    gate_up::plan(device, (outputs, inputs));
    Ok(())
}

/// The first of the heuristic's offers that takes every number of rows: of the algorithm that it puts first, those whose tiles take little energy; then the
/// others, in the heuristic's order.
fn choose(device: &CudaDevice, key: Key) -> Result<Choice, DeviceError> {
    let prepared = Prepared::new(key, REPRESENTATIVE_ROWS.min(rows_max(key)), device.precision)?;
    let mut offers = device.blas.offers(&prepared)?;
    let first = offers.first().and_then(|words| number(*words));
    let place = |words| energy::place(device, key, &prepared, words).filter(|_| number(words) == first);
    offers.sort_by_key(|words| place(*words).unwrap_or(usize::MAX));
    for words in offers {
        if takes_every_count(device, key, words)? {
            return Ok(Choice::CublasLt(words));
        }
    }
    Ok(Choice::Own)
}

/// Rows that one call of a product has at most.
pub(super) fn rows_max(key: Key) -> usize {
    match key.product {
        Product::Logits | Product::LogitsBackward | Product::LogitsBackwardRest => head::chunk_rows(key.outputs),
        _ => usize::MAX,
    }
}

fn takes_every_count(device: &CudaDevice, key: Key, words: [u64; 8]) -> Result<bool, DeviceError> {
    takes(device, key, words, 0, usize::MAX)
}

/// Whether an algorithm takes every number of rows above `above` and up to `end`.
pub(super) fn takes(device: &CudaDevice, key: Key, words: [u64; 8], above: usize, end: usize) -> Result<bool, DeviceError> {
    for rows in row_counts().filter(|rows| *rows > above && *rows <= end) {
        if device.blas.check(&Prepared::new(key, rows, device.precision)?, words).is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// One product with `rows` rows, a multiple of 128, by itself. The operands of the products of a slice, or of the rest, are those of the whole.
///
/// # Safety
/// `operands` are live memory of the sizes that `key` and `rows` say, 256-byte aligned; `out` overlaps nothing else.
pub(super) unsafe fn product(device: &mut CudaDevice, key: Key, rows: usize, operands: Operands) -> Result<(), DeviceError> {
    // SAFETY: the caller's.
    unsafe { launch_product(device, key, rows, operands, Access { reads: &[operands.x, operands.out], writes: &[operands.out] }) }
}

/// The same within a pass.
///
/// # Safety
/// As `product`; `access` names the buffers that x and out are parts of.
pub(super) unsafe fn launch_product(
    device: &mut CudaDevice,
    key: Key,
    rows: usize,
    mut operands: Operands,
    access: Access<'_>,
) -> Result<(), DeviceError> {
    if key.product == Product::LogitsBackwardRest {
        let Slices { count, width, .. } = Slices::new(key.outputs, key.inputs);
        let columns = (count * width * device.precision.bytes()) as u64;
        operands.weight += columns * key.inputs as u64;
        operands.x += columns;
    }
    let choice = device.plan.get_for(key, rows).ok_or_else(|| DeviceError::Failed(format!("{key:?} is not planned")))?;
    let words = match choice {
        // SAFETY: the caller's.
        Choice::Own => return unsafe { own_product(device, key, rows, operands, access) },
        Choice::CublasLt(words) => words,
    };
    let workspace_bytes = match device.prepared.get(&(key, rows)) {
        Some(ready) => ready.workspace_bytes,
        None => {
            let ready = ready(device, key, rows, words)?;
            device.prepared.entry((key, rows)).insert_entry(ready).get().workspace_bytes
        }
    };
    // Two products that need the workspace must not run side by side.
    let workspace = if workspace_bytes > 0 { device.blas.workspace() } else { 0 };
    let writes: Vec<Address> = access.writes.iter().copied().chain([workspace]).collect();
    // SAFETY: the caller's, and the algorithm was checked for just this product.
    unsafe { device.launch_product(key, rows, operands, Access { writes: &writes, ..access }) }
}

/// Carries out a product that [`launch_product`] made ready.
///
/// # Safety
/// As `launch_product`.
pub(super) unsafe fn run(device: &CudaDevice, key: Key, rows: usize, operands: Operands) -> Result<(), DeviceError> {
    let ready = device.prepared.get(&(key, rows));
    let Ready { prepared, words, .. } = ready.ok_or_else(|| DeviceError::Failed(format!("{key:?} is not prepared for {rows} rows")))?;
    device.gpu.bind()?;
    // SAFETY: the caller's.
    unsafe { device.blas.run(prepared, *words, operands) }
}

/// A product with so many rows, ready to run.
#[derive(Debug)]
pub(super) struct Ready {
    prepared: Prepared,
    words: [u64; 8],
    workspace_bytes: usize,
}

fn ready(device: &CudaDevice, key: Key, rows: usize, pinned: [u64; 8]) -> Result<Ready, DeviceError> {
    let prepared = Prepared::new(key, rows, device.precision)?;
    let words = if device.unpinned { device.blas.usual(&prepared)?.unwrap_or(pinned) } else { pinned };
    let refused = || DeviceError::Unsupported(format!("cuBLASLt's pinned algorithm for {key:?} refuses {rows} rows"));
    let workspace_bytes = device.blas.check(&prepared, words).ok_or_else(refused)?.workspace_bytes;
    Ok(Ready { prepared, words, workspace_bytes })
}

/// The same by the fixed-tile kernel, slice by slice where there are several.
///
/// # Safety
/// As `launch_product`.
unsafe fn own_product(device: &mut CudaDevice, key: Key, rows: usize, operands: Operands, access: Access<'_>) -> Result<(), DeviceError> {
    let slices = Slices::new(key.outputs, key.inputs);
    let (inputs, outputs, pitch) = (key.inputs, key.outputs, logits_pitch(key.outputs));
    let (kernel, count, inner, columns, x_pitch, out_pitch) = match key.product {
        Product::Linear | Product::LinearBias => ("gemm", 1, inputs, outputs, inputs, outputs),
        Product::Logits => ("gemm", 1, inputs, outputs, inputs, pitch),
        Product::LinearBackward => ("gemm_transposed", 1, outputs, inputs, outputs, inputs),
        Product::LogitsBackward => ("gemm_transposed", slices.count, slices.width, inputs, pitch, inputs),
        Product::LogitsBackwardRest => ("gemm_transposed", 1, slices.rest, inputs, pitch, inputs),
    };
    let wide_out = matches!(key.product, Product::Logits | Product::LogitsBackward | Product::LogitsBackwardRest);
    let bytes = device.precision.bytes();
    let kernel = device.kernels.get(kernel);
    for slice in 0..count {
        let arguments = Gemm {
            x: operands.x + (slice * inner * bytes) as u64,
            weight: operands.weight + (slice * inner * columns * bytes) as u64,
            bias: if key.product == Product::LinearBias { operands.bias } else { 0 },
            added: operands.added,
            out: operands.out + (slice * rows * columns * 4) as u64,
            inner: inner as u32,
            columns: columns as u32,
            x_pitch: x_pitch as u32,
            out_pitch: out_pitch as u32,
            accumulate: u32::from(operands.accumulate),
            wide_out: u32::from(wide_out),
        };
        // SAFETY: `Gemm` is gemm.cu's struct; blocks cover rows / 64 x columns / 64, and the kernel guards the last columns. The rest is the
        // caller's.
        unsafe { device.launch(kernel, [rows / 64, columns.div_ceil(64), 1], 128, 0, &arguments, access) }?;
    }
    Ok(())
}

/// A product over the rows of a layout: its runs of tiles, one call each.
///
/// # Safety
/// As `product`, for buffers of `layout.rows()` rows; `access` names them.
unsafe fn over_rows(
    device: &mut CudaDevice,
    layout: &Layout,
    key: Key,
    widths: (usize, usize),
    operands: Operands,
    access: Access<'_>,
) -> Result<(), DeviceError> {
    let bytes = device.precision.bytes();
    for run in runs(layout) {
        let operands = Operands {
            x: operands.x + (run.start * widths.0 * bytes) as u64,
            out: operands.out + (run.start * widths.1 * bytes) as u64,
            added: if operands.added == 0 { 0 } else { operands.added + (run.start * widths.1 * bytes) as u64 },
            ..operands
        };
        // SAFETY: the run lies inside the layout; its start is a multiple of 128 rows, so addresses stay 256-byte aligned.
        unsafe { launch_product(device, key, run.len(), operands, access) }?;
    }
    Ok(())
}

pub(super) fn linear(
    device: &mut CudaDevice,
    layout: &Layout,
    x: &CudaBuffer,
    weight: &CudaWeight,
    bias: Option<&CudaWeight>,
    added: Option<&CudaBuffer>,
    out: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let (outputs, inputs) = weight.shape;
    assert!(added.is_none_or(|added| added.len == out.len), "what is added is not of out's size");
    assert!(x.len == layout.rows() * inputs && out.len == layout.rows() * outputs, "x or out is not of the weight's width");
    if let Some(bias) = bias {
        assert!(bias.shape == (1, outputs), "a bias of shape {:?} on {outputs} outputs", bias.shape);
    }
    let operands = Operands {
        weight: weight.address(),
        x: device.read("x", x, Use::Activation),
        bias: bias.map_or(0, CudaWeight::address),
        out: device.read("out", out, Use::Activation),
        accumulate: false,
        added: added.map_or(0, |added| device.read("added", added, Use::Activation)),
    };
    let product = if bias.is_some() { Product::LinearBias } else { Product::Linear };
    let access = Access { reads: &[operands.x, operands.added], writes: &[operands.out] };
    // SAFETY: the sizes were checked above; blocks are 256-byte aligned; `out` is the only unique reference.
    unsafe { over_rows(device, layout, Key { product, outputs, inputs }, (inputs, outputs), operands, access) }
}

pub(super) fn linear_backward(
    device: &mut CudaDevice,
    layout: &Layout,
    dy: &CudaBuffer,
    weight: &CudaWeight,
    dx: &mut CudaBuffer,
    accumulate: bool,
) -> Result<(), DeviceError> {
    let (outputs, inputs) = weight.shape;
    assert!(dy.len == layout.rows() * outputs && dx.len == layout.rows() * inputs, "dy or dx is not of the weight's width");
    let operands = Operands {
        weight: weight.address(),
        x: device.read("dy", dy, Use::Activation),
        bias: 0,
        out: device.read("dx", dx, Use::Activation),
        accumulate,
        added: 0,
    };
    let key = Key { product: Product::LinearBackward, outputs, inputs };
    let access = Access { reads: &[operands.x, if accumulate { operands.out } else { 0 }], writes: &[operands.out] };
    // SAFETY: as in `linear`; `dx` is the only unique reference.
    unsafe { over_rows(device, layout, key, (outputs, inputs), operands, access) }
}

/// The address of the first of some buffers that fill rows so wide between them, in this order, and of each.
fn beside(device: &CudaDevice, buffers: &[&CudaBuffer], widths: &[usize], rows: usize) -> (Address, Vec<Address>) {
    let (pitch, mut first) = (widths.iter().sum(), 0);
    for (buffer, width) in buffers.iter().zip(widths) {
        let place = buffer.beside == Some(Beside { first, pitch }) && Arc::ptr_eq(&buffer.block, &buffers[0].block);
        assert!(place && buffer.len == rows * width, "buffers of widths {widths:?}, allocated together, were expected");
        first += width;
    }
    let addresses: Vec<_> = buffers.iter().map(|buffer| device.read_rows("a buffer beside others", buffer, Use::Activation)).collect();
    (addresses[0], addresses)
}

pub(super) fn linear_together(
    device: &mut CudaDevice,
    layout: &Layout,
    x: &CudaBuffer,
    weights: &[(&CudaWeight, Option<&CudaWeight>)],
    outs: &mut [CudaBuffer],
) -> Result<(), DeviceError> {
    assert!(weights.len() == outs.len() && !outs.is_empty(), "{} weights and {} outs", weights.len(), outs.len());
    let Some(outputs) = together(weights.iter().map(|(weight, _)| *weight)).filter(|_| outs.len() > 1) else {
        return weights.iter().zip(outs).try_for_each(|((weight, bias), out)| linear(device, layout, x, weight, *bias, None, out));
    };
    let (inputs, widths) = (weights[0].0.shape.1, weights.iter().map(|(weight, _)| weight.shape.0).collect::<Vec<_>>());
    assert!(x.len == layout.rows() * inputs, "x is not of the weights' width");
    let biases: Vec<_> = weights.iter().filter_map(|(_, bias)| *bias).collect();
    let all = biases.iter().zip(&widths).all(|(bias, width)| bias.shape == (1, *width));
    let one = biases.is_empty() || (biases.len() == weights.len() && all && together(biases.iter().copied()).is_some());
    assert!(one, "biases of {widths:?} outputs, loaded together, were expected");
    let (out, writes) = beside(device, &outs.iter().collect::<Vec<_>>(), &widths, layout.rows());
    let operands = Operands {
        weight: weights[0].0.address(),
        x: device.read("x", x, Use::Activation),
        bias: biases.first().map_or(0, |bias| bias.address()),
        out,
        accumulate: false,
        added: 0,
    };
    let product = if biases.is_empty() { Product::Linear } else { Product::LinearBias };
    let access = Access { reads: &[operands.x], writes: &writes };
    // SAFETY: the sizes were checked above; blocks are 256-byte aligned; `outs` are the only unique references.
    unsafe { over_rows(device, layout, Key { product, outputs, inputs }, (inputs, outputs), operands, access) }
}

pub(super) fn linear_backward_together(
    device: &mut CudaDevice,
    layout: &Layout,
    parts: &[(&CudaBuffer, &CudaWeight)],
    dx: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    assert!(!parts.is_empty(), "no weights");
    let Some(outputs) = together(parts.iter().map(|(_, weight)| *weight)).filter(|_| parts.len() > 1) else {
        let mut parts = parts.iter().enumerate();
        return parts.try_for_each(|(number, (dy, weight))| linear_backward(device, layout, dy, weight, dx, number > 0));
    };
    let (inputs, widths) = (parts[0].1.shape.1, parts.iter().map(|(_, weight)| weight.shape.0).collect::<Vec<_>>());
    assert!(dx.len == layout.rows() * inputs, "dx is not of the weights' width");
    let (x, reads) = beside(device, &parts.iter().map(|(dy, _)| *dy).collect::<Vec<_>>(), &widths, layout.rows());
    let out = device.read("dx", dx, Use::Activation);
    let operands = Operands { weight: parts[0].1.address(), x, bias: 0, out, accumulate: false, added: 0 };
    let access = Access { reads: &reads, writes: &[out] };
    let key = Key { product: Product::LinearBackward, outputs, inputs };
    // SAFETY: as in `linear_together`; `dx` is the only unique reference.
    unsafe { over_rows(device, layout, key, (outputs, inputs), operands, access) }
}
