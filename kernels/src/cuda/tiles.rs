//! Products by tiles that the card's own copies bring (product.cuh): arrays as these know them, and how a product is cut into tiles.
//!
//! Never looks at what is in an array, and never lets how a product is cut matter to what it is.
#![expect(unsafe_code, reason = "calls the driver")]

use cudarc::driver::sys;

use super::ROW_ALIGN;
use super::driver::{Address, failed};
use crate::DeviceError;

/// `TensorMap` of tma.cuh.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
pub(super) struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>() && align_of::<TensorMap>() == align_of::<sys::CUtensorMap>());

/// Elements of a row of a tile: 128 bytes of bf16.
pub(super) const TILE_COLUMNS: usize = 64;

/// Elements that rows of an array are a multiple of: 16 bytes, which the copies take at least.
pub(super) const ALIGN_COLUMNS: usize = 8;

impl TensorMap {
    /// A bf16 array in tiles so many rows high, whose rows follow one another. What lies past its end is read as zero, and is not written.
    ///
    /// # Errors
    /// The driver refuses it: rows are no multiple of [`ALIGN_COLUMNS`], or its address none of 16.
    pub(super) fn new(address: Address, rows: usize, columns: usize, tile_rows: usize) -> Result<Self, DeviceError> {
        use sys::{CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle};
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (size, pitch) = ([columns as u64, rows as u64], [2 * columns as u64]);
        let (tile, steps) = ([TILE_COLUMNS as u32, tile_rows as u32], [1_u32; 2]);
        // SAFETY: two sizes, one pitch, two sides of a tile and two steps, as the rank says; the driver writes one map and keeps nothing. What is at the
        // address is not looked at before a kernel does, whose launch answers for it.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                address as *mut _,
                size.as_ptr(),
                pitch.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(|e| failed(&format!("tiles of {rows} rows of {columns}"), e))?;
        Ok(Self(map.opaque))
    }
}

/// Stages of product.cuh, the panels of 32 columns of the weight in one, and threads of a block: eight warps that multiply, and four of which one fetches.
const STAGES: usize = 4;
const PANELS: usize = 8;
const PANEL_COLUMNS: usize = 32;
pub(super) const PRODUCT_THREADS: u32 = 384;

/// Dynamic shared memory of a kernel of products: x and weight of each stage, two barriers a stage; and room to begin at a multiple of 1024.
pub(super) const PRODUCT_BYTES: u32 = (STAGES * ((ROW_ALIGN + PANELS * PANEL_COLUMNS) * TILE_COLUMNS * 2 + 16) + 1024) as u32;

/// `Product` of product.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
pub(super) struct TiledProduct {
    x: TensorMap,
    weight: TensorMap,
    steps: u32,
    row_tiles: u32,
    whole: u32,
    narrow: u32,
    panels: u32,
    zero: [u32; 27],
}

impl TiledProduct {
    /// `rows` rows of x, a multiple of 128, by a weight of so many columns; and the blocks that it takes on a card.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub(super) fn new(
        (x, weight): (Address, Address),
        rows: usize,
        (columns, inner): (usize, usize),
        multiprocessors: usize,
    ) -> Result<(Self, usize), DeviceError> {
        let row_tiles = rows / ROW_ALIGN;
        let Cut { whole, narrow, panels } = Cut::new(row_tiles, columns, multiprocessors);
        let product = Self {
            x: TensorMap::new(x, rows, inner, ROW_ALIGN)?,
            weight: TensorMap::new(weight, columns, inner, PANEL_COLUMNS)?,
            steps: inner.div_ceil(TILE_COLUMNS) as u32,
            row_tiles: row_tiles as u32,
            whole: whole as u32,
            narrow: narrow as u32,
            panels: panels as u32,
            zero: [0; 27],
        };
        Ok((product, (row_tiles * (whole + narrow)).min(multiprocessors)))
    }
}

/// The columns of a weight in tiles: whole ones, then narrow ones so many panels wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    whole: usize,
    narrow: usize,
    panels: usize,
}

impl Cut {
    /// The cut by which blocks that take tiles in turn, one a multiprocessor, end first.
    fn new(row_tiles: usize, columns: usize, multiprocessors: usize) -> Self {
        let most = columns.div_ceil(PANELS * PANEL_COLUMNS);
        let all_whole = Self { whole: most, narrow: 0, panels: 6 };
        // What is narrow is for the end: two rounds of it at most.
        let fewest = most.saturating_sub((2 * multiprocessors).div_ceil(row_tiles));
        let cuts = (fewest..most).rev().flat_map(|whole| {
            let rest = columns - whole * PANELS * PANEL_COLUMNS;
            [6, 4].map(|panels| Self { whole, narrow: rest.div_ceil(panels * PANEL_COLUMNS), panels })
        });
        cuts.fold(
            all_whole,
            |best, cut| if cut.time(row_tiles, multiprocessors) < best.time(row_tiles, multiprocessors) { cut } else { best },
        )
    }

    /// How long the last block works, in panels: of a whole tile eight, and a quarter for its end.
    fn time(self, row_tiles: usize, multiprocessors: usize) -> usize {
        let (wholes, narrows) = (row_tiles * self.whole, row_tiles * self.narrow);
        let (rounds, over) = (wholes / multiprocessors, wholes % multiprocessors);
        let time = |wholes: usize, narrows: usize| wholes * (4 * PANELS + 1) + narrows * (4 * self.panels + 1);
        // The first that has one whole tile less, if there is one, takes the first narrow one; the first block of all the first of what is left then.
        let least = time(rounds, narrows.div_ceil(multiprocessors));
        let first = narrows.saturating_sub(multiprocessors - over).div_ceil(multiprocessors);
        if over > 0 { least.max(time(rounds + 1, first)) } else { least }
    }
}

#[cfg(test)]
mod tests {
    use super::Cut;

    /// What each of the blocks does, tile by tile.
    fn longest(cut: Cut, row_tiles: usize, multiprocessors: usize) -> usize {
        let mut work = vec![0; multiprocessors];
        for tile in 0..row_tiles * (cut.whole + cut.narrow) {
            let panels = if tile < row_tiles * cut.whole { 8 } else { cut.panels };
            work[tile % multiprocessors] += 4 * panels + 1;
        }
        work.into_iter().max().unwrap()
    }

    #[test]
    fn a_cut_covers_every_column_and_is_no_longer_than_whole_tiles_alone() {
        for (columns, inner) in [(11_264, 2048), (28_672, 4096), (9728, 896), (144, 72), (272, 64), (256, 8)] {
            for row_tiles in [1, 2, 3, 5, 16, 36, 512] {
                let cut = Cut::new(row_tiles, columns, 132);
                let covered = cut.whole * 256 + cut.narrow * cut.panels * 32;
                assert!(covered >= columns && covered < columns + 256, "{cut:?} of {columns} x {inner}");
                assert_eq!(cut.time(row_tiles, 132), longest(cut, row_tiles, 132), "{cut:?}, {row_tiles}");
                let whole = Cut { whole: columns.div_ceil(256), narrow: 0, panels: 6 };
                assert!(cut.time(row_tiles, 132) <= whole.time(row_tiles, 132));
            }
        }
        // Five rounds and a third in whole tiles: five and a half.
        assert_eq!(Cut::new(16, 11_264, 132).time(16, 132), 5 * 33 + 17);
        // Two thirds of a round: all tiles narrow.
        assert_eq!(Cut::new(2, 11_264, 132), Cut { whole: 0, narrow: 59, panels: 6 });
    }
}
