//! LoRA and SwiGLU in one: the launches of lora_swiglu.cu.
//!
//! Never computes what `lora` and `swiglu` one after another would not.
#![expect(unsafe_code, reason = "launches kernels")]

use super::ROW_ALIGN;
use super::device::{CudaBuffer, CudaDevice};
use super::driver::Address;
use super::lora::{self, Down, Up};
use super::lora_tables::{Lora, Tables, Tile};
use super::record::Access;
use super::rows;
use crate::{DeviceError, Layout, LoraGrads, LoraIn, LoraOut, LoraRows, SwigluGrads, Use};

/// The parameters of lora_swiglu.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Arguments {
    lora: Lora,
    tiles: Address,
    gate: Address,
    up: Address,
    out: Address,
    dgate: Address,
    dup: Address,
    pitch: u32,
    grad_pitch: u32,
}

/// Of a block, as lora_swiglu.cu.
const ROWS: usize = 32;
const COLUMNS: usize = 128;
const THREADS: u32 = 128;

/// The group of a tile without an adapter.
const NO_GROUP: u32 = u32::MAX;

/// Every tile of the layout with a row in it, each with its group among those of the call.
fn tiles(layout: &Layout, call: &Tables) -> Vec<Tile> {
    let mut groups = vec![NO_GROUP; layout.rows() / ROW_ALIGN];
    for tile in &call.tiles {
        groups[tile.row as usize / ROW_ALIGN] = tile.group;
    }
    let mut tiles = Vec::new();
    for segment in layout.segments() {
        for before in (0..segment.rows).step_by(ROW_ALIGN) {
            let (row, valid) = (segment.start + before, (segment.rows - before).min(ROW_ALIGN));
            tiles.push(Tile { row: row as u32, valid: valid as u32, group: groups[row / ROW_ALIGN], sequence: segment.sequence });
        }
    }
    tiles
}

/// Whether rows of these buffers begin at multiples of 16 bytes, all of one pitch.
fn is_even(width: usize, buffers: [&CudaBuffer; 2]) -> bool {
    let pitches = buffers.map(|buffer| buffer.pitch(width));
    width.is_multiple_of(8)
        && pitches[0] == pitches[1]
        && pitches[0].is_multiple_of(8)
        && buffers.iter().all(|b| b.address().is_multiple_of(16))
}

/// # Safety
/// `arguments` are lora_swiglu.cu's for this kernel, `count` the tiles that they name; `access` as in `CudaDevice::launch`.
unsafe fn launch(
    device: &mut CudaDevice,
    kernel: &'static str,
    mut arguments: Arguments,
    width: usize,
    count: usize,
    access: Access<'_>,
) -> Result<(), DeviceError> {
    let (kernel, columns) = (device.kernels.get(kernel), width.div_ceil(COLUMNS));
    arguments.lora.columns = columns as u32;
    // SAFETY: `Arguments` is lora_swiglu.cu's struct; blocks cover tiles x columns; the rest is the caller's.
    unsafe { device.launch(kernel, [count * (ROW_ALIGN / ROWS) * columns, 1, 1], THREADS, 0, &arguments, access) }
}

pub(super) fn forward(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &[LoraRows<'_, CudaBuffer>],
    x: &CudaBuffer,
    mut modules: [LoraOut<'_, CudaBuffer>; 2],
    out: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let width = modules[0].y.len.checked_div(layout.rows()).unwrap_or_default();
    if groups.is_empty() || !is_even(width, [&*modules[0].y, &*modules[1].y]) {
        lora::lora(device, layout, groups, x, &mut modules)?;
        return rows::swiglu(device, layout, modules[0].y, modules[1].y, out);
    }
    assert!(out.len == modules[0].y.len && out.len == modules[1].y.len, "gate, up and out are not of one size");
    let Some(Up { tables, arguments, s, y }) = lora::shrink(device, layout, groups, x, &modules)? else { return Ok(()) };
    let all = tiles(layout, &tables);
    let arguments = Arguments {
        lora: arguments,
        tiles: device.table(&all)?,
        gate: 0,
        up: 0,
        out: device.read("out", out, Use::Activation),
        dgate: 0,
        dup: 0,
        pitch: modules[0].y.pitch(width) as u32,
        grad_pitch: 0,
    };
    let reads: Vec<_> = s.iter().chain(&y).copied().collect();
    let writes: Vec<_> = y.iter().copied().chain([arguments.out]).collect();
    // SAFETY: sizes and modules were checked; gate, up and out are the only buffers written.
    unsafe { launch(device, "lora_swiglu", arguments, width, all.len(), Access { reads: &reads, writes: &writes }) }
}

pub(super) fn backward(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &mut [LoraGrads<'_, CudaBuffer>],
    x: &CudaBuffer,
    modules: &[LoraIn<'_, CudaBuffer>],
    dx: &mut CudaBuffer,
    swiglu: SwigluGrads<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let SwigluGrads { rows, gate, up, dgate, dup } = swiglu;
    let width = gate.len.checked_div(rows.rows()).unwrap_or_default();
    let drops = groups.iter().flat_map(|group| &group.rows.sites).flatten().any(|site| site.dropout.is_some());
    if groups.is_empty() || modules.len() != 1 || drops || !is_even(width, [gate, up]) || !is_even(width, [&*dgate, &*dup]) {
        lora::lora_backward(device, layout, groups, x, modules, Some(&mut *dx))?;
        return rows::swiglu_backward(device, rows, dx, gate, up, dgate, dup);
    }
    let sizes = [x.len, dx.len, up.len, dgate.len, dup.len];
    assert!(sizes == [gate.len; 5] && layout.rows() == rows.rows(), "x, dx, gate, up, dgate and dup are not of one size");
    let Some(down) = lora::shrink_backward(device, layout, groups, x, modules, true)? else { return Ok(()) };
    let Down { tables, arguments, ds, .. } = &down;
    let all = tiles(rows, tables);
    let arguments = Arguments {
        lora: Lora { dx: device.read("dx", dx, Use::Activation), ..*arguments },
        tiles: device.table(&all)?,
        gate: device.read_rows("gate", gate, Use::Activation),
        up: device.read_rows("up", up, Use::Activation),
        out: 0,
        dgate: device.read_rows("dgate", dgate, Use::Activation),
        dup: device.read_rows("dup", dup, Use::Activation),
        pitch: gate.pitch(width) as u32,
        grad_pitch: dgate.pitch(width) as u32,
    };
    let access = Access { reads: &[*ds, arguments.lora.dx, arguments.gate, arguments.up], writes: &[arguments.dgate, arguments.dup] };
    // SAFETY: sizes and modules were checked; dgate and dup are the only buffers written.
    unsafe { launch(device, "lora_backward_swiglu", arguments, width, all.len(), access) }?;
    lora::gradients(device, &down)
}
