//! What the exactness gate found, as a report for people and as a text that can be kept.
//!
//! Never judges: it records.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::plan::{GATE_UP, GateUp, Key, Product};
use crate::exercise::{Independence, names};

/// What the gate found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GateReport {
    /// Each product that is planned.
    pub products: Vec<ProductCheck>,
    /// Each shape of gate and up that there is one kernel for.
    pub gate_ups: Vec<GateUpCheck>,
    /// Each operation.
    pub operations: Vec<Independence>,
    /// Each operation beside the CPU device.
    pub agreements: Vec<Agreement>,
}

/// How far an operation's results are from the CPU device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The operation.
    pub operation: &'static str,
    /// The largest difference, as [`crate::exercise::difference`] measures it, in parts of a thousand million.
    pub billionths: u64,
}

impl Agreement {
    pub(super) fn none(operation: &'static str) -> Self {
        Self { operation, billionths: 0 }
    }

    /// Another comparison.
    pub(super) fn add(&mut self, difference: f64) {
        // A conversion ends at the largest number; what is no number is as far off.
        let billionths = if difference.is_nan() { u64::MAX } else { (difference * 1e9).ceil() as u64 };
        self.billionths = self.billionths.max(billionths);
    }

    /// The largest difference.
    #[must_use]
    pub fn difference(&self) -> f64 {
        self.billionths as f64 / 1e9
    }
}

impl std::fmt::Display for Agreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} differs by {:.1e}", self.operation, self.difference())
    }
}

/// What the gate found of one product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProductCheck {
    /// The product.
    pub key: Key,
    /// What runs: cuBLASLt's algorithm in words, or the fixed-tile kernel.
    pub algorithm: String,
    /// Comparisons made.
    pub cases: usize,
    /// Comparisons in which a byte differed, of what runs; or, of the one with the fixed-tile kernel, in which more than rounding did.
    pub unequal: usize,
    /// The same of cuBLASLt's algorithm in whose place the fixed-tile kernel runs.
    pub replaced: Option<usize>,
}

/// What the gate found of gate, up and SwiGLU in one kernel, beside their product and the kernel after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateUpCheck {
    /// Outputs of gate and up together, and inputs.
    pub shape: (usize, usize),
    /// Comparisons made.
    pub cases: usize,
    /// Comparisons in which a byte differed.
    pub unequal: usize,
}

impl GateUpCheck {
    /// What runs: the one kernel where it was compared and no byte differed.
    #[must_use]
    pub fn choice(&self) -> GateUp {
        if self.cases > 0 && self.unequal == 0 { GateUp::Own } else { GateUp::Apart }
    }
}

/// The first line of a kept report.
const TITLE: &str = "nodus-cuda-gate 4";

