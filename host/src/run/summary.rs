//! The summary of a run with several jobs: as JSON, as CSV, and as a table.
//!
//! What it says of a job is a function of what went in; what the machine did stands apart, in the JSON alone.

use nodus_sandbox::services::Source;
use serde::Serialize;
use serde_json::{Map, Value};

use super::conclude::{Status, Verdict};
use super::crew::{Fared, Post};
use super::record::{ADAPTER, loss_bits};
use super::sharing::{Reuse, Sharing};
use crate::cli::Lane;
use crate::sweep::shown;
use crate::text::escape;

/// The summary's files.
pub(crate) const JSON: &str = "summary.json";
pub(crate) const CSV: &str = "summary.csv";
/// Digits of a digest in the table.
const DIGITS: usize = 12;

/// One job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// In what it differs from the others of its sweep.
    pub(crate) parameters: Map<String, Value>,
    pub(crate) status: &'static str,
    /// Why it is not completed.
    pub(crate) reason: Option<String>,
    pub(crate) steps: u64,
    pub(crate) loss: Option<f32>,
    pub(crate) loss_bits: Option<String>,
    pub(crate) held_out_loss: Option<f32>,
    pub(crate) held_out_loss_bits: Option<String>,
    /// Digest of the adapter.
    pub(crate) adapter: Option<String>,
}

/// What the machine did.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) lane: &'static str,
    pub(crate) jobs_at_once: usize,
    pub(crate) wall_seconds: f64,
    /// CPU time of all guests, what the host did within their calls included.
    pub(crate) guest_cpu_seconds: f64,
    pub(crate) sharing: Sharing,
    /// Of a sweep: unrelated jobs have no trunk activations in common.
    pub(crate) reuse: Option<Reuse>,
}

impl Machine {
    pub(crate) fn new(
        lane: Lane,
        jobs_at_once: usize,
        wall_seconds: f64,
        fared: &[Fared],
        (sharing, reuse): (Sharing, Option<Reuse>),
    ) -> Self {
        let guest_cpu_seconds = fared.iter().filter_map(Fared::usage).map(|usage| usage.cpu_time.as_secs_f64()).sum();
        Self { lane: lane.name(), jobs_at_once, wall_seconds, guest_cpu_seconds, sharing, reuse }
    }
}

/// A job's row.
pub(crate) fn row(post: &Post, fared: &Fared, verdict: &Verdict) -> Row {
    let figures = fared.figures();
    let loss = figures.and_then(|figures| figures.last_loss);
    let held_out = figures.and_then(|figures| figures.result_on(Source::HeldOut)).map(|(_, last)| last);
    let saved = figures.filter(|_| matches!(verdict.status, Status::Completed | Status::Stopped)).map(|figures| &figures.saved);
    let (status, reason) = verdict.status.words();
    Row {
        name: post.job.name.clone().unwrap_or_default(),
        parameters: post.job.varied.clone(),
        status,
        reason,
        steps: figures.map_or(0, |figures| figures.steps),
        loss,
        loss_bits: loss.map(loss_bits),
        held_out_loss: held_out,
        held_out_loss_bits: held_out.map(loss_bits),
        adapter: saved.and_then(|saved| saved.get(ADAPTER)).map(|saved| saved.digest.to_string()),
    }
}

impl Status {
    /// A word for it, and why it is not completed.
    pub(crate) fn words(&self) -> (&'static str, Option<String>) {
        match self {
            Self::Completed => ("completed", None),
            Self::Stopped => ("stopped", Some("it was asked to stop".to_owned())),
            Self::Cancelled => ("cancelled", Some("it was cut off".to_owned())),
            Self::NotStarted => ("not started", Some("the run was stopped before".to_owned())),
            Self::Failed(reason) => ("failed", Some(reason.clone())),
            Self::Broken(error) => ("failed by the host", Some(escape(&format!("{error:#}")))),
        }
    }
}

/// The JSON file.
pub(crate) fn json(rows: &[Row], machine: &Machine) -> serde_json::Result<String> {
    let mut text = serde_json::to_string_pretty(&serde_json::json!({ "jobs": rows, "machine": machine }))?;
    text.push('\n');
    Ok(text)
}

/// The swept parameters of all jobs, sorted.
fn keys(rows: &[Row]) -> Vec<&str> {
    let mut keys: Vec<&str> = rows.iter().flat_map(|row| row.parameters.keys()).map(String::as_str).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// The CSV file (RFC 4180): the name, each swept parameter, then the results.
pub(crate) fn csv(rows: &[Row]) -> String {
    let keys = keys(rows);
    let mut lines = vec![["name"].into_iter().chain(keys.iter().copied()).map(str::to_owned).collect::<Vec<_>>()];
    let results = ["status", "steps", "loss", "loss_bits", "held_out_loss", "held_out_loss_bits", "adapter", "reason"];
    lines.iter_mut().for_each(|line| line.extend(results.map(str::to_owned)));
    for row in rows {
        let number = |value: Option<f32>| value.map_or_else(String::new, |value| value.to_string());
        let mut line = vec![row.name.clone()];
        line.extend(keys.iter().map(|key| row.parameters.get(*key).map_or_else(String::new, shown)));
        line.extend([row.status.to_owned(), row.steps.to_string(), number(row.loss), row.loss_bits.clone().unwrap_or_default()]);
        line.extend([number(row.held_out_loss), row.held_out_loss_bits.clone().unwrap_or_default()]);
        line.extend([row.adapter.clone().unwrap_or_default(), row.reason.clone().unwrap_or_default()]);
        lines.push(line);
    }
    let quoted = |field: &String| match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.clone(),
    };
    lines.iter().map(|line| line.iter().map(quoted).collect::<Vec<_>>().join(",") + "\r\n").collect()
}

