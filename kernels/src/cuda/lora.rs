//! Grouped LoRA: tables of groups and tiles, and the launches of lora.cu and lora_backward.cu.
//!
//! Never adds the rows of two groups.
#![expect(unsafe_code, reason = "launches kernels")]

use super::ROW_ALIGN;
use super::device::{CudaBuffer, CudaDevice};
use super::driver::Address;
use super::record::Access;
use crate::{DeviceError, Layout, LoraGrads, LoraRows, Use};

/// Of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Group {
    a: Address,
    b: Address,
    da: Address,
    db: Address,
    key: u64,
    scale: f32,
    probability: f32,
    rank: u32,
    first_tile: u32,
    end_tile: u32,
    zero: u32,
}

/// Of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Tile {
    row: u32,
    valid: u32,
    group: u32,
    sequence: u32,
}

/// The parameters of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Lora {
    x: Address,
    y: Address,
    s_in: Address,
    s_out: Address,
    groups: Address,
    tiles: Address,
    positions: Address,
    wide: u32,
    s_width: u32,
}

/// Blocks and threads of the kernels; as lora.cuh and lora_backward.cu.
const SHRINK: (usize, usize, u32) = (16, 32, 512); // rows, ranks, threads
const EXPAND: (usize, usize, u32) = (64, 128, 128); // rows, columns, threads
const GRADIENT: (usize, usize, u32) = (64, 64, 128); // columns, ranks, threads

/// The tables of one call.
struct Tables {
    groups: Vec<Group>,
    tiles: Vec<Tile>,
    rank_max: usize,
}

impl Tables {
    fn new() -> Self {
        Self { groups: Vec::new(), tiles: Vec::new(), rank_max: 0 }
    }

    /// Adds a group; `grads` begins the adapter's gradients, or is 0.
    fn push(
        &mut self,
        layout: &Layout,
        rows: &LoraRows<'_, CudaBuffer>,
        params: Address,
        grads: Address,
        (inputs, outputs): (usize, usize),
        s_width: usize,
    ) {
        let module = rows.module;
        assert!(rows.segments.end <= layout.segments().len(), "segments {:?} of {}", rows.segments, layout.segments().len());
        assert!(
            (module.inputs, module.outputs) == (inputs, outputs),
            "a module of {} -> {} on {inputs} -> {outputs}",
            module.inputs,
            module.outputs
        );
        assert!(module.rank > 0 && module.rank <= s_width, "rank {} does not fit s of width {s_width}", module.rank);
        let inside = module.a + module.rank * inputs <= rows.params.len && module.b + outputs * module.rank <= rows.params.len;
        assert!(inside, "A at {} and B at {} do not lie inside {} parameters", module.a, module.b, rows.params.len);
        let group = self.groups.len() as u32;
        let first_tile = self.tiles.len() as u32;
        for segment in &layout.segments()[rows.segments.clone()] {
            for before in (0..segment.rows).step_by(ROW_ALIGN) {
                let valid = (segment.rows - before).min(ROW_ALIGN) as u32;
                self.tiles.push(Tile { row: (segment.start + before) as u32, valid, group, sequence: segment.sequence });
            }
        }
        let at = |base: Address, index: usize| if base == 0 { 0 } else { base + (index * 4) as u64 };
        self.groups.push(Group {
            a: at(params, module.a),
            b: at(params, module.b),
            da: at(grads, module.a),
            db: at(grads, module.b),
            key: rows.dropout.map_or(0, |dropout| dropout.key),
            scale: module.scale,
            probability: rows.dropout.map_or(0.0, |dropout| dropout.probability),
            rank: module.rank as u32,
            first_tile,
            end_tile: self.tiles.len() as u32,
            zero: 0,
        });
        self.rank_max = self.rank_max.max(module.rank);
    }

    fn shrink_grid(&self) -> [usize; 3] {
        [self.tiles.len() * (ROW_ALIGN / SHRINK.0), self.rank_max.div_ceil(SHRINK.1), 1]
    }

    fn expand_grid(&self, wide: usize) -> [usize; 3] {
        [self.tiles.len() * (ROW_ALIGN / EXPAND.0), wide.div_ceil(EXPAND.1), 1]
    }

    fn gradient_grid(&self, wide: usize) -> [usize; 3] {
        [wide.div_ceil(GRADIENT.0), self.groups.len(), self.rank_max.div_ceil(GRADIENT.1)]
    }

    /// Puts the tables on the card and fills in what all kernels share.
    fn arguments(&self, device: &mut CudaDevice, layout: &Layout, s_width: usize) -> Result<Lora, DeviceError> {
        // One copy for both: the tiles follow the groups.
        let mut both: Vec<u8> = bytemuck::cast_slice(&self.groups).to_vec();
        both.extend_from_slice(bytemuck::cast_slice(&self.tiles));
        let groups = device.table(&both)?;
        Ok(Lora {
            x: 0,
            y: 0,
            s_in: 0,
            s_out: 0,
            groups,
            tiles: groups + size_of_val(self.groups.as_slice()) as u64,
            positions: device.tables(layout)?.positions,
            wide: 0,
            s_width: s_width as u32,
        })
    }
}

