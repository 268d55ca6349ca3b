//! The exactness gate: before the device serves, its products and its operations must not care who stands beside a row.
//!
//! Never waves a failure through: a product that fails runs by the fixed-tile kernel from then on, gate and up with SwiGLU by their product and the kernel after it; what fails all the same is named, and the
//! engine gives each job passes of its own.
#![expect(unsafe_code, reason = "runs products")]

use super::agreement;
use super::blas::{self, Operands, logits_pitch};
use super::buckets::Cancelling;
use super::device::{CudaDevice, Element, convert};
use super::memory::{Block, Owner};
use super::plan::{Choice, Key, Plan, Product, Slices};
use super::verdict::{GateReport, ProductCheck, name};
use super::{Precision, ROW_ALIGN, head, linear};
use crate::exercise::{Independence, Sizes, difference, independence};
use crate::{AttentionShape, DType, Device as _, DeviceError, Use};

use sha2::{Digest as _, Sha256};

use super::compile::hex;

/// Words of quiet NaNs: two of bf16, or one of float32.
fn nan(precision: Precision) -> u32 {
    match precision {
        Precision::F32 => 0x7fc0_1234,
        Precision::Bf16 => 0x7fc1_7fc1,
    }
}

/// Row counts of the fused side, and the tile where the anchor stands.
const CASES: [(usize, usize); 6] = [(2, 1), (3, 1), (8, 0), (16, 15), (32, 17), (36, 35)];

/// Sizes at which the operations are checked, with heads as wide as a model's, of which one, two or three have a key head; no other size divides
/// anything.
fn sizes(heads: AttentionShape) -> Sizes {
    let kv_heads = 2;
    let group = match heads.heads / heads.kv_heads.max(1) {
        0 | 1 => 1,
        group if group.is_multiple_of(2) => 2,
        _ => 3,
    };
    let attention = AttentionShape { heads: group * kv_heads, kv_heads, head_dim: heads.head_dim, window: Some(50) };
    Sizes { attention, vocabulary: 1003, rank: 9, seed: 1 }
}

/// How a product is run: onto what is there, and with operands whose products cancel, so that in bf16 too every order of the sum shows.
#[derive(Clone, Copy, Default)]
struct Mode {
    accumulates: bool,
    cancels: bool,
}

const MODES: [Mode; 3] =
    [Mode { accumulates: false, cancels: false }, Mode { accumulates: true, cancels: false }, Mode { accumulates: false, cancels: true }];

impl Mode {
    fn is_of(self, key: Key, precision: Precision) -> bool {
        let accumulates = matches!(key.product, Product::Linear | Product::LinearBackward);
        (accumulates || !self.accumulates) && (!self.cancels || (precision == Precision::Bf16 && Cancelling::of(key).is_some()))
    }
}

/// Arrays of one product at the largest row count.
struct Bench {
    key: Key,
    weight: Block,
    bias: Block,
    x: Block,
    solo: Block,
    fused: Block,
    x_row: usize,
    out_row: usize,
    out_element: Element,
    out_width: usize,
    /// Results of one row: several where the product is done in slices, each for all rows.
    parts: usize,
}

