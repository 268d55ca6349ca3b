//! Tables for people: columns as wide as what stands in them.
//!
//! Escapes every cell: a service's words may hold anything.

use std::io::{self, Write};

use nodus_api::Job;
use serde_json::Value;

use crate::text::escape;

/// How far a job is: its last step, the loss there, and that of its last evaluation on what was held out.
pub(super) fn progress(job: &Job) -> [String; 3] {
    let loss = |told: &Value| told.get("loss").and_then(Value::as_f64).map(|loss| format!("{loss:.4}"));
    let step = job.last_step.as_ref().and_then(|step| step.get("step")).map(Value::to_string);
    let held_out = job.last_evaluation.as_ref().filter(|told| told.get("data").is_some_and(|data| data == "held-out"));
    [step, job.last_step.as_ref().and_then(loss), held_out.and_then(loss)].map(Option::unwrap_or_default)
}

/// Writes rows under a heading.
pub(super) fn write<const N: usize>(out: &mut dyn Write, heading: [&str; N], rows: &[[String; N]]) -> io::Result<()> {
    let rows: Vec<[String; N]> = rows.iter().map(|row| row.each_ref().map(|cell| escape(cell))).collect();
    let heading = heading.map(str::to_owned);
    let lines = || std::iter::once(&heading).chain(&rows);
    let mut widths = [0; N];
    for line in lines() {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    for line in lines() {
        let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::write;

    #[test]
    fn columns_line_up_and_nothing_moves_the_cursor() {
        let mut out = Vec::new();
        write(&mut out, ["ID", "STATE"], &[["1".into(), "queued".into()], ["22222".into(), "a\u{1b}[2J".into()]]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "ID     STATE\n1      queued\n22222  a\\u{1b}[2J\n");
    }
}