/// The table that is printed; below it, why jobs are not completed.
pub(crate) fn table(rows: &[Row]) -> String {
    let keys = keys(rows);
    // A name that is nothing but the parameters would say them twice.
    let names = if keys.is_empty() { vec!["job"] } else { Vec::new() };
    let head = names.iter().copied().chain(keys.iter().copied()).chain(["steps", "loss", "held-out", "adapter", "status"]);
    let mut cells: Vec<Vec<String>> = vec![head.map(str::to_owned).collect()];
    for row in rows {
        let loss = |loss: Option<f32>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
        let digest = row.adapter.as_deref().and_then(|digest| digest.strip_prefix("sha256:")).and_then(|digits| digits.get(..DIGITS));
        let mut line: Vec<String> = names.iter().map(|_| row.name.clone()).collect();
        line.extend(keys.iter().map(|key| row.parameters.get(*key).map_or_else(|| "-".to_owned(), |value| escape(&shown(value)))));
        line.extend([row.steps.to_string(), loss(row.loss), loss(row.held_out_loss)]);
        line.extend([digest.unwrap_or("-").to_owned(), row.status.to_owned()]);
        cells.push(line);
    }
    let width = |column: usize| cells.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let columns = cells.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in &cells {
        let padded = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = padded.collect::<Vec<_>>().join("  ");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    let reasons = rows.iter().filter_map(|row| row.reason.as_ref().map(|reason| format!("{}: {reason}\n", row.name)));
    text.extend(reasons);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Lane, Machine, Row, Sharing, csv, table};

    fn rows() -> Vec<Row> {
        let row = |name: &str, parameters: Value| Row {
            name: name.into(),
            parameters: parameters.as_object().unwrap().clone(),
            status: "completed",
            reason: None,
            steps: 3,
            loss: Some(2.5),
            loss_bits: Some("0x40200000".into()),
            held_out_loss: None,
            held_out_loss_bits: None,
            adapter: Some(format!("sha256:{}", "ab".repeat(32))),
        };
        let failed = Row {
            status: "failed",
            reason: Some("learning_rate is -1, \"bad\"".into()),
            adapter: None,
            loss: None,
            loss_bits: None,
            ..row("learning_rate=-1,t=x", json!({"learning_rate": -1, "t": ["q", "v"]}))
        };
        vec![row("learning_rate=0.0001", json!({"learning_rate": 1e-4})), failed]
    }

    #[test]
    fn csv_has_a_column_for_every_parameter_and_quotes_what_needs_it() {
        let digest = "ab".repeat(32);
        let expected = format!(
            "name,learning_rate,t,status,steps,loss,loss_bits,held_out_loss,held_out_loss_bits,adapter,reason\r\n\
             learning_rate=0.0001,0.0001,,completed,3,2.5,0x40200000,,,sha256:{digest},\r\n\
             \"learning_rate=-1,t=x\",-1,\"[\"\"q\"\",\"\"v\"\"]\",failed,3,,,,,,\"learning_rate is -1, \"\"bad\"\"\"\r\n"
        );
        assert_eq!(csv(&rows()), expected);
    }

    #[test]
    fn json_holds_the_jobs_and_apart_from_them_what_the_machine_did() {
        let machine = Machine::new(Lane::Fused, 2, 1.5, &[], (Sharing { passes: 3, ..Sharing::default() }, None));
        let found: Value = serde_json::from_str(&super::json(&rows(), &machine).unwrap()).unwrap();
        assert_eq!(found["jobs"][0]["parameters"], json!({"learning_rate": 1e-4}));
        assert_eq!(found["jobs"][0]["loss"], json!(2.5));
        assert_eq!(found["jobs"][1]["status"], "failed");
        assert_eq!(found["machine"]["lane"], "fused");
        assert_eq!(found["machine"]["sharing"]["passes"], 3);
    }

    #[test]
    fn the_table_is_aligned_and_says_why() {
        let text = table(&rows());
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("learning_rate  t          steps  loss"), "{text}");
        assert!(lines[1].contains("0.0001") && lines[1].contains("abababababab  completed"), "{text}");
        assert_eq!(lines[0].find("status"), lines[1].find("completed"));
        assert_eq!(lines[3], "learning_rate=-1,t=x: learning_rate is -1, \"bad\"");
    }
}
