//! Products by tiles that the card's own copies bring (product.cuh): arrays as these know them, and what such a kernel is told.
//!
//! Never looks at what is in an array.
#![expect(unsafe_code, reason = "calls the driver")]

use cudarc::driver::sys;

use super::driver::{Address, failed};
use crate::DeviceError;

/// `TensorMap` of tma.cuh.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default, bytemuck::NoUninit)]
pub(super) struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>() && align_of::<TensorMap>() == align_of::<sys::CUtensorMap>());

/// Elements of a row of a tile: 128 bytes of bf16.
pub(super) const TILE_COLUMNS: usize = 64;

/// Elements that rows of an array are a multiple of: 16 bytes, which the copies take at least.
pub(super) const ALIGN_COLUMNS: usize = 8;

impl TensorMap {
    /// A bf16 array of rows and columns in tiles so many rows high; from row to row are `pitch` elements. What lies past its end is read as zero, and is not
    /// written.
    ///
    /// # Errors
    /// The driver refuses it: the pitch is no multiple of [`ALIGN_COLUMNS`], or its address none of 16.
    pub(super) fn new(address: Address, [rows, columns]: [usize; 2], pitch: usize, tile_rows: usize) -> Result<Self, DeviceError> {
        use sys::{CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle};
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let (size, pitch) = ([columns as u64, rows as u64], [2 * pitch as u64]);
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

/// Stages of product.cuh, rows and columns of its tiles, and threads of a block: two times four warps that multiply, and four of which one fetches.
const STAGES: usize = 6;
const TILE: usize = 128;
const SQUARE: usize = 64;
pub(super) const PRODUCT_THREADS: u32 = 384;

/// Dynamic shared memory of a kernel of products: x and weight of each stage, two barriers a stage; two squares and a barrier for each half; and room to begin
/// at a multiple of 1024.
pub(super) const PRODUCT_BYTES: u32 = (STAGES * (2 * TILE * TILE_COLUMNS * 2 + 16) + 2 * (2 * SQUARE * TILE_COLUMNS * 2 + 8) + 1024) as u32;

/// `Product` of product.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
pub(super) struct TiledProduct {
    x: TensorMap,
    weight: TensorMap,
    steps: u32,
    row_tiles: u32,
    column_tiles: u32,
    zero: [u32; 29],
}

impl TiledProduct {
    /// `rows` rows of x, a multiple of 128, by a weight of so many columns; and the blocks that it takes on a card. A tile may have
    /// half of its columns from each of two arrays that the weight is.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub(super) fn new(
        (x, weight): (Address, Address),
        rows: usize,
        (columns, inner): (usize, usize),
        multiprocessors: usize,
    ) -> Result<(Self, usize), DeviceError> {
        let (row_tiles, column_tiles) = (rows / TILE, columns.div_ceil(TILE));
        let product = Self {
            x: TensorMap::new(x, [rows, inner], inner, TILE)?,
            weight: TensorMap::new(weight, [columns, inner], inner, SQUARE)?,
            steps: inner.div_ceil(TILE_COLUMNS) as u32,
            row_tiles: row_tiles as u32,
            column_tiles: column_tiles as u32,
            zero: [0; 29],
        };
        Ok((product, (row_tiles * column_tiles).min(multiprocessors)))
    }

    /// Where a kernel writes `rows` rows of so many columns, 64 of both at a time.
    ///
    /// # Errors
    /// As [`TensorMap::new`].
    pub(super) fn out(address: Address, rows: usize, columns: usize) -> Result<TensorMap, DeviceError> {
        TensorMap::new(address, [rows, columns], columns, SQUARE)
    }
}
