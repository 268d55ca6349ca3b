//! Grouped LoRA: the launches of lora.cu, lora_backward.cu and lora_gradient.cu.
//!
//! Never adds the rows of two groups.
#![expect(unsafe_code, reason = "launches kernels")]

use super::Precision;
use super::device::{CudaBuffer, CudaDevice};
use super::driver::Address;
use super::lora_tables::{Lora, Module, Rows, Tables};
use super::record::Access;
use crate::{DeviceError, Layout, LoraGrads, LoraIn, LoraOut, LoraRows, Use};

/// Blocks and threads of the kernels; as lora.cuh, lora.cu, lora_backward.cu and lora_gradient.cu.
const SHRINK: (usize, usize, u32) = (16, 4, 512); // rows, blocks of 8 ranks, threads
const EXPAND: (usize, usize, u32) = (16, 512, 128); // rows, columns, threads
const EXPAND_BACKWARD: (usize, usize, u32) = (32, 128, 128);
const GRADIENT: (usize, usize) = (64, 16); // columns, ranks
/// Threads, and patches of the gradients, of a block: in float32 it has one, else each of its warps one.
const GRADIENT_F32: (u32, usize) = (128, 1);
const GRADIENT_BF16: (u32, usize) = (64, 2);

/// # Safety
/// `arguments` are lora.cuh's for this kernel and grid: x, y and s of the layout's rows, tables of this call; `access` as in `CudaDevice::launch`.
unsafe fn launch(
    device: &mut CudaDevice,
    kernel: &'static str,
    (grid, threads): ([usize; 3], u32),
    arguments: &Lora,
    reads: &[Address],
    writes: &[Address],
) -> Result<(), DeviceError> {
    let kernel = device.kernels.get(kernel);
    // SAFETY: `Lora` is lora.cuh's struct; the rest is the caller's.
    unsafe { device.launch(kernel, grid, threads, 0, arguments, Access { reads, writes }) }
}

/// A call forward, from its s on.
pub(super) struct Up {
    pub(super) tables: Tables,
    pub(super) arguments: Lora,
    /// Of each module.
    pub(super) s: Vec<Address>,
    pub(super) y: Vec<Address>,
}

