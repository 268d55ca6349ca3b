//! Grouped LoRA: tables of groups and tiles, and the launches of lora.cu and lora_backward.cu.
//!
//! Never adds the rows of two groups.
#![expect(unsafe_code, reason = "launches kernels")]

use super::ROW_ALIGN;
use super::device::{CudaBuffer, CudaDevice};
use super::driver::Address;
use super::record::Access;
use crate::{DeviceError, Layout, LoraGrads, LoraIn, LoraOut, LoraRows, Use};

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
    first_part: u32,
    parts: u32,
    wants_dx: u32,
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

/// Of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct Module {
    y: Address,
    s: Address,
    ds: Address,
    wide: u32,
    s_width: u32,
    blocks: u32,
    pitch: u32,
}

/// The most modules of a call; as lora.cuh.
const MODULES: usize = 3;

/// The parameters of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Lora {
    x: Address,
    dx: Address,
    groups: Address,
    tiles: Address,
    positions: Address,
    parts: Address,
    modules: [Module; MODULES],
    wide: u32,
    count: u32,
    used: u32,
    ranks: u32,
    columns: u32,
    zero: u32,
}

/// Blocks and threads of the kernels; as lora.cuh, lora.cu and lora_backward.cu.
const SHRINK: (usize, usize, u32) = (16, 4, 512); // rows, blocks of 8 ranks, threads
const EXPAND: (usize, usize, u32) = (16, 512, 128); // rows, columns, threads
const EXPAND_BACKWARD: (usize, usize, u32) = (32, 128, 128);
const GRADIENT: (usize, usize, u32) = (64, 64, 128); // columns, ranks, threads
const PART_TILES: usize = 2;

/// What is the same for every module of a group.
struct Rows<'r> {
    rows: &'r LoraRows<'r, CudaBuffer>,
    grads: Address,
    wants_dx: bool,
}

/// The tables of one call.
struct Tables {
    /// For each module all groups.
    groups: Vec<Group>,
    tiles: Vec<Tile>,
    parts: usize,
    count: usize,
    /// The largest rank on each module.
    ranks: [usize; MODULES],
}

