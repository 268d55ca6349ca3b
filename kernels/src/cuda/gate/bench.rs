//! The gate's arrays of one product: run with a tile of rows alone, and with the same rows among NaN.
//!
//! Never decides what runs: it compares.
#![expect(unsafe_code, reason = "runs products")]

use super::CASES;
use crate::cuda::agreement;
use crate::cuda::blas::{Operands, logits_pitch};
use crate::cuda::buckets::Cancelling;
use crate::cuda::device::{CudaDevice, Element, convert};
use crate::cuda::memory::{Block, Owner};
use crate::cuda::plan::{Choice, Key, Product, Slices};
use crate::cuda::{Precision, ROW_ALIGN, linear};
use crate::exercise::difference;
use crate::{DType, DeviceError, Use};

/// Words of quiet NaNs: two of bf16, or one of float32.
pub(super) fn nan(precision: Precision) -> u32 {
    match precision {
        Precision::F32 => 0x7fc0_1234,
        Precision::Bf16 => 0x7fc1_7fc1,
    }
}

/// How a product is run: onto what is there, and with operands whose products cancel, so that in bf16 too every order of the sum shows.
#[derive(Clone, Copy, Default)]
pub(super) struct Mode {
    pub(super) accumulates: bool,
    pub(super) cancels: bool,
}

pub(super) const MODES: [Mode; 3] =
    [Mode { accumulates: false, cancels: false }, Mode { accumulates: true, cancels: false }, Mode { accumulates: false, cancels: true }];

impl Mode {
    fn is_of(self, key: Key, precision: Precision) -> bool {
        let accumulates = matches!(key.product, Product::Linear | Product::LinearBackward);
        (accumulates || !self.accumulates) && (!self.cancels || (precision == Precision::Bf16 && Cancelling::of(key).is_some()))
    }
}

/// Arrays of one product at the largest row count.
pub(super) struct Bench {
    key: Key,
    pub(super) weight: Block,
    bias: Block,
    pub(super) x: Block,
    pub(super) solo: Block,
    pub(super) fused: Block,
    x_row: usize,
    out_row: usize,
    out_element: Element,
    out_width: usize,
    /// Results of one row: several where the product is done in slices, each for all rows.
    parts: usize,
}

impl Bench {
    pub(super) fn new(device: &CudaDevice, key: Key, tiles: usize) -> Result<Self, DeviceError> {
        let (bytes, pitch) = (device.precision.bytes(), logits_pitch(key.outputs));
        let activation = device.element(Use::Activation);
        let (x_row, out_width, out_element) = match key.product {
            Product::Linear | Product::LinearBias => (key.inputs, key.outputs, activation),
            Product::Logits => (key.inputs, pitch, Element::F32),
            Product::LinearBackward => (key.outputs, key.inputs, activation),
            Product::LogitsBackward | Product::LogitsBackwardRest => (pitch, key.inputs, Element::F32),
        };
        let (x_row, out_row) = (x_row * bytes, out_width * out_element.bytes());
        let alloc = |bytes| device.pool.alloc(bytes, Owner::Device);
        let rows = tiles * ROW_ALIGN;
        let parts = if key.product == Product::LogitsBackward { Slices::new(key.outputs, key.inputs).count } else { 1 };
        Ok(Self {
            key,
            weight: alloc(key.outputs * key.inputs * bytes)?,
            bias: alloc(key.outputs * bytes)?,
            x: alloc(rows * x_row)?,
            solo: alloc(parts * ROW_ALIGN * out_row)?,
            fused: alloc(parts * rows * out_row)?,
            x_row,
            out_row,
            out_element,
            out_width,
            parts,
        })
    }

    /// Random weights and bias: such that products cancel along the inner dimension, or not.
    pub(super) fn fill(&self, device: &CudaDevice, cancels: bool) -> Result<(), DeviceError> {
        let (activation, len) = (device.element(Use::Activation), self.key.outputs * self.key.inputs);
        if let Some(Cancelling { weight, .. }) = Cancelling::of(self.key).filter(|_| cancels) {
            device.fill_cancelling((&self.weight, 0), len, 1, 0.05, weight)?;
            return device.fill_word(&self.bias, 0);
        }
        device.fill_part(&self.weight, 0, activation, len, 1, 0.05)?;
        device.fill_part(&self.bias, 0, activation, self.key.outputs, 2, 1.0)
    }

