//! Other algorithms of cuBLASLt's for products with fewer rows than the pinned one was chosen for: where all their bytes are the same.
//!
//! Never lets a row's bits depend on the number of rows: one byte that differs, and the bucket keeps the algorithm of all the others. bf16 hides most of
//! what two orders of a sum differ by, so that operands whose products cancel are compared too: of those, rounding is all that is left.
#![expect(unsafe_code, reason = "runs products")]

use super::blas::{Operands, Prepared, logits_pitch, number};
use super::device::{CudaDevice, Element};
use super::linear::{rows_max, takes};
use super::memory::{Block, Owner};
use super::plan::{BUCKETS, Key, Product, Slices};
use crate::{DeviceError, Use};

/// Rows for which the heuristic is asked beside those of the bucket: it offers other tiles for each.
const ASKED: [usize; 3] = [256, 512, 4096];

/// Rows of the comparison in a bucket with many.
const MANY_ROWS: usize = 4096;

/// Pins for each bucket of rows another algorithm: where the pinned one leaves multiprocessors idle, one that is estimated to take less time;
/// else the one that the heuristic puts first for that many rows.
pub(super) fn pin(device: &mut CudaDevice, key: Key, words: [u64; 8]) -> Result<(), DeviceError> {
    let most = rows_max(key);
    let mut above = 0;
    for end in BUCKETS.into_iter().filter(|end| *end < MANY_ROWS) {
        if above < most {
            match better(device, key, words, (above, end.min(most))) {
                Ok(Some(better)) => device.plan.set_bucket(key, end, better),
                Ok(None) | Err(DeviceError::OutOfMemory { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        above = end;
    }
    Ok(())
}

fn better(device: &mut CudaDevice, key: Key, words: [u64; 8], (above, rows): (usize, usize)) -> Result<Option<[u64; 8]>, DeviceError> {
    let prepared = Prepared::new(key, rows, device.precision)?;
    let cost = |device: &CudaDevice, words| {
        let waves = device.blas.check(&prepared, words)?.waves;
        Some((cost(key, rows, waves, device.gpu.properties.multiprocessors), waves))
    };
    let Some((present, waves)) = cost(device, words) else { return Ok(None) };
    let mut offers: Vec<(f32, [u64; 8])> = Vec::new();
    if waves >= BUSY {
        // The library's own order is good where most multiprocessors have work.
        let own = device.blas.offers(&prepared)?.into_iter().find(|offer| number(*offer) == number(words));
        offers.extend(own.filter(|offer| *offer != words).map(|offer| (0.0, offer)));
    }
    for asked in ASKED.into_iter().chain([rows]).filter(|_| waves < BUSY) {
        for offer in device.blas.offers(&Prepared::new(key, asked.min(rows_max(key)), device.precision)?)? {
            // Others of the library's algorithms are far from what the estimate thinks.
            if number(offer) == number(words) && !offers.iter().any(|(_, known)| *known == offer) {
                offers.extend(cost(device, offer).map(|(cost, _)| (cost, offer)));
            }
        }
    }
    offers.retain(|(cost, _)| *cost < 0.9 * present);
    offers.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    if offers.is_empty() {
        return Ok(None);
    }
    let arrays = Arrays::new(device, key, rows)?;
    for (_, offer) in offers.into_iter().take(TRIED) {
        if takes(device, key, offer, above, rows)? && arrays.equal(device, &prepared, [words, offer])? {
            return Ok(Some(offer));
        }
    }
    Ok(None)
}

/// Multiprocessors that have work, of all, from which on the library's own order is trusted. Below it was seen to offer what takes ten times
/// as long as its best (896 outputs, 4864 inputs, 128 rows).
const BUSY: f32 = 0.5;

/// How many offers are tried for a bucket.
const TRIED: usize = 3;

/// About the microseconds of a product whose tiles fill the multiprocessors so many times: a step of 64 along the inner dimension costs 0.05 and
/// what its part of the tile costs at full rate. Within a fifth of what an H200 needs, where tiles are fewer than multiprocessors; on
/// another card the order of algorithms is much the same.
fn cost(key: Key, rows: usize, waves: f32, multiprocessors: i32) -> f32 {
    let slices = Slices::new(key.outputs, key.inputs);
    let (inner, columns) = match key.product {
        Product::Linear | Product::LinearBias | Product::Logits => (key.inputs, key.outputs),
        Product::LinearBackward => (key.outputs, key.inputs),
        Product::LogitsBackward => (slices.width, slices.count * key.inputs),
        Product::LogitsBackwardRest => (slices.rest, key.inputs),
    };
    let tile = (rows * columns) as f32 / (waves * multiprocessors as f32).max(1.0);
    waves.ceil() * inner.div_ceil(64) as f32 * (0.05 + tile / 46_800.0)
}

/// How operands are filled whose products cancel along the inner dimension: period, half and whether the second half is negated.
pub(super) struct Cancelling {
    pub(super) weight: (usize, usize, bool),
    pub(super) x: (usize, usize, bool),
}

impl Cancelling {
    /// Of a product whose results are rounded to activations; results in float32 show every order as they are.
    pub(super) fn of(Key { product, outputs, inputs }: Key) -> Option<Self> {
        match product {
            Product::Linear | Product::LinearBias => Some(Self { weight: (inputs, inputs / 2, true), x: (inputs, inputs / 2, false) }),
            Product::LinearBackward => {
                Some(Self { weight: (outputs * inputs, outputs / 2 * inputs, true), x: (outputs, outputs / 2, false) })
            }
            Product::Logits | Product::LogitsBackward | Product::LogitsBackwardRest => None,
        }
    }
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
    key: Key,
    rows: usize,
}

impl Arrays {
    fn new(device: &CudaDevice, key: Key, rows: usize) -> Result<Self, DeviceError> {
        let (bytes, pitch, activation) = (device.precision.bytes(), logits_pitch(key.outputs), device.element(Use::Activation));
        let (x_width, out_width, element) = match key.product {
            Product::Linear | Product::LinearBias => (key.inputs, key.outputs, activation),
            Product::Logits => (key.inputs, pitch, Element::F32),
            Product::LinearBackward => (key.outputs, key.inputs, activation),
            Product::LogitsBackward => (pitch, Slices::new(key.outputs, key.inputs).count * key.inputs, Element::F32),
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
            accumulates: matches!(key.product, Product::Linear | Product::LinearBackward),
            key,
            rows,
        };
        Ok(arrays)
    }

    fn fill(&self, device: &CudaDevice, cancels: bool) -> Result<(), DeviceError> {
        let Key { outputs, inputs, .. } = self.key;
        let (activation, weights, x) = (device.element(Use::Activation), outputs * inputs, self.x.bytes() / device.precision.bytes());
        if let Some(Cancelling { weight, x: of_x }) = Cancelling::of(self.key).filter(|_| cancels) {
            device.fill_cancelling((&self.weight, 0), weights, 1, 0.05, weight)?;
            device.fill_word(&self.bias, 0)?;
            return device.fill_cancelling((&self.x, 0), self.rows * of_x.0, 3, 1.0, of_x);
        }
        device.fill_part(&self.weight, 0, activation, weights, 1, 0.05)?;
        device.fill_part(&self.bias, 0, activation, outputs, 2, 1.0)?;
        device.fill_part(&self.x, 0, activation, x, 3, 1.0)
    }

    /// Whether two algorithms give the same bytes throughout; also where they add to what is there.
    fn equal(&self, device: &mut CudaDevice, prepared: &Prepared, algorithms: [[u64; 8]; 2]) -> Result<bool, DeviceError> {
        let modes = [(false, false), (true, false), (false, true)];
        let wanted =
            |(accumulate, cancels): &(bool, bool)| (self.accumulates || !accumulate) && (!cancels || Cancelling::of(self.key).is_some());
        for (accumulate, cancels) in modes.iter().filter(|mode| wanted(mode)) {
            self.fill(device, *cancels)?;
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
                    added: 0,
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

#[cfg(test)]
mod tests {
    use super::{Key, Product, cost};

    /// Times of an H200, less what a launch costs.
    #[test]
    fn costs_are_near_what_was_measured() {
        let key = Key { product: Product::Linear, outputs: 896, inputs: 4864 };
        for (rows, waves, micros) in [(128, 0.424, 8.4), (128, 0.212, 9.5), (2048, 0.97, 23.0), (2048, 0.848, 25.0)] {
            let cost = cost(key, rows, waves, 132);
            assert!((cost / micros - 1.0).abs() < 0.25, "{rows} rows, {waves} waves: {cost}, measured {micros}");
        }
    }
}
