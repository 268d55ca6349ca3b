//! The exactness gate: before the device serves, its products and its operations must not care who stands beside a row.
//!
//! Never waves a failure through: a product that fails runs by the fixed-tile kernel from then on; what fails all the same is named, and the engine gives each
//! job passes of its own. Gate, up and SwiGLU go by one kernel where that was shown to be their two to the byte, and nowhere else.

mod bench;
mod gate_up;

use sha2::{Digest as _, Sha256};

use super::agreement;
use super::blas;
use super::compile::hex;
use super::device::CudaDevice;
use super::energy;
use super::linear;
use super::plan::{Choice, GateUp, Key, Plan};
use super::verdict::{GateReport, ProductCheck, name};
use crate::exercise::{Independence, Sizes, independence};
use crate::{AttentionShape, Device as _, DeviceError};

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

/// A choice, for people.
fn words(choice: Choice) -> String {
    match choice {
        Choice::CublasLt(words) => blas::describe(words),
        Choice::Own => "fixed tiles".to_owned(),
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
        format!("{}.plan", hex(&Sha256::digest(format!("{:?} {matrix:?} {}", class.collect::<Vec<_>>(), energy::figures()))))
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
        let shapes: Vec<_> = self.plan.gate_ups().map(|(shape, _)| shape).collect();
        let report = match recalled.filter(|report| report.keys() == planned && report.shapes() == shapes) {
            Some(report) => {
                let replaced = report.products.iter().filter(|check| check.replaced.is_some());
                replaced.for_each(|check| self.plan.set(check.key, Choice::Own));
                report.gate_ups.iter().for_each(|check| self.plan.set_gate_up(check.shape, check.choice()));
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
            // Beside the products as they will run.
            let shapes: Vec<_> = self.plan.gate_ups().map(|(shape, _)| shape).collect();
            for shape in shapes {
                let check = gate_up::check(self, shape)?;
                self.plan.set_gate_up(shape, check.choice());
                report.gate_ups.push(check);
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
        let (cases, unequal) = bench::check(self, key)?;
        if unequal == 0 || choice == Choice::Own {
            return Ok(ProductCheck { key, algorithm: words(choice), cases, unequal, replaced: None });
        }
        self.plan.set(key, Choice::Own);
        let (cases, still) = bench::check(self, key)?;
        Ok(ProductCheck { key, algorithm: words(Choice::Own), cases, unequal: still, replaced: Some(unequal) })
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
        let is_shown = |shape| report.gate_ups.iter().any(|check| check.shape == shape && check.choice() == GateUp::Own);
        let taken = self.plan.gate_ups().filter(|(shape, choice)| *choice == GateUp::Own && !is_shown(*shape));
        names.extend(taken.map(|((outputs, inputs), _)| format!("gate-up {outputs}x{inputs}")));
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
            report.gate_ups.retain(|check| check.shape != (key.outputs, key.inputs));
        }
    }
}