    /// Random rows in one tile of x and NaN in all others, so that products cancel along the inner dimension, or not.
    pub(super) fn place(&self, device: &CudaDevice, slot: usize, cancels: bool) -> Result<(), DeviceError> {
        let width = self.x_row / device.precision.bytes();
        device.fill_word(&self.x, nan(device.precision))?;
        let (first, len) = (slot * ROW_ALIGN * self.x_row, ROW_ALIGN * width);
        match Cancelling::of(self.key).filter(|_| cancels) {
            Some(Cancelling { x, .. }) => device.fill_cancelling((&self.x, first), len, 3, 1.0, x),
            None => device.fill_part(&self.x, first, device.element(Use::Activation), len, 3, 1.0),
        }
    }

    /// Runs the product with random rows in one tile; where it accumulates, what is there is random too.
    pub(super) fn run(&self, device: &mut CudaDevice, out: &Block, (tiles, slot): (usize, usize), mode: Mode) -> Result<(), DeviceError> {
        self.place(device, slot, mode.cancels)?;
        device.fill_word(out, nan(device.precision))?;
        device.fill_part(out, slot * ROW_ALIGN * self.out_row, self.out_element, ROW_ALIGN * self.out_width, 4, 1.0)?;
        let operands = Operands {
            weight: self.weight.address(),
            x: self.x.address(),
            bias: self.bias.address(),
            out: out.address(),
            accumulate: mode.accumulates,
            added: 0,
        };
        // SAFETY: the blocks were made for this product and for at least as many tiles.
        unsafe { linear::product(device, self.key, tiles * ROW_ALIGN, operands) }
    }

    /// Whether the anchor's rows are the same bytes; what pads logits is no product's.
    fn equal(&self, device: &mut CudaDevice, tiles: usize, slot: usize) -> Result<bool, DeviceError> {
        let bytes = ROW_ALIGN * self.out_row;
        for part in 0..self.parts {
            if device.unequal((&self.solo, part * bytes), (&self.fused, (part * tiles + slot) * bytes), bytes)? != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How far the anchor's rows alone are from what the fixed-tile kernel makes of them, which is compared with the CPU device's.
    fn apart(&self, device: &mut CudaDevice) -> Result<f64, DeviceError> {
        self.fill(device, false)?;
        self.run(device, &self.solo, (1, 0), Mode::default())?;
        let plan = device.plan.clone();
        device.plan.set(self.key, Choice::Own);
        let own = self.run(device, &self.fused, (1, 0), Mode::default());
        device.plan = plan;
        own?;
        Ok(difference(&vec![self.numbers(device, &self.solo)?], &vec![self.numbers(device, &self.fused)?]))
    }

    /// The results of every eighth row of one tile, a step further in each eight, without what pads logits.
    fn numbers(&self, device: &mut CudaDevice, block: &Block) -> Result<Vec<f32>, DeviceError> {
        let width = if self.key.product == Product::Logits { self.key.outputs } else { self.out_width };
        let from = if self.out_element == Element::F32 { DType::F32 } else { DType::BF16 };
        let mut numbers = Vec::new();
        for row in (0..self.parts * ROW_ALIGN).filter(|row| row % 8 == row / 8 % 8) {
            let (first, mut read) = (numbers.len(), 0);
            numbers.resize(first + width, 0.0);
            device.staging.download(block, row * self.out_row, width * from.bytes(), |_, chunk| {
                let count = chunk.len() / from.bytes();
                convert(chunk, from, bytemuck::cast_slice_mut(&mut numbers[first + read..first + read + count]), Element::F32);
                read += count;
            })?;
        }
        Ok(numbers)
    }
}

/// Compares the anchor's rows alone with the same rows among others, and with the fixed-tile kernel's; (cases, unequal).
pub(super) fn check(device: &mut CudaDevice, key: Key) -> Result<(usize, usize), DeviceError> {
    let most = linear::rows_max(key) / ROW_ALIGN;
    let cases = || CASES.into_iter().filter(|(tiles, _)| *tiles <= most);
    let bench = Bench::new(device, key, cases().map(|(tiles, _)| tiles).max().unwrap_or(1))?;
    let spare = device.pool.alloc(4, Owner::Device)?;
    let (mut count, mut unequal) = (0, 0);
    if matches!(device.plan.get(key), Some(Choice::CublasLt(_))) {
        count += 1;
        unequal += usize::from(bench.apart(device)? > agreement::tolerance(device.precision));
    }
    let precision = device.precision;
    for mode in MODES.into_iter().filter(|mode| mode.is_of(key, precision)) {
        bench.fill(device, mode.cancels)?;
        bench.run(device, &bench.solo, (1, 0), mode)?;
        for (tiles, slot) in cases() {
            device.busy(&spare)?;
            bench.run(device, &bench.fused, (tiles, slot), mode)?;
            count += 1;
            unequal += usize::from(!bench.equal(device, tiles, slot)?);
        }
    }
    device.gpu.synchronize_side()?;
    Ok((count, unequal))
}
