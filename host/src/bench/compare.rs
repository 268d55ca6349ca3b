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

/// Every arm that both have, of every measurement of B that A has too: of the same work, the same model, of the same variant. Where a report has
/// several of these, the first of B is held against the first of A, and so on; those of B that are more than A has, against A's last.
///
/// # Errors
/// The user's: the reports have no work in common, are of other devices, or have no arm in common.
pub(super) fn compare(a: &Report, b: &Report, tolerance: f64) -> anyhow::Result<Vec<Change>> {
    let pairs: Vec<(&Measurement, &Measurement)> = b
        .measurements
        .iter()
        .enumerate()
        .filter_map(|(index, one)| {
            let before = b.measurements.iter().take(index).filter(|other| is_same_work(other, one)).count();
            let (mut same, last) =
                (a.measurements.iter().filter(|a| is_same_work(a, one)), a.measurements.iter().rfind(|a| is_same_work(a, one)));
            Some((same.nth(before).or(last)?, one))
        })
        .collect();
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

/// Lines for people: of each work its title, then its arms.
pub(super) fn lines(changes: &[Change]) -> Vec<String> {
    let told = changes.chunk_by(|a, b| a.work == b.work);
    told.flat_map(|of_one| of_one.first().map(|first| first.work.clone()).into_iter().chain(of_one.iter().map(Change::line))).collect()
}

impl Change {
    fn line(&self) -> String {
        let mark = if self.is_regression { "  REGRESSION" } else { "" };
        format!("  {:<24} {:>12.0} -> {:>12.0} units/s  {:+.1} %{mark}", self.arm, self.rates.0, self.rates.1, self.gain)
    }
}
