//! The exactness gate: before the device serves, its products and its operations must not care who stands beside a row.
//!
//! Never waves a failure through: a product that fails runs by the fixed-tile kernel from then on, and the report says so.
#![expect(unsafe_code, reason = "runs products")]

use super::blas::{self, Operands, logits_pitch};
use super::device::{CudaDevice, Element};
use super::memory::{Block, Owner};
use super::plan::{Choice, Key, Product, Slices};
use super::{Precision, ROW_ALIGN, head, linear};
use crate::exercise::{Independence, Sizes, independence};
use crate::{AttentionShape, DeviceError, Use};

/// What the gate found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateReport {
    /// Each product that is planned.
    pub products: Vec<ProductCheck>,
    /// Each operation.
    pub operations: Vec<Independence>,
}

/// What the gate found of one product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductCheck {
    /// The product.
    pub key: Key,
    /// What ran: cuBLASLt's algorithm in words, or the fixed-tile kernel.
    pub algorithm: String,
    /// Comparisons made.
    pub cases: usize,
    /// Comparisons in which a byte differed, with cuBLASLt's algorithm. Not zero: the fixed-tile kernel was pinned instead, and passed.
    pub unequal: usize,
}

impl GateReport {
    /// Whether everything that will now run gave equal bytes. Products that were replaced have; operations are never replaced.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.operations.iter().all(|operation| operation.unequal == 0)
    }
}

impl std::fmt::Display for GateReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for ProductCheck { key, algorithm, cases, unequal } in &self.products {
            let Key { product, outputs, inputs } = key;
            writeln!(f, "{:<16} {outputs:>7} x {inputs:<6} {algorithm:<50} {cases} cases, {unequal} unequal", product.name())?;
        }
        for Independence { operation, cases, unequal } in &self.operations {
            writeln!(f, "{operation:<40} {cases} cases, {unequal} unequal")?;
        }
        Ok(())
    }
}

/// Words of quiet NaNs: two of bf16, or one of float32.
fn nan(precision: Precision) -> u32 {
    match precision {
        Precision::F32 => 0x7fc0_1234,
        Precision::Bf16 => 0x7fc1_7fc1,
    }
}

/// Row counts of the fused side, and the tile where the anchor stands.
const CASES: [(usize, usize); 6] = [(2, 1), (3, 1), (8, 0), (16, 15), (32, 17), (36, 35)];

/// Sizes at which the operations are checked; none divides anything.
const SIZES: Sizes =
    Sizes { attention: AttentionShape { heads: 4, kv_heads: 2, head_dim: 64, window: Some(50) }, vocabulary: 1003, rank: 9, seed: 1 };

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
            Product::Logits => (key.inputs, pitch, Element::F32),
            Product::LinearBackward => (key.outputs, key.inputs, activation),
            Product::LogitsBackward | Product::LogitsBackwardRest => (pitch, key.inputs, Element::F32),
        };
        let (x_row, out_row) = (x_row * bytes, out_width * out_element.bytes());
        let alloc = |bytes| device.pool.alloc(bytes, Owner::Device);
        let rows = tiles * ROW_ALIGN;
        let len = key.outputs * key.inputs;
        let parts = if key.product == Product::LogitsBackward { Slices::new(key.outputs).count } else { 1 };
        let bench = Self {
            key,
            weight: alloc(len * bytes)?,
            bias: alloc(key.outputs * bytes)?,
            x: alloc(rows * x_row)?,
            solo: alloc(parts * ROW_ALIGN * out_row)?,
            fused: alloc(parts * rows * out_row)?,
            x_row,
            out_row,
            out_element,
            out_width,
            parts,
        };
        device.fill_part(&bench.weight, 0, activation, len, 1, 0.05)?;
        device.fill_part(&bench.bias, 0, activation, key.outputs, 2, 1.0)?;
        Ok(bench)
    }

    /// Runs the product with random rows in one tile and NaN in all others; where it accumulates, what is there is random too.
    fn run(&self, device: &mut CudaDevice, out: &Block, tiles: usize, slot: usize, accumulate: bool) -> Result<(), DeviceError> {
        let activation = device.element(Use::Activation);
        let width = self.x_row / device.precision.bytes();
        device.fill_word(&self.x, nan(device.precision))?;
        device.fill_part(&self.x, slot * ROW_ALIGN * self.x_row, activation, ROW_ALIGN * width, 3, 1.0)?;
        device.fill_word(out, nan(device.precision))?;
        device.fill_part(out, slot * ROW_ALIGN * self.out_row, self.out_element, ROW_ALIGN * self.out_width, 4, 1.0)?;
        let operands =
            Operands { weight: self.weight.address(), x: self.x.address(), bias: self.bias.address(), out: out.address(), accumulate };
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
}

