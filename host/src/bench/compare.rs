//! Two reports held against each other, row by row.
//!
//! Never compares rows of other work, another device class, or rows whose bits were not equal.

use super::report::{FORMAT, Report};
use crate::error::user;

/// How a row of B stands to the row of the same arm in A.
#[derive(Debug, PartialEq)]
pub(super) struct Change {
    pub(super) arm: String,
    /// Units a second in A and in B.
    pub(super) rates: (f64, f64),
    /// Per cent that B is faster.
    pub(super) gain: f64,
    pub(super) is_regression: bool,
}

/// Every arm that both have.
///
/// # Errors
/// The user's: the reports are of other work or another device class, or have no arm in common.
pub(super) fn compare(a: &Report, b: &Report, tolerance: f64) -> anyhow::Result<Vec<Change>> {
    for (name, report) in [("A", a), ("B", b)] {
        if report.format != FORMAT {
            return Err(user(format!("report {name} is of the format `{}`, expected `{FORMAT}`", crate::text::escape(&report.format))));
        }
    }
    if a.work != b.work || a.setting.model_digest != b.setting.model_digest {
        return Err(user(format!("the reports are of other work: A is of {}, B of {}", a.setting.title, b.setting.title)));
    }
    if a.setting.device_class.get("gpu") != b.setting.device_class.get("gpu")
        || a.setting.device_class.get("cpu") != b.setting.device_class.get("cpu")
    {
        return Err(user("the reports are of other devices: only rows of one device are compared"));
    }
    let changes = b.rows.iter().filter(|row| row.check.passed()).filter_map(|row| {
        let before = a.rows.iter().find(|before| before.arm == row.arm && before.check.passed())?;
        let gain = 100.0 * (row.steady_rate / before.steady_rate - 1.0);
        let arm = row.arm.name().to_owned();
        Some(Change { arm, rates: (before.steady_rate, row.steady_rate), gain, is_regression: gain < -tolerance })
    });
    let changes: Vec<Change> = changes.collect();
    if changes.is_empty() { Err(user("the reports have no arm in common whose bits were equal")) } else { Ok(changes) }
}

impl Change {
    /// A line for people.
    pub(super) fn line(&self) -> String {
        let mark = if self.is_regression { "  REGRESSION" } else { "" };
        format!("{:<24} {:>12.0} -> {:>12.0} units/s  {:+.1} %{mark}", self.arm, self.rates.0, self.rates.1, self.gain)
    }
}
