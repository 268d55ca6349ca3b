//! Operations of single rows: embedding, norms, rotation, SwiGLU, additions, gathering.
//!
//! Never lets a thread look at two rows.
#![expect(unsafe_code, reason = "launches kernels")]

use super::device::{CudaBuffer, CudaDevice, CudaWeight, Element};
use super::driver::Address;
use super::record::Access;
use crate::{DeviceError, Layout, Use};

/// Width of a buffer over a layout that has rows.
fn width(what: &str, buffer: &CudaBuffer, layout: &Layout) -> usize {
    let width = buffer.len.checked_div(layout.rows()).unwrap_or_default();
    assert!(width * layout.rows() == buffer.len, "{what} has {} elements, no multiple of {} rows", buffer.len, layout.rows());
    width
}

/// Threads of a block and blocks of a row, for kernels that split a row's columns.
fn columns(width: usize) -> (u32, usize) {
    let work = if width.is_multiple_of(8) { width / 8 } else { width };
    let threads = work.next_multiple_of(32).clamp(32, 256);
    (threads as u32, work.div_ceil(threads))
}

fn check_index(what: &str, layout: &Layout, index: &[u32], bound: usize) {
    assert!(index.len() == layout.rows(), "{what} has {} entries for {} rows", index.len(), layout.rows());
    let live = layout.positions().iter().zip(index).filter(|(position, _)| **position != u32::MAX);
    assert!(live.map(|(_, index)| *index as usize).all(|index| index < bound), "{what} holds a number not below {bound}");
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Embed {
    table: Address,
    out: Address,
    tokens: Address,
    positions: Address,
    width: u32,
    zero: u32,
}

pub(super) fn embed(
    device: &mut CudaDevice,
    layout: &Layout,
    tokens: &[u32],
    table: &CudaWeight,
    out: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let (vocabulary, columns) = table.shape;
    assert!(out.len == layout.rows() * columns, "out is not of the table's width");
    check_index("tokens", layout, tokens, vocabulary);
    let positions = device.positions(layout)?;
    let arguments = Embed {
        table: table.address(),
        out: device.read("out", out, Use::Activation),
        tokens: device.table(tokens)?,
        positions,
        width: columns as u32,
        zero: 0,
    };
    let kernel = device.kernels.get("embed");
    // SAFETY: `Embed` is embed.cu's struct; one block a row; tokens and sizes were checked; out is the only buffer written.
    unsafe { device.launch(kernel, [layout.rows(), 1, 1], 128, 0, &arguments, Access { reads: &[], writes: &[arguments.out] }) }
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct RmsNorm {
    x: Address,
    dy: Address,
    weight: Address,
    out: Address,
    positions: Address,
    items: u32,
    groups: u32,
    width: u32,
    eps: f32,
    accumulate: u32,
    x_pitch: u32,
    dy_pitch: u32,
    out_pitch: u32,
}

impl RmsNorm {
    fn launch(device: &mut CudaDevice, layout: &Layout, mut arguments: Self, kernels: [&'static str; 3]) -> Result<(), DeviceError> {
        arguments.positions = device.positions(layout)?;
        // As rms_norm.cu: by width, a kernel, its teams in a block, and its threads.
        let (kernel, teams, threads) = match arguments.width {
            0..=512 => (kernels[0], 8, 256),
            513..=1024 => (kernels[1], 1, 128),
            _ => (kernels[2], 1, 256),
        };
        let (kernel, blocks) = (device.kernels.get(kernel), (arguments.items as usize).div_ceil(teams));
        let access = Access { reads: &[arguments.x, arguments.dy, arguments.out], writes: &[arguments.out] };
        // SAFETY: `RmsNorm` is rms_norm.cu's struct; a team an item, guarded by `items`; sizes were checked by the callers, whose output is the
        // only buffer written.
        unsafe { device.launch(kernel, [blocks, 1, 1], threads, 0, &arguments, access) }
    }
}

pub(super) fn rms_norm(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: usize,
    x: &CudaBuffer,
    weight: &CudaWeight,
    eps: f32,
    out: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let width = width("x", x, layout) / groups;
    assert!(layout.rows() * groups * width == x.len && out.len == x.len, "x or out does not fall into {groups} groups");
    if x.len == 0 {
        return Ok(());
    }
    let arguments = RmsNorm {
        x: device.read_rows("x", x, Use::Activation),
        dy: 0,
        weight: weight.vector(width),
        out: device.read_rows("out", out, Use::Activation),
        positions: 0,
        items: (layout.rows() * groups) as u32,
        groups: groups as u32,
        width: width as u32,
        eps,
        accumulate: 0,
        x_pitch: x.pitch(groups * width) as u32,
        dy_pitch: 0,
        out_pitch: out.pitch(groups * width) as u32,
    };
    RmsNorm::launch(device, layout, arguments, ["rms_norm_32", "rms_norm_128", "rms_norm_256"])
}

#[expect(clippy::too_many_arguments, reason = "one argument an operand")]
pub(super) fn rms_norm_backward(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: usize,
    dy: &CudaBuffer,
    x: &CudaBuffer,
    weight: &CudaWeight,
    eps: f32,
    dx: &mut CudaBuffer,
    accumulate: bool,
) -> Result<(), DeviceError> {
    let width = width("x", x, layout) / groups;
    assert!(
        layout.rows() * groups * width == x.len && dy.len == x.len && dx.len == x.len,
        "x, dy or dx does not fall into {groups} groups"
    );
    if x.len == 0 {
        return Ok(());
    }
    let arguments = RmsNorm {
        x: device.read_rows("x", x, Use::Activation),
        dy: device.read_rows("dy", dy, Use::Activation),
        weight: weight.vector(width),
        out: device.read_rows("dx", dx, Use::Activation),
        positions: 0,
        items: (layout.rows() * groups) as u32,
        groups: groups as u32,
        width: width as u32,
        eps,
        accumulate: u32::from(accumulate),
        x_pitch: x.pitch(groups * width) as u32,
        dy_pitch: dy.pitch(groups * width) as u32,
        out_pitch: dx.pitch(groups * width) as u32,
    };
    RmsNorm::launch(device, layout, arguments, ["rms_norm_backward_32", "rms_norm_backward_128", "rms_norm_backward_256"])
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Rope {
    x: Address,
    table: Address,
    positions: Address,
    heads: u32,
    half: u32,
    sign: f32,
    pitch: u32,
    each: u32,
    items: u32,
}

pub(super) fn rope(
    device: &mut CudaDevice,
    layout: &Layout,
    heads: usize,
    head_dim: usize,
    table: &CudaBuffer,
    x: &mut CudaBuffer,
    inverse: bool,
) -> Result<(), DeviceError> {
    assert!(head_dim.is_multiple_of(2) && x.len == layout.rows() * heads * head_dim, "x is not {heads} heads {head_dim} wide");
    let last = layout.last_position();
    assert!(last.is_none_or(|last| (last as usize + 1) * head_dim <= table.len), "the table ends before position {last:?}");
    let positions = device.positions(layout)?;
    let (half, pitch) = (head_dim / 2, x.pitch(heads * head_dim));
    let each = if half.is_multiple_of(8) && pitch.is_multiple_of(8) && x.address().is_multiple_of(16) { 8 } else { 1 };
    let items = layout.rows() * heads * half / each;
    assert!(i32::try_from(items).is_ok(), "{items} pairs of elements are too many for one launch");
    let arguments = Rope {
        x: device.read_rows("x", x, Use::Activation),
        table: device.read("table", table, Use::State),
        positions,
        heads: heads as u32,
        half: half as u32,
        sign: if inverse { -1.0 } else { 1.0 },
        pitch: pitch as u32,
        each: each as u32,
        items: items as u32,
    };
    let kernel = device.kernels.get("rope");
    // SAFETY: `Rope` is rope.cu's struct; a thread an item, guarded by `items`; sizes and positions were checked; x is the only buffer written.
    unsafe { device.launch(kernel, [items.div_ceil(256), 1, 1], 256, 0, &arguments, Access { reads: &[], writes: &[arguments.x] }) }
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Swiglu {
    dy: Address,
    gate: Address,
    up: Address,
    out: Address,
    dgate: Address,
    dup: Address,
    positions: Address,
    width: u32,
    pitch: u32,
    grad_pitch: u32,
    zero: u32,
}

pub(super) fn swiglu(
    device: &mut CudaDevice,
    layout: &Layout,
    gate: &CudaBuffer,
    up: &CudaBuffer,
    out: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let width = width("gate", gate, layout);
    assert!(up.len == gate.len && out.len == gate.len, "gate, up and out are not of one size");
    assert!(up.pitch(width) == gate.pitch(width), "gate and up are not of one kind");
    let (gate_at, up_at) = (device.read_rows("gate", gate, Use::Activation), device.read_rows("up", up, Use::Activation));
    let (to, positions) = (device.read("out", out, Use::Activation), device.positions(layout)?);
    let access = Access { reads: &[gate_at, up_at], writes: &[to] };
    // SAFETY: sizes were checked; out is the only buffer written.
    unsafe { launch_swiglu(device, [gate_at, up_at, to, positions], (layout.rows(), width, gate.pitch(width)), access) }
}

/// SwiGLU of rows so wide, whose gate and up have a pitch.
///
/// # Safety
/// As `CudaDevice::launch`; gate, up, out and positions have as many rows.
pub(super) unsafe fn launch_swiglu(
    device: &mut CudaDevice,
    [gate, up, out, positions]: [Address; 4],
    (rows, width, pitch): (usize, usize, usize),
    access: Access<'_>,
) -> Result<(), DeviceError> {
    let ((threads, parts), kernel) = (columns(width), device.kernels.get("swiglu"));
    let (width, pitch) = (width as u32, pitch as u32);
    let arguments = Swiglu { dy: 0, gate, up, out, dgate: 0, dup: 0, positions, width, pitch, grad_pitch: 0, zero: 0 };
    // SAFETY: `Swiglu` is swiglu.cu's struct; blocks cover rows x columns; the rest is the caller's.
    unsafe { device.launch(kernel, [rows, parts, 1], threads, 0, &arguments, access) }
}

pub(super) fn swiglu_backward(
    device: &mut CudaDevice,
    layout: &Layout,
    dy: &CudaBuffer,
    gate: &CudaBuffer,
    up: &CudaBuffer,
    dgate: &mut CudaBuffer,
    dup: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let width = width("gate", gate, layout);
    assert!([dy.len, up.len, dgate.len, dup.len] == [gate.len; 4], "dy, gate, up, dgate and dup are not of one size");
    let one = up.pitch(width) == gate.pitch(width) && dup.pitch(width) == dgate.pitch(width);
    assert!(one, "gate and up, or dgate and dup, are not of one kind");
    let arguments = Swiglu {
        dy: device.read("dy", dy, Use::Activation),
        gate: device.read_rows("gate", gate, Use::Activation),
        up: device.read_rows("up", up, Use::Activation),
        out: 0,
        dgate: device.read_rows("dgate", dgate, Use::Activation),
        dup: device.read_rows("dup", dup, Use::Activation),
        positions: device.positions(layout)?,
        width: width as u32,
        pitch: gate.pitch(width) as u32,
        grad_pitch: dgate.pitch(width) as u32,
        zero: 0,
    };
    let ((threads, parts), kernel) = (columns(width), device.kernels.get("swiglu_backward"));
    let access = Access { reads: &[arguments.dy, arguments.gate, arguments.up], writes: &[arguments.dgate, arguments.dup] };
    // SAFETY: as `swiglu`; dgate and dup are the only buffers written.
    unsafe { device.launch(kernel, [layout.rows(), parts, 1], threads, 0, &arguments, access) }
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Rows {
    x: Address,
    y: Address,
    index: Address,
    positions: Address,
    width: u32,
    x_pitch: u32,
    y_pitch: u32,
    zero: u32,
}

/// Launches one of rows.cu's kernels, for activations or for float32 as the buffers are. Callers have checked sizes and indices.
fn move_rows(
    device: &mut CudaDevice,
    layout: &Layout,
    index: Option<&[u32]>,
    width: usize,
    x: &CudaBuffer,
    y: &mut CudaBuffer,
    kernels: [&'static str; 2],
) -> Result<(), DeviceError> {
    assert!(x.element == y.element, "x and y are not of one type");
    let kernel = if x.element == device.element(Use::Activation) { kernels[0] } else { kernels[1] };
    debug_assert!(x.element == Element::F32 || kernel == kernels[0], "bf16 is the activations' type");
    let index = index.map(|index| device.table(index)).transpose()?.unwrap_or(0);
    let positions = device.positions(layout)?;
    let (x_pitch, y_pitch) = (x.pitch(width) as u32, y.pitch(width) as u32);
    let arguments = Rows { x: x.address(), y: y.address(), index, positions, width: width as u32, x_pitch, y_pitch, zero: 0 };
    let ((threads, parts), kernel) = (columns(width), device.kernels.get(kernel));
    let access = Access { reads: &[arguments.x], writes: &[arguments.y] };
    // SAFETY: `Rows` is rows.cu's struct; blocks cover rows x columns; the callers checked sizes and indices; y is the only buffer written.
    unsafe { device.launch(kernel, [layout.rows(), parts, 1], threads, 0, &arguments, access) }
}

pub(super) fn add(device: &mut CudaDevice, layout: &Layout, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<(), DeviceError> {
    let width = width("x", x, layout);
    assert!(y.len == x.len, "x and y are not of one size");
    move_rows(device, layout, None, width, x, y, ["add", "add_state"])
}

pub(super) fn gather(
    device: &mut CudaDevice,
    layout: &Layout,
    index: &[u32],
    width: usize,
    x: &CudaBuffer,
    out: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    assert!(out.len == layout.rows() * width, "out is not {width} wide");
    check_index("index", layout, index, x.len.checked_div(width).unwrap_or(0));
    move_rows(device, layout, Some(index), width, x, out, ["gather", "gather_state"])
}

pub(super) fn scatter_add(
    device: &mut CudaDevice,
    layout: &Layout,
    index: &[u32],
    width: usize,
    x: &CudaBuffer,
    y: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    assert!(x.len == layout.rows() * width, "x is not {width} wide");
    check_index("index", layout, index, y.len.checked_div(width).unwrap_or(0));
    move_rows(device, layout, Some(index), width, x, y, ["scatter_add", "scatter_add_state"])
}

/// Copies bytes from one buffer to another; the caller has checked both ranges.
pub(super) fn copy(
    device: &mut CudaDevice,
    (from, from_offset): (&CudaBuffer, usize),
    (to, to_offset): (&mut CudaBuffer, usize),
    bytes: usize,
) -> Result<(), DeviceError> {
    if bytes == 0 {
        return Ok(());
    }
    let (from, to) = (from.whole().address(), to.whole().address());
    let access = Access { reads: &[from], writes: &[to] };
    // SAFETY: the caller checked the ranges; `to` is a unique reference, so `from` is another buffer.
    unsafe { device.launch_copy(from + from_offset as u64, to + to_offset as u64, bytes, access) }
}