/// Compares the anchor's rows alone with the same rows among others; (cases, unequal).
fn check(device: &mut CudaDevice, key: Key) -> Result<(usize, usize), DeviceError> {
    let most = match key.product {
        Product::Logits | Product::LogitsBackward | Product::LogitsBackwardRest => head::chunk_rows(key.outputs) / ROW_ALIGN,
        _ => usize::MAX,
    };
    let cases = || CASES.into_iter().filter(|(tiles, _)| *tiles <= most);
    let bench = Bench::new(device, key, cases().map(|(tiles, _)| tiles).max().unwrap_or(1))?;
    let spare = device.pool.alloc(4, Owner::Device)?;
    let (mut count, mut unequal) = (0, 0);
    let modes: &[bool] = if key.product == Product::LinearBackward { &[false, true] } else { &[false] };
    for accumulate in modes {
        bench.run(device, &bench.solo, 1, 0, *accumulate)?;
        for (tiles, slot) in cases() {
            device.busy(&spare)?;
            bench.run(device, &bench.fused, tiles, slot, *accumulate)?;
            count += 1;
            unequal += usize::from(!bench.equal(device, tiles, slot)?);
        }
    }
    device.gpu.synchronize_side()?;
    Ok((count, unequal))
}

impl CudaDevice {
    /// Runs the gate over every product that is planned and over every operation. Seconds. A product that fails is run by the fixed-tile
    /// kernel from then on, after that has passed; run the gate before anything that must repeat.
    ///
    /// # Errors
    /// A failed device, too little memory, or a fixed-tile kernel that fails too.
    pub fn gate(&mut self) -> Result<GateReport, DeviceError> {
        let mut products = Vec::new();
        let planned: Vec<_> = self.plan.choices().collect();
        for (key, choice) in planned {
            let (cases, unequal) = check(self, key)?;
            let algorithm = match choice {
                Choice::CublasLt(words) if unequal == 0 => blas::describe(words),
                Choice::CublasLt(_) => {
                    self.plan.set(key, Choice::Own);
                    let (_, still) = check(self, key)?;
                    if still > 0 {
                        return Err(DeviceError::Failed(format!("{key:?}: {still} cases differ, by the fixed-tile kernel too")));
                    }
                    "fixed tiles, in place of a failed algorithm".to_owned()
                }
                Choice::Own if unequal == 0 => "fixed tiles".to_owned(),
                Choice::Own => return Err(DeviceError::Failed(format!("{key:?}: {unequal} cases differ by the fixed-tile kernel"))),
            };
            products.push(ProductCheck { key, algorithm, cases, unequal });
        }
        // The operations bring weights of their own, whose products are no part of the plan that results are known by.
        let plan = self.plan.clone();
        let operations = independence(self, SIZES);
        self.prepared.retain(|(key, _), _| plan.get(*key).is_some());
        self.plan = plan;
        Ok(GateReport { products, operations: operations? })
    }

    /// Pins another algorithm for a product; for tests and measurements.
    #[doc(hidden)]
    pub fn pin(&mut self, key: Key, choice: Choice) {
        self.plan.set(key, choice);
        self.prepared.retain(|(prepared, _), _| *prepared != key);
    }
}
