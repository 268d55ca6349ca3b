//! Other algorithms of cuBLASLt's for products with fewer or more rows than the pinned one was chosen for: where all their bytes are the same.
//!
//! Never lets a row's bits depend on the number of rows: one byte that differs, and the bucket keeps the algorithm of all the others.
#![expect(unsafe_code, reason = "runs products")]

use super::blas::{Operands, Prepared, logits_pitch};
use super::device::{CudaDevice, Element};
use super::linear::{rows_max, takes};
use super::memory::{Block, Owner};
use super::plan::{BUCKETS, Key, Product, Slices};
use crate::{DeviceError, Use};

/// Rows of the comparison in the bucket without an end.
const MANY_ROWS: usize = 16_384;

/// How many of the heuristic's offers are tried for a bucket.
const TRIED: usize = 3;

/// Pins for each bucket of rows the first of the heuristic's offers whose bytes are those of `words`, unless that is the first itself.
pub(super) fn pin(device: &mut CudaDevice, key: Key, words: [u64; 8]) -> Result<(), DeviceError> {
    let most = rows_max(key);
    let mut above = 0;
    for end in BUCKETS {
        let rows = end.min(MANY_ROWS);
        if above < most {
            match better(device, key, words, (above, end.min(most)), rows.min(most)) {
                Ok(Some(better)) => device.plan.set_bucket(key, end, better),
                Ok(None) | Err(DeviceError::OutOfMemory { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        above = end;
    }
    Ok(())
}

fn better(
    device: &mut CudaDevice,
    key: Key,
    words: [u64; 8],
    (above, end): (usize, usize),
    rows: usize,
) -> Result<Option<[u64; 8]>, DeviceError> {
    let prepared = Prepared::new(key, rows, device.precision)?;
    let mut arrays = None;
    for offer in device.blas.offers(&prepared)?.into_iter().take(TRIED) {
        if offer == words {
            break;
        }
        if !takes(device, key, offer, above, end)? {
            continue;
        }
        if arrays.is_none() {
            arrays = Some(Arrays::new(device, key, rows)?);
        }
        if let Some(arrays) = &arrays
            && arrays.equal(device, &prepared, [words, offer])?
        {
            return Ok(Some(offer));
        }
    }
    Ok(None)
}

/// Random operands, and results of two algorithms.
struct Arrays {
    weight: Block,
    bias: Block,
    x: Block,
    out: [Block; 2],
    element: Element,
    len: usize,
    accumulates: bool,
}

impl Arrays {
    fn new(device: &CudaDevice, key: Key, rows: usize) -> Result<Self, DeviceError> {
        let (bytes, pitch, activation) = (device.precision.bytes(), logits_pitch(key.outputs), device.element(Use::Activation));
        let (x_width, out_width, element) = match key.product {
            Product::Linear | Product::LinearBias => (key.inputs, key.outputs, activation),
            Product::Logits => (key.inputs, pitch, Element::F32),
            Product::LinearBackward => (key.outputs, key.inputs, activation),
            Product::LogitsBackward => (pitch, Slices::new(key.outputs).count * key.inputs, Element::F32),
            Product::LogitsBackwardRest => (pitch, key.inputs, Element::F32),
        };
        let alloc = |bytes| device.pool.alloc(bytes, Owner::Device);
        let (weights, len) = (key.outputs * key.inputs, rows * out_width);
        let arrays = Self {
            weight: alloc(weights * bytes)?,
            bias: alloc(key.outputs * bytes)?,
            x: alloc(rows * x_width * bytes)?,
            out: [alloc(len * element.bytes())?, alloc(len * element.bytes())?],
            element,
            len,
            accumulates: key.product == Product::LinearBackward,
        };
        device.fill_part(&arrays.weight, 0, activation, weights, 1, 0.05)?;
        device.fill_part(&arrays.bias, 0, activation, key.outputs, 2, 1.0)?;
        device.fill_part(&arrays.x, 0, activation, rows * x_width, 3, 1.0)?;
        Ok(arrays)
    }

    /// Whether two algorithms give the same bytes throughout; also where they add to what is there.
    fn equal(&self, device: &mut CudaDevice, prepared: &Prepared, algorithms: [[u64; 8]; 2]) -> Result<bool, DeviceError> {
        let modes: &[bool] = if self.accumulates { &[false, true] } else { &[false] };
        for accumulate in modes {
            for (words, out) in algorithms.into_iter().zip(&self.out) {
                if *accumulate {
                    device.fill_part(out, 0, self.element, self.len, 4, 1.0)?;
                }
                let operands = Operands {
                    weight: self.weight.address(),
                    x: self.x.address(),
                    bias: self.bias.address(),
                    out: out.address(),
                    accumulate: *accumulate,
                };
                // SAFETY: the blocks were made for this product and number of rows, and both algorithms take it.
                unsafe { device.blas.run(prepared, words, operands) }?;
            }
            let bytes = self.len * self.element.bytes() / 4 * 4;
            if device.unequal((&self.out[0], 0), (&self.out[1], 0), bytes)? != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