impl GateReport {
    /// Whether everything that will run gave equal bytes.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.failed().is_empty()
    }

    /// Names of what did not.
    #[must_use]
    pub fn failed(&self) -> Vec<String> {
        let products = self.products.iter().filter(|check| check.unequal > 0).map(|check| name(check.key));
        products.chain(self.operations.iter().filter(|operation| operation.unequal > 0).map(|found| found.operation.to_owned())).collect()
    }

    /// Comparisons made, of all that runs.
    #[must_use]
    pub fn cases(&self) -> usize {
        let taken = self.gate_ups.iter().filter(|check| check.choice() == GateUp::Own);
        let products = self.products.iter().map(|check| check.cases).chain(taken.map(|check| check.cases));
        products.chain(self.operations.iter().map(|found| found.cases)).sum()
    }

    /// The report for work with weight matrices of these sizes.
    #[must_use]
    pub fn of(&self, matrices: &[(usize, usize)]) -> Self {
        let wanted = |check: &&ProductCheck| matrices.contains(&(check.key.outputs, check.key.inputs));
        Self {
            products: self.products.iter().filter(wanted).cloned().collect(),
            gate_ups: self.gate_ups.iter().filter(|check| matrices.contains(&check.shape)).copied().collect(),
            operations: self.operations.clone(),
            agreements: self.agreements.clone(),
        }
    }

    /// The operation that is furthest from the CPU device's.
    #[must_use]
    pub fn furthest(&self) -> Option<Agreement> {
        self.agreements.iter().copied().max_by_key(|agreement| agreement.billionths)
    }

    /// As a receipt's device class says it.
    #[must_use]
    pub fn verdict(&self) -> String {
        match self.failed() {
            failed if failed.is_empty() => "passed".to_owned(),
            failed => format!("one job a pass: {}", failed.join(", ")),
        }
    }

    pub(super) fn keys(&self) -> BTreeSet<Key> {
        self.products.iter().map(|check| check.key).collect()
    }

    /// The shapes of gate and up, in the plan's order.
    pub(super) fn shapes(&self) -> Vec<(usize, usize)> {
        self.gate_ups.iter().map(|check| check.shape).collect()
    }

    /// A text that [`GateReport::recalled`] takes.
    pub(super) fn kept(&self) -> String {
        let mut text = format!("{TITLE}\n");
        for ProductCheck { key, algorithm, cases, unequal, replaced } in &self.products {
            let replaced = replaced.map_or("-".to_owned(), |unequal| unequal.to_string());
            // Writing to a string does not fail.
            let _ = writeln!(text, "{} {} {} {cases} {unequal} {replaced} {algorithm}", key.product.name(), key.outputs, key.inputs);
        }
        for GateUpCheck { shape: (outputs, inputs), cases, unequal } in &self.gate_ups {
            let _ = writeln!(text, "{GATE_UP} {outputs} {inputs} {cases} {unequal}");
        }
        for Independence { operation, cases, unequal } in &self.operations {
            let _ = writeln!(text, "operation {cases} {unequal} {operation}");
        }
        for Agreement { operation, billionths } in &self.agreements {
            let _ = writeln!(text, "agreement {billionths} {operation}");
        }
        text
    }

    /// What was kept; none where the text is not whole, or speaks of operations that this version does not have.
    pub(super) fn recalled(text: &str) -> Option<Self> {
        let (title, lines) = text.strip_suffix('\n')?.split_once('\n')?;
        let mut report = Self::default();
        for line in lines.lines() {
            match line.split_once(' ')? {
                ("operation", rest) => report.operations.push(operation(rest)?),
                ("agreement", rest) => report.agreements.push(agreement(rest)?),
                (GATE_UP, rest) => report.gate_ups.push(gate_up(rest)?),
                _ => report.products.push(product(line)?),
            }
        }
        let operations: Vec<&str> = report.operations.iter().map(|found| found.operation).collect();
        let agreements: Vec<&str> = report.agreements.iter().map(|found| found.operation).collect();
        (title == TITLE && operations == names() && agreements == names()).then_some(report)
    }
}

fn known(name: &str) -> Option<&'static str> {
    names().into_iter().find(|known| *known == name)
}

fn agreement(line: &str) -> Option<Agreement> {
    let (billionths, name) = line.split_once(' ')?;
    Some(Agreement { operation: known(name)?, billionths: billionths.parse().ok()? })
}

fn operation(line: &str) -> Option<Independence> {
    let mut words = line.splitn(3, ' ');
    let (cases, unequal, name) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?);
    Some(Independence { operation: known(name)?, cases, unequal })
}

fn gate_up(line: &str) -> Option<GateUpCheck> {
    let numbers: Vec<usize> = line.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let &[outputs, inputs, cases, unequal] = numbers.as_slice() else { return None };
    Some(GateUpCheck { shape: (outputs, inputs), cases, unequal })
}

fn product(line: &str) -> Option<ProductCheck> {
    let words: Vec<&str> = line.splitn(7, ' ').collect();
    let &[name, outputs, inputs, cases, unequal, replaced, algorithm] = words.as_slice() else { return None };
    let number = |word: &str| word.parse::<usize>().ok();
    let product = Product::all().into_iter().find(|product| product.name() == name)?;
    let key = Key { product, outputs: number(outputs)?, inputs: number(inputs)? };
    let replaced = if replaced == "-" { None } else { Some(number(replaced)?) };
    Some(ProductCheck { key, algorithm: algorithm.to_owned(), cases: number(cases)?, unequal: number(unequal)?, replaced })
}

/// A product's name to people.
pub(super) fn name(Key { product, outputs, inputs }: Key) -> String {
    format!("{} {outputs}x{inputs}", product.name())
}