impl Tables {
    /// `outputs` and `s_widths` are of the call's modules; `inputs` is the width of x.
    fn new(device: &CudaDevice, layout: &Layout, all: &[Rows<'_>], inputs: usize, modules: &[(usize, usize)]) -> Self {
        assert!(modules.len() <= MODULES, "{} modules; at most {MODULES} in one call", modules.len());
        let mut tables = Self { groups: Vec::new(), tiles: Vec::new(), parts: 0, count: all.len(), ranks: [0; MODULES] };
        let mut places = Vec::with_capacity(all.len());
        for (number, Rows { rows, .. }) in all.iter().enumerate() {
            assert!(rows.segments.end <= layout.segments().len(), "segments {:?} of {}", rows.segments, layout.segments().len());
            assert!(rows.sites.len() == modules.len(), "a group with {} sites on {} modules", rows.sites.len(), modules.len());
            let (first_tile, first_part) = (tables.tiles.len(), tables.parts);
            for segment in &layout.segments()[rows.segments.clone()] {
                for before in (0..segment.rows).step_by(ROW_ALIGN) {
                    let valid = (segment.rows - before).min(ROW_ALIGN) as u32;
                    tables.tiles.push(Tile {
                        row: (segment.start + before) as u32,
                        valid,
                        group: number as u32,
                        sequence: segment.sequence,
                    });
                }
            }
            tables.parts += (tables.tiles.len() - first_tile).div_ceil(PART_TILES);
            places.push((first_tile, first_part));
        }
        let ends: Vec<_> = places.iter().copied().skip(1).chain([(tables.tiles.len(), tables.parts)]).collect();
        for (number, (outputs, s_width)) in modules.iter().enumerate() {
            for ((Rows { rows, grads, wants_dx }, place), end) in all.iter().zip(&places).zip(&ends) {
                let mut group = Group {
                    a: 0,
                    b: 0,
                    da: 0,
                    db: 0,
                    key: 0,
                    scale: 0.0,
                    probability: 0.0,
                    rank: 0,
                    first_tile: place.0 as u32,
                    end_tile: end.0 as u32,
                    first_part: place.1 as u32,
                    parts: (end.1 - place.1) as u32,
                    wants_dx: u32::from(*wants_dx),
                };
                if let Some(site) = &rows.sites[number] {
                    let module = site.module;
                    assert!(
                        (module.inputs, module.outputs) == (inputs, *outputs),
                        "a module of {} -> {} on {inputs} -> {outputs}",
                        module.inputs,
                        module.outputs
                    );
                    assert!(module.rank > 0 && module.rank <= *s_width, "rank {} does not fit s of width {s_width}", module.rank);
                    let inside = module.a + module.rank * inputs <= rows.params.len && module.b + outputs * module.rank <= rows.params.len;
                    assert!(inside, "A at {} and B at {} do not lie inside {} parameters", module.a, module.b, rows.params.len);
                    let params = device.read("params", rows.params, Use::State);
                    let at = |base: Address, index: usize| if base == 0 { 0 } else { base + (index * 4) as u64 };
                    (group.a, group.b) = (at(params, module.a), at(params, module.b));
                    (group.da, group.db) = (at(*grads, module.a), at(*grads, module.b));
                    group.key = site.dropout.map_or(0, |dropout| dropout.key);
                    group.probability = site.dropout.map_or(0.0, |dropout| dropout.probability);
                    (group.scale, group.rank) = (module.scale, module.rank as u32);
                    tables.ranks[number] = tables.ranks[number].max(module.rank);
                }
                tables.groups.push(group);
            }
        }
        tables
    }

    fn blocks(&self, module: usize) -> usize {
        self.ranks[module].div_ceil(8)
    }

    fn rank_max(&self) -> usize {
        self.ranks.into_iter().max().unwrap_or(0)
    }

    /// The kernel that knows dropout, where any group drops anything; a group that does not has the same bits from both.
    fn either(&self, without: &'static str, with: &'static str) -> &'static str {
        if self.groups.iter().any(|group| group.probability > 0.0) { with } else { without }
    }

    fn row_blocks(&self, rows: usize) -> usize {
        self.tiles.len() * (ROW_ALIGN / rows)
    }

    /// Puts the tables on the card and fills in what all kernels share.
    fn arguments(
        &self,
        device: &mut CudaDevice,
        layout: &Layout,
        x: Address,
        wide: usize,
        modules: &[Module],
    ) -> Result<Lora, DeviceError> {
        // One copy for both: the tiles follow the groups.
        let mut both: Vec<u8> = bytemuck::cast_slice(&self.groups).to_vec();
        both.extend_from_slice(bytemuck::cast_slice(&self.tiles));
        let groups = device.table(&both)?;
        let mut all = [Module::default(); MODULES];
        all[..modules.len()].copy_from_slice(modules);
        Ok(Lora {
            x,
            dx: 0,
            groups,
            tiles: groups + size_of_val(self.groups.as_slice()) as u64,
            positions: device.tables(layout)?.positions,
            parts: 0,
            modules: all,
            wide: wide as u32,
            count: self.count as u32,
            used: modules.len() as u32,
            ranks: (self.rank_max().div_ceil(8) * 8) as u32,
            columns: 0,
            zero: 0,
        })
    }
}

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