impl Bench {
    fn new(device: &CudaDevice, key: Key, tiles: usize) -> Result<Self, DeviceError> {
        let (bytes, pitch) = (device.precision.bytes(), logits_pitch(key.outputs));
        let activation = device.element(Use::Activation);
        let (x_row, out_width, out_element) = match key.product {
            Product::Linear | Product::LinearBias => (key.inputs, key.outputs, activation),
            Product::LinearSwiglu => (key.inputs, key.outputs / 2, activation),
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
    fn fill(&self, device: &CudaDevice, cancels: bool) -> Result<(), DeviceError> {
        let (activation, len) = (device.element(Use::Activation), self.key.outputs * self.key.inputs);
        if let Some(Cancelling { weight, .. }) = Cancelling::of(self.key).filter(|_| cancels) {
            device.fill_cancelling((&self.weight, 0), len, 1, 0.05, weight)?;
            return device.fill_word(&self.bias, 0);
        }
        device.fill_part(&self.weight, 0, activation, len, 1, 0.05)?;
        device.fill_part(&self.bias, 0, activation, self.key.outputs, 2, 1.0)
    }

    /// Runs the product with random rows in one tile and NaN in all others; where it accumulates, what is there is random too.
    fn run(&self, device: &mut CudaDevice, out: &Block, (tiles, slot): (usize, usize), mode: Mode) -> Result<(), DeviceError> {
        let activation = device.element(Use::Activation);
        let width = self.x_row / device.precision.bytes();
        device.fill_word(&self.x, nan(device.precision))?;
        let (first, len) = (slot * ROW_ALIGN * self.x_row, ROW_ALIGN * width);
        match Cancelling::of(self.key).filter(|_| mode.cancels) {
            Some(Cancelling { x, .. }) => device.fill_cancelling((&self.x, first), len, 3, 1.0, x)?,
            None => device.fill_part(&self.x, first, activation, len, 3, 1.0)?,
        }
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

    /// Whether the anchor's rows alone are, to the byte, what the product and the kernel after it make of them.
    fn is_what_both_are(&self, device: &mut CudaDevice, mode: Mode) -> Result<bool, DeviceError> {
        let plan = device.plan.clone();
        device.plan.set(self.key, Choice::Apart);
        let both = self.run(device, &self.fused, (1, 0), mode);
        device.plan = plan;
        both?;
        self.equal(device, 1, 0)
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
fn check(device: &mut CudaDevice, key: Key) -> Result<(usize, usize), DeviceError> {
    let most = match key.product {
        Product::Logits | Product::LogitsBackward | Product::LogitsBackwardRest => head::chunk_rows(key.outputs) / ROW_ALIGN,
        _ => usize::MAX,
    };
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
        if key.product == Product::LinearSwiglu {
            count += 1;
            unequal += usize::from(!bench.is_what_both_are(device, mode)?);
        }
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

/// What runs where the gate finds that what was planned does not do.
fn stand_in(key: Key) -> Choice {
    if key.product == Product::LinearSwiglu { Choice::Apart } else { Choice::Own }
}

/// A choice, for people.
fn words(key: Key, choice: Choice) -> String {
    match choice {
        Choice::CublasLt(words) => blas::describe(words),
        Choice::Own if key.product == Product::LinearSwiglu => "one kernel".to_owned(),
        Choice::Own => "fixed tiles".to_owned(),
        Choice::Apart => "the product, then the kernel".to_owned(),
    }
}

/// Adds up what was found of the same operations at several sizes.
fn add(total: &mut Vec<Independence>, found: Vec<Independence>) {
    if total.is_empty() {
        *total = found;
        return;
    }
    for (total, found) in total.iter_mut().zip(found) {
        total.cases += found.cases;
        total.unequal += found.unequal;
    }
}

impl CudaDevice {
    /// Pins an algorithm for every product of weights of these sizes (outputs and inputs), as loading them does, or recalls what was pinned
    /// on this device class before.
    ///
    /// # Errors
    /// A failed device, or a plan whose algorithm the library refuses.
    pub fn plan_matrices(&mut self, matrices: &[(usize, usize)]) -> Result<(), DeviceError> {
        matrices.iter().try_for_each(|matrix| {
            let entry = self.plan_entry(*matrix);
            let recalled = self.kernels.compiler.recall(&entry).and_then(|text| String::from_utf8(text).ok()?.parse::<Plan>().ok());
            let is_known = recalled.is_some();
            if let Some(plan) = recalled.filter(|plan| plan.header == self.plan.header) {
                self.plan.adopt(&plan);
            }
            linear::plan(self, matrix.0, matrix.1)?;
            if !is_known {
                self.kernels.compiler.keep(&entry, self.plan.of(&[*matrix]).to_string().as_bytes());
            }
            Ok(())
        })
    }

    /// Where the plan for a weight is kept: all of the device class but what is pinned.
    fn plan_entry(&self, matrix: (usize, usize)) -> String {
        let class = self.class(&[]).into_iter().filter(|(name, _)| !["gate", "plan"].contains(&name.as_str()));
        format!("{}.plan", hex(&Sha256::digest(format!("{:?} {matrix:?}", class.collect::<Vec<_>>()))))
    }

    /// Runs the gate over every product that is planned and over every operation with heads of these shapes, or recalls what it found on
    /// this device class with this plan before. Run it before anything that must repeat: it may pin other products.
    ///
    /// # Errors
    /// A failed device, one that computes something else than the CPU device, or too little memory.
    pub fn prove(&mut self, heads: &[AttentionShape]) -> Result<&GateReport, DeviceError> {
        let entry = self.gate_entry(heads);
        let recalled = self.kernels.compiler.recall(&entry).and_then(|text| GateReport::recalled(&String::from_utf8(text).ok()?));
        let planned = self.plan.choices().map(|(key, _)| key).collect();
        let report = match recalled.filter(|report| report.keys() == planned) {
            Some(report) => {
                let replaced = report.products.iter().filter(|check| check.replaced.is_some());
                replaced.for_each(|check| self.plan.set(check.key, stand_in(check.key)));
                report
            }
            None => {
                let report = self.gate(heads)?;
                self.kernels.compiler.keep(&entry, report.kept().as_bytes());
                report
            }
        };
        Ok(self.verdict.insert(report))
    }

    /// Where what the gate found is kept: the device class with the plan as it is before it, and what the gate looks at.
    fn gate_entry(&self, heads: &[AttentionShape]) -> String {
        let matrices: Vec<_> = self.plan.choices().map(|(key, _)| (key.outputs, key.inputs)).collect();
        let class = self.class(&matrices).into_iter().filter(|(name, _)| name != "gate");
        let text = format!(
            "{:?} {CASES:?} {:?}",
            class.collect::<Vec<_>>(),
            heads.iter().copied().map(|heads| (sizes(heads), agreement::sizes(heads))).collect::<Vec<_>>()
        );
        format!("{}.gate", hex(&Sha256::digest(text)))
    }

    /// [`CudaDevice::prove`], whatever is kept. Seconds.
    ///
    /// # Errors
    /// A failed device, or too little memory.
    pub fn gate(&mut self, heads: &[AttentionShape]) -> Result<GateReport, DeviceError> {
        // The CPU device computes beside the card.
        std::thread::scope(|scope| {
            let twin = scope.spawn(|| agreement::expected(heads));
            let mut report = GateReport::default();
            let planned: Vec<_> = self.plan.choices().collect();
            for (key, choice) in planned {
                report.products.push(self.gate_product(key, choice)?);
            }
            // The operations bring weights of their own, whose products are no part of the plan that results are known by.
            let plan = self.plan.clone();
            let operations = self.gate_operations(heads, twin, &mut report);
            self.prepared.retain(|(key, _), _| plan.get(*key).is_some());
            self.plan = plan;
            operations.map(|()| report)
        })
    }

    fn gate_operations(&mut self, heads: &[AttentionShape], twin: agreement::Twin<'_>, report: &mut GateReport) -> Result<(), DeviceError> {
        for heads in heads {
            add(&mut report.operations, independence(self, sizes(*heads))?);
        }
        let expected =
            twin.join().map_err(|_| DeviceError::Failed("the CPU device, beside which the card is compared, panicked".to_owned()))??;
        report.agreements = self.agreements(heads, &expected)?;
        Ok(())
    }

    fn gate_product(&mut self, key: Key, choice: Choice) -> Result<ProductCheck, DeviceError> {
        let (cases, unequal) = check(self, key)?;
        let other = stand_in(key);
        if unequal == 0 || choice == other {
            return Ok(ProductCheck { key, algorithm: words(key, choice), cases, unequal, replaced: None });
        }
        self.plan.set(key, other);
        let (cases, still) = check(self, key)?;
        Ok(ProductCheck { key, algorithm: words(key, other), cases, unequal: still, replaced: Some(unequal) })
    }

    /// What the gate found, if it was run.
    #[must_use]
    pub fn verdict(&self) -> Option<&GateReport> {
        self.verdict.as_ref()
    }

    /// Names of what is planned and not shown to be exact.
    pub(super) fn unproven(&self) -> Vec<String> {
        let Some(report) = &self.verdict else { return vec!["the gate was not run".to_owned()] };
        let (seen, mut names) = (report.keys(), report.failed());
        names.extend(self.plan.choices().filter(|(key, _)| !seen.contains(key)).map(|(key, _)| name(key)));
        names
    }

    /// Pins another algorithm for a product; for tests and measurements. What the gate found of it no longer counts.
    #[doc(hidden)]
    pub fn pin(&mut self, key: Key, choice: Choice) {
        self.plan.set(key, choice);
        self.prepared.retain(|(prepared, _), _| *prepared != key);
        self.forget_graphs();
        if let Some(report) = &mut self.verdict {
            report.products.retain(|check| check.key != key);
        }
    }
}