impl std::fmt::Display for GateReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for ProductCheck { key, algorithm, cases, unequal, replaced } in &self.products {
            let Key { product, outputs, inputs } = key;
            write!(f, "{:<20} {outputs:>7} x {inputs:<6} {algorithm:<50} {cases} cases, {unequal} unequal", product.name())?;
            match replaced {
                Some(unequal) => writeln!(f, ", in place of a pinned algorithm with {unequal} unequal")?,
                None => writeln!(f)?,
            }
        }
        for check @ GateUpCheck { shape: (outputs, inputs), cases, unequal } in &self.gate_ups {
            let taken = if check.choice() == GateUp::Own { "one kernel" } else { "the product, then the kernel" };
            writeln!(f, "{GATE_UP:<20} {outputs:>7} x {inputs:<6} {taken:<50} {cases} cases, {unequal} unequal")?;
        }
        for Independence { operation, cases, unequal } in &self.operations {
            writeln!(f, "{operation:<40} {cases} cases, {unequal} unequal")?;
        }
        for agreement in &self.agreements {
            writeln!(f, "beside the CPU {agreement}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Agreement, GateReport, GateUp, GateUpCheck, Independence, Key, Product, ProductCheck, names};

    fn report(unequal: usize) -> GateReport {
        let key = Key { product: Product::LinearBackward, outputs: 7, inputs: 5 };
        let algorithm = "algorithm 66 tile 3 stages -".to_owned();
        let first = ProductCheck { key, algorithm: algorithm.clone(), cases: 12, unequal: 0, replaced: Some(3) };
        let other = Key { outputs: 9, ..key };
        let second = ProductCheck { key: other, algorithm, cases: 12, unequal, replaced: None };
        let operations = names().into_iter().map(|operation| Independence { operation, cases: 12, unequal: 0 }).collect();
        let agreements = names().into_iter().map(|operation| Agreement { operation, billionths: 2345 }).collect();
        let gate_ups = [0, 1].map(|unequal| GateUpCheck { shape: (64 + unequal, 8), cases: 14, unequal }).to_vec();
        GateReport { products: vec![first, second], gate_ups, operations, agreements }
    }

    #[test]
    fn a_report_survives_its_text() {
        let report = report(2);
        assert_eq!(GateReport::recalled(&report.kept()), Some(report.clone()));
        for broken in [
            "",
            "nodus-cuda-gate 4\n",
            &report.kept().replace("gate-up 64 8 14 0", "gate-up 64 8 14"),
            &report.kept()[..report.kept().len() - 9],
            &report.kept().replace("gate 4\n", "gate 3\n"),
        ] {
            assert_eq!(GateReport::recalled(broken), None, "{broken}");
        }
        let other = report.kept().replace("swiglu", "sigmoid");
        assert_eq!(GateReport::recalled(&other), None);
        let few: String = report.kept().lines().filter(|line| *line != "agreement 2345 rope").map(|line| format!("{line}\n")).collect();
        assert_eq!(GateReport::recalled(&few), None, "an operation that was not compared");
    }

    #[test]
    fn what_is_no_number_is_as_far_off_as_can_be() {
        let mut agreement = Agreement::none("rope");
        agreement.add(2.5e-9);
        assert_eq!(agreement.billionths, 3, "never less than it is");
        agreement.add(1e-9);
        assert_eq!(agreement.billionths, 3);
        for far in [f64::NAN, f64::INFINITY] {
            let mut agreement = agreement;
            agreement.add(far);
            assert_eq!(agreement.billionths, u64::MAX);
        }
    }

    #[test]
    fn one_failure_fails_all_that_it_is_part_of() {
        assert!(report(0).passed());
        let report = report(2);
        assert!(!report.passed());
        assert_eq!(report.verdict(), "one job a pass: linear-backward 9x5");
        assert_eq!(report.of(&[(7, 5)]).verdict(), "passed");
        // What differs there is not taken.
        assert_eq!(report.gate_ups.iter().map(GateUpCheck::choice).collect::<Vec<_>>(), [GateUp::Own, GateUp::Apart]);
        assert_eq!(report.of(&[(64, 8)]).gate_ups.len(), 1);
        let mut broken = report.of(&[]);
        broken.operations[0].unequal = 1;
        assert_eq!(broken.failed(), ["embed"]);
    }
}