pub(super) fn lora(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &[LoraRows<'_, CudaBuffer>],
    x: &CudaBuffer,
    modules: &mut [LoraOut<'_, CudaBuffer>],
) -> Result<(), DeviceError> {
    let rows = layout.rows();
    if groups.is_empty() || rows == 0 {
        return Ok(());
    }
    let inputs = x.len / rows;
    assert!(x.len == rows * inputs, "x is not of the layout's rows");
    let mut widths = Vec::new();
    for LoraOut { s, s_width, y } in modules.iter() {
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
    let mut arguments = tables.arguments(device, layout, x, inputs, &parts)?;
    let (s, y): (Vec<_>, Vec<_>) = parts.iter().map(|module| (module.s, module.y)).unzip();
    let blocks: usize = (0..parts.len()).map(|module| tables.blocks(module)).sum();
    let grid = ([tables.row_blocks(SHRINK.0), blocks.div_ceil(SHRINK.1), 1], SHRINK.2);
    // SAFETY: sizes and modules were checked; the modules' s are the only buffers written.
    unsafe { launch(device, tables.either("lora_shrink", "lora_shrink_drop"), grid, &arguments, &[x], &s) }?;
    let columns: usize = parts.iter().map(|module| (module.wide as usize).div_ceil(EXPAND.1)).sum();
    arguments.columns = columns as u32;
    let grid = ([tables.row_blocks(EXPAND.0) * columns, 1, 1], EXPAND.2);
    // SAFETY: sizes and modules were checked; the modules' y are the only buffers written.
    unsafe { launch(device, "lora_expand", grid, &arguments, &s, &y) }
}

pub(super) fn lora_backward(
    device: &mut CudaDevice,
    layout: &Layout,
    groups: &mut [LoraGrads<'_, CudaBuffer>],
    x: &CudaBuffer,
    modules: &[LoraIn<'_, CudaBuffer>],
    dx: Option<&mut CudaBuffer>,
) -> Result<(), DeviceError> {
    let rows = layout.rows();
    if groups.is_empty() || rows == 0 {
        return Ok(());
    }
    let inputs = x.len / rows;
    assert!(x.len == rows * inputs, "x is not of the layout's rows");
    assert!(dx.as_ref().is_none_or(|dx| dx.len == x.len), "dx is not of x's size");
    let mut widths = Vec::new();
    for LoraIn { dy, s, s_width } in modules {
        widths.push((dy.len / rows, *s_width));
        assert!(dy.len % rows == 0 && s.len == rows * s_width, "s or dy is not of its width");
    }
    let mut all = Vec::new();
    for LoraGrads { rows, grads, wants_dx } in groups.iter() {
        assert!(grads.len == rows.params.len, "an adapter's gradients are laid out as its parameters");
        all.push(Rows { rows, grads: device.read("grads", grads, Use::State), wants_dx: *wants_dx && dx.is_some() });
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
    let grid = ([tables.row_blocks(SHRINK.0), blocks, parts.len()], SHRINK.2);
    // SAFETY: sizes and modules were checked; the scratch, of the layout's rows, is all that is written.
    unsafe { launch(device, "lora_backward_shrink", grid, &arguments, &dy, &[ds]) }?;
    if let Some(dx) = dx.filter(|_| all.iter().any(|rows| rows.wants_dx)) {
        arguments.dx = device.read("dx", dx, Use::Activation);
        let columns = inputs.div_ceil(EXPAND_BACKWARD.1);
        arguments.columns = columns as u32;
        let grid = ([tables.row_blocks(EXPAND_BACKWARD.0) * columns, 1, 1], EXPAND_BACKWARD.2);
        let kernel = tables.either("lora_backward_expand", "lora_backward_expand_drop");
        // SAFETY: sizes and modules were checked; dx is the only buffer written.
        unsafe { launch(device, kernel, grid, &arguments, &[ds, arguments.dx], &[arguments.dx]) }?;
    }
    let patches = patches(inputs, &widths);
    let reads: Vec<_> = parts.iter().flat_map(|module| [module.y, module.s]).chain([x, ds]).collect();
    let grid = ([patches, tables.parts, tables.rank_max().div_ceil(GRADIENT.1)], GRADIENT.2);
    let kernel = tables.either("lora_gradient", "lora_gradient_drop");
    // SAFETY: sizes and modules were checked; the groups' gradients, unique references all, and the scratch are what is written.
    unsafe { launch(device, kernel, grid, &arguments, &reads, &[parts_at]) }?;
    if parts_at == 0 {
        return Ok(());
    }
    // SAFETY: as above.
    unsafe { launch(device, "lora_gradient_sum", ([patches, tables.count, 1], 256), &arguments, &[parts_at], &[]) }
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
    Ok((ds, device.scratch(parts, tables.parts * patches(inputs, widths) * patch)?))
}