/// # Safety
/// `arguments` are lora.cuh's for this kernel and grid: x, y and s of the layout's rows, tables of this call.
unsafe fn launch(
    device: &mut CudaDevice,
    kernel: &'static str,
    grid: [usize; 3],
    threads: u32,
    arguments: Lora,
) -> Result<(), DeviceError> {
    let Lora { x, y, s_in, s_out, .. } = arguments;
    let access = Access { reads: &[x, y, s_in], writes: &[y, s_out] };
    let kernel = device.kernels.get(kernel);
    // SAFETY: `Lora` is lora.cuh's struct; the rest is the caller's.
    unsafe { device.launch(kernel, grid, threads, 0, &arguments, access) }
}

pub(super) fn lora(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &[LoraRows<'_, CudaBuffer>],
    x: &CudaBuffer,
    s: &mut CudaBuffer,
    s_width: usize,
    y: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    let Some(first) = groups.first() else { return Ok(()) };
    let (inputs, outputs) = (first.module.inputs, first.module.outputs);
    let rows = layout.rows();
    assert!(x.len == rows * inputs && y.len == rows * outputs && s.len == rows * s_width, "x, s or y is not of its width");
    let mut tables = Tables::new();
    for group in groups {
        tables.push(layout, group, device.read("params", group.params, Use::State), 0, (inputs, outputs), s_width);
    }
    let (x, y) = (device.read("x", x, Use::Activation), device.read("y", y, Use::Activation));
    let s = device.read("s", s, Use::State);
    let shared = tables.arguments(device, layout, s_width)?;
    let shrink = Lora { x, s_out: s, wide: inputs as u32, ..shared };
    // SAFETY: sizes and modules were checked; s is the only buffer written.
    unsafe { launch(device, "lora_shrink", tables.shrink_grid(), SHRINK.2, shrink) }?;
    let expand = Lora { y, s_in: s, wide: outputs as u32, ..shared };
    // SAFETY: sizes and modules were checked; y is the only buffer written.
    unsafe { launch(device, "lora_expand", tables.expand_grid(outputs), EXPAND.2, expand) }
}

#[expect(clippy::too_many_arguments, reason = "one argument an operand")]
pub(super) fn lora_backward(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &mut [LoraGrads<'_, CudaBuffer>],
    dy: &CudaBuffer,
    x: &CudaBuffer,
    s: &CudaBuffer,
    s_width: usize,
    dx: Option<&mut CudaBuffer>,
) -> Result<(), DeviceError> {
    let Some(first) = groups.first() else { return Ok(()) };
    let (inputs, outputs) = (first.rows.module.inputs, first.rows.module.outputs);
    let rows = layout.rows();
    assert!(x.len == rows * inputs && dy.len == rows * outputs && s.len == rows * s_width, "x, s or dy is not of its width");
    assert!(dx.as_ref().is_none_or(|dx| dx.len == x.len), "dx is not of x's size");
    let mut tables = Tables::new();
    for group in groups.iter() {
        assert!(group.grads.len == group.rows.params.len, "an adapter's gradients are laid out as its parameters");
        let (params, grads) = (device.read("params", group.rows.params, Use::State), device.read("grads", group.grads, Use::State));
        tables.push(layout, &group.rows, params, grads, (inputs, outputs), s_width);
    }
    let ds = device.scratch("lora ds", rows * s_width * 4)?;
    let (x, dy) = (device.read("x", x, Use::Activation), device.read("dy", dy, Use::Activation));
    let s = device.read("s", s, Use::State);
    let shared = tables.arguments(device, layout, s_width)?;
    let shrink = Lora { x: dy, s_out: ds, wide: outputs as u32, ..shared };
    // SAFETY: sizes and modules were checked; the scratch, of the layout's rows, is all that is written.
    unsafe { launch(device, "lora_backward_shrink", tables.shrink_grid(), SHRINK.2, shrink) }?;
    let gradient_b = Lora { x: dy, s_in: s, wide: outputs as u32, ..shared };
    // SAFETY: sizes and modules were checked; the groups' gradients, unique references all, are what is written.
    unsafe { launch(device, "lora_gradient_b", tables.gradient_grid(outputs), GRADIENT.2, gradient_b) }?;
    let gradient_a = Lora { x, s_in: ds, wide: inputs as u32, ..shared };
    // SAFETY: as above.
    unsafe { launch(device, "lora_gradient_a", tables.gradient_grid(inputs), GRADIENT.2, gradient_a) }?;
    let Some(dx) = dx else { return Ok(()) };
    let expand = Lora { y: device.read("dx", dx, Use::Activation), s_in: ds, wide: inputs as u32, ..shared };
    // SAFETY: sizes and modules were checked; dx is the only buffer written.
    unsafe { launch(device, "lora_backward_expand", tables.expand_grid(inputs), EXPAND.2, expand) }
}
