//! Other algorithms of cuBLASLt's for products with fewer rows than the pinned one was chosen for: where all their bytes are the same.
//!
//! Never lets a row's bits depend on the number of rows: one byte that differs, and the bucket keeps the algorithm of all the others. bf16 hides most of
//! what two orders of a sum differ by, so that operands whose products cancel are compared too: of those, rounding is all that is left.
#![expect(unsafe_code, reason = "runs products")]

use std::collections::BTreeMap;

use super::blas::{Operands, Prepared, logits_pitch, number};
use super::device::{CudaDevice, Element};
use super::energy;
use super::linear::{rows_max, takes};
use super::memory::{Block, Owner};
use super::plan::{BUCKETS, Key, Product, Slices};
use crate::{DeviceError, Use};

/// Rows for which the heuristic is asked beside those of the bucket: it offers other tiles for each.
const ASKED: [usize; 3] = [256, 512, 4096];

/// Rows of the comparison in a bucket with many.
const MANY_ROWS: usize = 4096;

/// Pins for each bucket of rows another algorithm: one whose tiles take little energy; else, where the pinned one leaves multiprocessors idle, one that is
/// estimated to take less time, and where it does not the one that the heuristic puts first for that many rows.
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

fn better(device: &mut CudaDevice, key: Key, pinned: [u64; 8], (above, rows): (usize, usize)) -> Result<Option<[u64; 8]>, DeviceError> {
    let bucket = Bucket { key, rows, prepared: Prepared::new(key, rows, device.precision)?, pinned };
    let Some(waves) = bucket.waves(device, pinned) else { return Ok(None) };
    let others = if waves < BUSY { bucket.quicker(device, waves)? } else { bucket.first(device)? };
    let preferred = [bucket.frugal(device)?, others].concat();
    // The pinned one needs no comparison, and nothing that comes after it.
    let candidates: Vec<_> = preferred.into_iter().take_while(|candidate| *candidate != pinned).take(TRIED).collect();
    if candidates.is_empty() {
        return Ok(None);
    }
    let arrays = Arrays::new(device, key, rows)?;
    for candidate in candidates {
        if takes(device, key, candidate, above, rows)? && arrays.equal(device, &bucket.prepared, [pinned, candidate])? {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}

/// A product with the most rows of a bucket, and what is pinned for any number of them.
struct Bucket {
    key: Key,
    rows: usize,
    prepared: Prepared,
    pinned: [u64; 8],
}

impl Bucket {
    /// How often an algorithm's tiles fill the multiprocessors; none where it cannot do the product.
    fn waves(&self, device: &CudaDevice, words: [u64; 8]) -> Option<f32> {
        Some(device.blas.check(&self.prepared, words)?.waves)
    }

    /// What the heuristic offers when it is asked for these numbers of rows, each once. Of the pinned one's number alone: others of the
    /// library's algorithms are far from what the estimate thinks.
    fn offers(&self, device: &CudaDevice, asked: impl IntoIterator<Item = usize>) -> Result<Vec<[u64; 8]>, DeviceError> {
        let mut offers = Vec::new();
        for rows in asked {
            for offer in device.blas.offers(&Prepared::new(self.key, rows.min(rows_max(self.key)), device.precision)?)? {
                if number(offer) == number(self.pinned) && !offers.contains(&offer) {
                    offers.push(offer);
                }
            }
        }
        Ok(offers)
    }

    /// Offers that are estimated to take well under the time of the pinned one, whose waves are given; the quickest first.
    fn quicker(&self, device: &CudaDevice, pinned_waves: f32) -> Result<Vec<[u64; 8]>, DeviceError> {
        let cost = |waves| cost(self.key, self.rows, waves, device.gpu.properties.multiprocessors);
        let offers = self.offers(device, ASKED.into_iter().chain([self.rows]))?;
        let mut costs: Vec<_> = offers.into_iter().filter_map(|offer| Some((cost(self.waves(device, offer)?), offer))).collect();
        costs.retain(|(candidate, _)| *candidate < 0.9 * cost(pinned_waves));
        costs.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        Ok(costs.into_iter().map(|(_, offer)| offer).collect())
    }

    /// One of each tile that takes little energy here, in their order: the pinned one where it has that tile, else what is offered for the bucket's rows before
    /// what is for others.
    fn frugal(&self, device: &CudaDevice) -> Result<Vec<[u64; 8]>, DeviceError> {
        let offers = self.offers(device, [self.rows].into_iter().chain(ASKED))?;
        let mut by_place = BTreeMap::new();
        for words in [self.pinned].into_iter().chain(offers) {
            if let Some(place) = energy::place(device, self.key, &self.prepared, words) {
                by_place.entry(place).or_insert(words);
            }
        }
        Ok(by_place.into_values().collect())
    }

    /// What the heuristic puts first: the library's own order is good where most multiprocessors have work.
    fn first(&self, device: &CudaDevice) -> Result<Vec<[u64; 8]>, DeviceError> {
        Ok(self.offers(device, [self.rows])?.into_iter().take(1).collect())
    }
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