/// s of every module. Nothing where there is nobody, or no row.
pub(super) fn shrink(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &[LoraRows<'_, CudaBuffer>],
    x: &CudaBuffer,
    modules: &[LoraOut<'_, CudaBuffer>],
) -> Result<Option<Up>, DeviceError> {
    let rows = layout.rows();
    if groups.is_empty() || rows == 0 {
        return Ok(None);
    }
    let inputs = x.len / rows;
    assert!(x.len == rows * inputs, "x is not of the layout's rows");
    let mut widths = Vec::new();
    for LoraOut { s, s_width, y } in modules {
        widths.push((y.len / rows, *s_width));
        assert!(y.len % rows == 0 && s.len == rows * s_width, "s or y is not of its width");
    }
    let all: Vec<_> = groups.iter().map(|rows| Rows { rows, grads: 0, wants_dx: false }).collect();
    let tables = Tables::new(device, layout, &all, inputs, &widths);
    let mut parts = Vec::new();
    for (number, LoraOut { s, s_width, y }) in modules.iter().enumerate() {
        let (pitch, wide) = (y.pitch(widths[number].0) as u32, widths[number].0 as u32);
        let (y, s) = (device.read_rows("y", y, Use::Activation), device.read("s", s, Use::State));
        parts.push(Module { y, s, ds: 0, wide, s_width: *s_width as u32, blocks: tables.blocks(number) as u32, pitch });
    }
    let x = device.read("x", x, Use::Activation);
    let arguments = tables.arguments(device, layout, x, inputs, &parts)?;
    let (s, y): (Vec<_>, Vec<_>) = parts.iter().map(|module| (module.s, module.y)).unzip();
    let blocks: usize = (0..parts.len()).map(|module| tables.blocks(module)).sum();
    let grid = ([tables.row_blocks(SHRINK.0), blocks.div_ceil(SHRINK.1), 1], SHRINK.2);
    // SAFETY: sizes and modules were checked; the modules' s are the only buffers written.
    unsafe { launch(device, tables.either("lora_shrink", "lora_shrink_drop"), grid, &arguments, &[x], &s) }?;
    Ok(Some(Up { tables, arguments, s, y }))
}

pub(super) fn lora(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &[LoraRows<'_, CudaBuffer>],
    x: &CudaBuffer,
    modules: &mut [LoraOut<'_, CudaBuffer>],
) -> Result<(), DeviceError> {
    let Some(Up { tables, mut arguments, s, y }) = shrink(device, layout, groups, x, modules)? else { return Ok(()) };
    let columns: usize = arguments.modules.iter().map(|module| (module.wide as usize).div_ceil(EXPAND.1)).sum();
    arguments.columns = columns as u32;
    let grid = ([tables.row_blocks(EXPAND.0) * columns, 1, 1], EXPAND.2);
    // SAFETY: sizes and modules were checked; the modules' y are the only buffers written.
    unsafe { launch(device, "lora_expand", grid, &arguments, &s, &y) }
}

/// A call backward, from its ds on.
pub(super) struct Down {
    pub(super) tables: Tables,
    pub(super) arguments: Lora,
    pub(super) ds: Address,
    /// Of any group.
    pub(super) wants_dx: bool,
    widths: Vec<(usize, usize)>,
}

/// ds of every module. Nothing where there is nobody, or no row.
pub(super) fn shrink_backward(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &[LoraGrads<'_, CudaBuffer>],
    x: &CudaBuffer,
    modules: &[LoraIn<'_, CudaBuffer>],
    has_dx: bool,
) -> Result<Option<Down>, DeviceError> {
    let rows = layout.rows();
    if groups.is_empty() || rows == 0 {
        return Ok(None);
    }
    let inputs = x.len / rows;
    assert!(x.len == rows * inputs, "x is not of the layout's rows");
    let mut widths = Vec::new();
    for LoraIn { dy, s, s_width } in modules {
        widths.push((dy.len / rows, *s_width));
        assert!(dy.len % rows == 0 && s.len == rows * s_width, "s or dy is not of its width");
    }
    let mut all = Vec::new();
    for LoraGrads { rows, grads, wants_dx } in groups {
        assert!(grads.len == rows.params.len, "an adapter's gradients are laid out as its parameters");
        all.push(Rows { rows, grads: device.read("grads", grads, Use::State), wants_dx: *wants_dx && has_dx });
    }
    let tables = Tables::new(device, layout, &all, inputs, &widths);
    let (ds, parts_at) = scratch(device, &tables, rows, inputs, &widths)?;
    let mut parts = Vec::new();
    for (number, LoraIn { dy, s, s_width }) in modules.iter().enumerate() {
        let (pitch, wide) = (dy.pitch(widths[number].0) as u32, widths[number].0 as u32);
        let (y, s) = (device.read_rows("dy", dy, Use::Activation), device.read("s", s, Use::State));
        let blocks = tables.blocks(number) as u32;
        let before: usize = widths[..number].iter().map(|(_, s_width)| s_width).sum();
        parts.push(Module { y, s, ds: ds + (before * rows * 4) as u64, wide, s_width: *s_width as u32, blocks, pitch });
    }
    let x = device.read("x", x, Use::Activation);
    let mut arguments = tables.arguments(device, layout, x, inputs, &parts)?;
    arguments.parts = parts_at;
    let dy: Vec<_> = parts.iter().map(|module| module.y).collect();
    let blocks = (0..parts.len()).map(|module| tables.blocks(module)).max().unwrap_or(0);
    // A row's sums are the same in blocks of either height.
    let is_high = tables.row_blocks(SHRINK.0) * blocks * parts.len() > device.multiprocessors();
    let (kernel, rows) = if is_high { ("lora_backward_shrink_high", 2 * SHRINK.0) } else { ("lora_backward_shrink", SHRINK.0) };
    let grid = ([tables.row_blocks(rows), blocks, parts.len()], SHRINK.2);
    // SAFETY: sizes and modules were checked; the scratch, of the layout's rows, is all that is written.
    unsafe { launch(device, kernel, grid, &arguments, &dy, &[ds]) }?;
    let wants_dx = all.iter().any(|rows| rows.wants_dx);
    Ok(Some(Down { tables, arguments, ds, wants_dx, widths }))
}

pub(super) fn lora_backward(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &mut [LoraGrads<'_, CudaBuffer>],
    x: &CudaBuffer,
    modules: &[LoraIn<'_, CudaBuffer>],
    dx: Option<&mut CudaBuffer>,
) -> Result<(), DeviceError> {
    assert!(dx.as_ref().is_none_or(|dx| dx.len == x.len), "dx is not of x's size");
    let Some(mut down) = shrink_backward(device, layout, groups, x, modules, dx.is_some())? else { return Ok(()) };
    if let Some(dx) = dx.filter(|_| down.wants_dx) {
        let Down { tables, arguments, ds, .. } = &mut down;
        arguments.dx = device.read("dx", dx, Use::Activation);
        let columns = (arguments.wide as usize).div_ceil(EXPAND_BACKWARD.1);
        arguments.columns = columns as u32;
        let grid = ([tables.row_blocks(EXPAND_BACKWARD.0) * columns, 1, 1], EXPAND_BACKWARD.2);
        let kernel = tables.either("lora_backward_expand", "lora_backward_expand_drop");
        // SAFETY: sizes and modules were checked; dx is the only buffer written.
        unsafe { launch(device, kernel, grid, arguments, &[*ds, arguments.dx], &[arguments.dx]) }?;
    }
    gradients(device, &down)
}

/// dA and dB of every module.
pub(super) fn gradients(device: &mut CudaDevice, down: &Down) -> Result<(), DeviceError> {
    let Down { tables, ds, widths, .. } = down;
    let patches = patches(down.arguments.wide as usize, widths);
    let arguments = &Lora { patches: patches as u32, ..down.arguments };
    let parts = arguments.parts;
    let modules = &arguments.modules[..widths.len()];
    let reads: Vec<_> = modules.iter().flat_map(|module| [module.y, module.s]).chain([arguments.x, *ds]).collect();
    let (threads, each) = if device.precision == Precision::F32 { GRADIENT_F32 } else { GRADIENT_BF16 };
    let grid = ([patches.div_ceil(each), tables.pieces.len(), tables.rank_max().div_ceil(GRADIENT.1)], threads);
    let kernel = tables.either("lora_gradient", "lora_gradient_drop");
    // SAFETY: sizes and modules were checked; the groups' gradients, unique references all, and the scratch are what is written.
    unsafe { launch(device, kernel, grid, arguments, &reads, &[parts]) }?;
    if parts == 0 {
        return Ok(());
    }
    // SAFETY: as above.
    unsafe { launch(device, "lora_gradient_sum", ([patches, tables.count, 1], 256), arguments, &[parts], &[]) }
}

fn patches(inputs: usize, widths: &[(usize, usize)]) -> usize {
    widths.iter().map(|(outputs, _)| inputs.div_ceil(GRADIENT.0) + outputs.div_ceil(GRADIENT.0)).sum()
}

/// Scratch for ds of every module, and for the gradients of pieces where a group has several. Some sets in turn, so that a call need not
/// wait for the gradients of the last.
fn scratch(
    device: &mut CudaDevice,
    tables: &Tables,
    rows: usize,
    inputs: usize,
    widths: &[(usize, usize)],
) -> Result<(Address, Address), DeviceError> {
    const NAMES: [(&str, &str); 3] = [("lora ds 0", "lora parts 0"), ("lora ds 1", "lora parts 1"), ("lora ds 2", "lora parts 2")];
    let (ds, parts) = NAMES[device.turn() % NAMES.len()];
    let ds = device.scratch(ds, rows * widths.iter().map(|(_, s_width)| s_width).sum::<usize>() * 4)?;
    if tables.groups.iter().all(|group| group.parts <= 1) {
        return Ok((ds, 0));
    }
    let patch = tables.rank_max().div_ceil(8) * 8 * GRADIENT.0 * 4;
    Ok((ds, device.scratch(parts, tables.pieces.len() * patches(inputs, widths) * patch)?))
}
