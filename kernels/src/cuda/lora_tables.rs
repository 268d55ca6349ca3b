//! The tables of a LoRA call: groups, tiles of their rows, pieces of tiles, and the parameters that all its kernels take.
//!
//! Never launches anything.

use super::ROW_ALIGN;
use super::device::{CudaBuffer, CudaDevice};
use super::driver::Address;
use crate::{DeviceError, Layout, LoraRows, Use};

/// Of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
pub(super) struct Group {
    pub(super) a: Address,
    pub(super) b: Address,
    pub(super) da: Address,
    pub(super) db: Address,
    pub(super) key: u64,
    pub(super) scale: f32,
    pub(super) probability: f32,
    pub(super) rank: u32,
    pub(super) first_part: u32,
    pub(super) parts: u32,
    pub(super) wants_dx: u32,
}

/// Of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
pub(super) struct Tile {
    pub(super) row: u32,
    pub(super) valid: u32,
    pub(super) group: u32,
    pub(super) sequence: u32,
}

/// Of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
pub(super) struct Piece {
    pub(super) group: u32,
    pub(super) first_tile: u32,
    pub(super) end_tile: u32,
    pub(super) zero: u32,
}

/// Of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Module {
    pub(super) y: Address,
    pub(super) s: Address,
    pub(super) ds: Address,
    pub(super) wide: u32,
    pub(super) s_width: u32,
    pub(super) blocks: u32,
    pub(super) pitch: u32,
}

/// The most modules of a call; as lora.cuh.
pub(super) const MODULES: usize = 3;

/// Tiles of a piece.
const PIECE_TILES: usize = 2;

/// The parameters of lora.cuh.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
pub(super) struct Lora {
    pub(super) x: Address,
    pub(super) dx: Address,
    pub(super) groups: Address,
    pub(super) tiles: Address,
    pub(super) pieces: Address,
    pub(super) positions: Address,
    pub(super) parts: Address,
    pub(super) modules: [Module; MODULES],
    pub(super) wide: u32,
    pub(super) count: u32,
    pub(super) used: u32,
    pub(super) ranks: u32,
    pub(super) patches: u32,
    pub(super) columns: u32,
}

/// What is the same for every module of a group.
pub(super) struct Rows<'r> {
    pub(super) rows: &'r LoraRows<'r, CudaBuffer>,
    pub(super) grads: Address,
    pub(super) wants_dx: bool,
}

/// The tables of one call.
pub(super) struct Tables {
    /// For each module all groups.
    pub(super) groups: Vec<Group>,
    pub(super) tiles: Vec<Tile>,
    /// Of all groups, in order.
    pub(super) pieces: Vec<Piece>,
    pub(super) count: usize,
    /// The largest rank on each module.
    pub(super) ranks: [usize; MODULES],
}

impl Tables {
    /// `outputs` and `s_widths` are of the call's modules; `inputs` is the width of x.
    pub(super) fn new(device: &CudaDevice, layout: &Layout, all: &[Rows<'_>], inputs: usize, modules: &[(usize, usize)]) -> Self {
        assert!(modules.len() <= MODULES, "{} modules; at most {MODULES} in one call", modules.len());
        let mut tables = Self { groups: Vec::new(), tiles: Vec::new(), pieces: Vec::new(), count: all.len(), ranks: [0; MODULES] };
        let mut places = Vec::with_capacity(all.len());
        for (number, Rows { rows, .. }) in all.iter().enumerate() {
            assert!(rows.segments.end <= layout.segments().len(), "segments {:?} of {}", rows.segments, layout.segments().len());
            assert!(rows.sites.len() == modules.len(), "a group with {} sites on {} modules", rows.sites.len(), modules.len());
            let (first_tile, first_part) = (tables.tiles.len(), tables.pieces.len());
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
            let end = tables.tiles.len();
            let piece = |first: usize| Piece {
                group: number as u32,
                first_tile: first as u32,
                end_tile: (first + PIECE_TILES).min(end) as u32,
                zero: 0,
            };
            tables.pieces.extend((first_tile..end).step_by(PIECE_TILES).map(piece));
            places.push(first_part..tables.pieces.len());
        }
        for (number, (outputs, s_width)) in modules.iter().enumerate() {
            for (Rows { rows, grads, wants_dx }, place) in all.iter().zip(&places) {
                let mut group = Group {
                    a: 0,
                    b: 0,
                    da: 0,
                    db: 0,
                    key: 0,
                    scale: 0.0,
                    probability: 0.0,
                    rank: 0,
                    first_part: place.start as u32,
                    parts: place.len() as u32,
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

    pub(super) fn blocks(&self, module: usize) -> usize {
        self.ranks[module].div_ceil(8)
    }

    pub(super) fn rank_max(&self) -> usize {
        self.ranks.into_iter().max().unwrap_or(0)
    }

    /// The kernel that knows dropout, where any group drops anything; a group that does not has the same bits from both.
    pub(super) fn either(&self, without: &'static str, with: &'static str) -> &'static str {
        if self.groups.iter().any(|group| group.probability > 0.0) { with } else { without }
    }

    pub(super) fn row_blocks(&self, rows: usize) -> usize {
        self.tiles.len() * (ROW_ALIGN / rows)
    }

    /// Puts the tables on the card and fills in what all kernels share.
    pub(super) fn arguments(
        &self,
        device: &mut CudaDevice,
        layout: &Layout,
        x: Address,
        wide: usize,
        modules: &[Module],
    ) -> Result<Lora, DeviceError> {
        // One copy for all: tiles, pieces, groups.
        let mut together: Vec<u8> = bytemuck::cast_slice(&self.tiles).to_vec();
        together.extend_from_slice(bytemuck::cast_slice(&self.pieces));
        together.extend_from_slice(bytemuck::cast_slice(&self.groups));
        let tiles = device.table(&together)?;
        let pieces = tiles + size_of_val(self.tiles.as_slice()) as u64;
        let mut all = [Module::default(); MODULES];
        all[..modules.len()].copy_from_slice(modules);
        Ok(Lora {
            x,
            dx: 0,
            groups: pieces + size_of_val(self.pieces.as_slice()) as u64,
            tiles,
            pieces,
            positions: device.positions(layout)?,
            parts: 0,
            modules: all,
            wide: wide as u32,
            count: self.count as u32,
            used: modules.len() as u32,
            ranks: (self.rank_max().div_ceil(8) * 8) as u32,
            patches: 0,
            columns: 0,
        })
    }
}
