//! Two reports held against each other, row by row.
//!
//! Never compares rows of other work, another device class, or rows whose bits were not equal.

use super::report::{Measurement, Report};
use crate::error::user;

/// How a row of B stands to the row of the same arm in A.
#[derive(Debug, PartialEq)]
pub(super) struct Change {
    /// The jobs, in words.
    pub(super) work: String,
    pub(super) arm: String,
    /// Units a second in A and in B.
    pub(super) rates: (f64, f64),
    /// Per cent that B is faster.
    pub(super) gain: f64,
    pub(super) is_regression: bool,
}

/// Every arm that both have, of every measurement of B that A has too: of the same work, the same model, of the same variant.
///
/// # Errors
/// The user's: the reports have no work in common, are of other devices, or have no arm in common.
pub(super) fn compare(a: &Report, b: &Report, tolerance: f64) -> anyhow::Result<Vec<Change>> {
    let pairs: Vec<(&Measurement, &Measurement)> =
        b.measurements.iter().filter_map(|b| Some((a.measurements.iter().find(|a| is_same_work(a, b))?, b))).collect();
    let titles = |report: &Report| report.measurements.iter().map(|one| one.setting.title.clone()).collect::<Vec<_>>().join("; ");
    if pairs.is_empty() {
        return Err(user(format!("the reports are of other work: A is of {}, B of {}", titles(a), titles(b))));
    }
    let device = |measured: &Measurement| ["gpu", "cpu"].map(|key| measured.setting.device_class.get(key).cloned());
    if pairs.iter().any(|(a, b)| device(a) != device(b)) {
        return Err(user("the reports are of other devices: only rows of one device are compared"));
    }
    let changes: Vec<Change> = pairs.into_iter().flat_map(|(a, b)| changes(a, b, tolerance)).collect();
    if changes.is_empty() { Err(user("the reports have no arm in common whose bits were equal")) } else { Ok(changes) }
}

fn is_same_work(a: &Measurement, b: &Measurement) -> bool {
    a.work == b.work && a.setting.model_digest == b.setting.model_digest && a.setting.variant == b.setting.variant
}

fn changes(a: &Measurement, b: &Measurement, tolerance: f64) -> impl Iterator<Item = Change> {
    b.rows.iter().filter(|row| row.check.passed()).filter_map(move |row| {
        let before = a.rows.iter().find(|before| before.arm == row.arm && before.check.passed())?;
        let gain = 100.0 * (row.steady_rate / before.steady_rate - 1.0);
        let (work, arm) = (b.setting.title.clone(), row.arm.name().to_owned());
        Some(Change { work, arm, rates: (before.steady_rate, row.steady_rate), gain, is_regression: gain < -tolerance })
    })
}

impl Change {
    /// A line for people.
    pub(super) fn line(&self) -> String {
        let mark = if self.is_regression { "  REGRESSION" } else { "" };
        format!("{:<24} {:>12.0} -> {:>12.0} units/s  {:+.1} %{mark}", self.arm, self.rates.0, self.rates.1, self.gain)
    }
}
