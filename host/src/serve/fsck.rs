//! Whether the rows of jobs, their receipts and the host's ledger agree.
//!
//! Changes nothing. The rows are read before the ledger: beside a running service the ledger may know more, and that is no fault.

use std::collections::BTreeMap;

use cap_std::fs::Dir;
use nodus_protocol::Digest;
use nodus_receipts::ledger::{BytesEvent, Event};
use nodus_receipts::statement::Statement;
use nodus_receipts::verify::Outcome;
use nodus_receipts::{Envelope, KnownKeys, Reader, verify};
use nodus_state::{Ended, JobState, State};

use crate::books;
use crate::text::escape;

/// A receipt as the ledger names it, or as a job has it.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    tenant: String,
    receipt: Digest,
    subjects: Vec<Digest>,
}

/// What the ledger says of a job.
#[derive(Debug, Default)]
struct Lines {
    receipts: Vec<Named>,
    failures: usize,
    /// Of each adapter, what was allocated less what was zeroed.
    held: BTreeMap<u32, i128>,
}

/// Everything that does not agree, a line each.
///
/// # Errors
/// Ours: the disk cannot be read.
pub(super) fn disagreements(state: &State, dir: Dir) -> anyhow::Result<Vec<String>> {
    let keys = books::own_key(&dir)?.unwrap_or_else(|| std::iter::empty().collect());
    let (mut rows, mut faults) = (Vec::new(), Vec::new());
    state.ended(|job| {
        let named = job.receipt.as_deref().map(|envelope| named(envelope, &job, &keys, &mut faults));
        rows.push((job.job.to_string(), job.state, named));
    })?;
    let (mut lines, broken) = books::reader(dir).map(|reader| lines(&reader)).unwrap_or_default();
    if let Some(broken) = broken {
        // What follows from it is no fault of its own.
        faults.push(broken);
        return Ok(faults);
    }
    for (job, state, named) in rows {
        let lines = lines.remove(&job).unwrap_or_default();
        faults.extend(differences(state, named.as_ref(), &lines).into_iter().map(|what| format!("job {job}: {what}")));
    }
    Ok(faults)
}

/// A job's receipt; faults are what is wrong with it by itself, or beside the files that were kept.
fn named(envelope: &[u8], job: &Ended, keys: &KnownKeys, faults: &mut Vec<String>) -> Named {
    let report = verify(envelope, keys, None, None);
    for check in &report.checks {
        if let Outcome::Failed(mismatches) = &check.outcome {
            let why = mismatches.iter().map(|mismatch| escape(&mismatch.found)).collect::<Vec<_>>().join("; ");
            faults.push(format!("job {}: its receipt fails the check of its {}: {why}", job.job, check.name));
        }
    }
    let statement = Envelope::parse(envelope).ok().and_then(|envelope| Statement::parse(envelope.payload()).ok());
    for subject in statement.iter().flat_map(|statement| &statement.subject) {
        let kept = job.artifacts.iter().find(|(path, _)| *path == subject.name).map(|(_, digest)| *digest);
        if kept != Some(subject.digest.0) {
            let found = kept.map_or_else(|| "not kept".to_owned(), |digest| digest.to_string());
            let (name, expected) = (escape(&subject.name), subject.digest.0);
            faults.push(format!("job {}: `{name}` is {found}, its receipt says {expected}", job.job));
        }
    }
    let subjects = statement.map(|statement| statement.subjects().collect()).unwrap_or_default();
    Named { tenant: job.tenant.clone(), receipt: report.receipt, subjects }
}

/// The ledger, by job, as far as it can be read; and why no further.
fn lines(reader: &Reader) -> (BTreeMap<String, Lines>, Option<String>) {
    let mut jobs: BTreeMap<String, Lines> = BTreeMap::new();
    let entries = match reader.entries() {
        Ok(entries) => entries,
        Err(error) => return (jobs, Some(format!("ledger: {error}"))),
    };
    for entry in entries {
        match entry.map(|entry| entry.event) {
            Err(error) => return (jobs, Some(format!("ledger: {error}"))),
            Ok(Event::KeyCreated { .. }) => {}
            Ok(Event::Receipt { job, tenant, receipt, subjects }) => {
                jobs.entry(job).or_default().receipts.push(Named { tenant, receipt, subjects });
            }
            Ok(Event::JobFailed { job, .. }) => jobs.entry(job).or_default().failures += 1,
            Ok(Event::AdapterBytes { job, adapter, event, bytes, .. }) => {
                let held = jobs.entry(job).or_default().held.entry(adapter).or_default();
                match event {
                    BytesEvent::Allocated => *held += i128::from(bytes),
                    BytesEvent::Zeroed => *held -= i128::from(bytes),
                    BytesEvent::Written | BytesEvent::Exported => {}
                }
            }
        }
    }
    (jobs, None)
}

/// In what a job and the ledger's lines of it differ.
fn differences(state: JobState, named: Option<&Named>, lines: &Lines) -> Vec<String> {
    let mut found = Vec::new();
    match (named, lines.receipts.as_slice()) {
        (Some(own), [entered]) if own == entered => {}
        (Some(_), []) => found.push("the ledger does not have its receipt".to_owned()),
        (Some(own), [entered]) if own.receipt != entered.receipt => {
            found.push(format!("its receipt is {}, the ledger has {}", own.receipt, entered.receipt));
        }
        (Some(own), [entered]) if own.tenant != entered.tenant => {
            found.push(format!("it is of tenant `{}`, the ledger says `{}`", own.tenant, escape(&entered.tenant)));
        }
        (Some(_), [_]) => found.push("the ledger names other files than its receipt".to_owned()),
        (_, [_, _, ..]) => found.push(format!("the ledger has {} receipts of it, expected one", lines.receipts.len())),
        (None, []) => {}
        // It was cut off after its receipt was entered, and before anybody had it.
        (None, [_]) if state == JobState::Cancelled => {}
        (None, [_]) => found.push(format!("it is {state} and has no receipt, the ledger has one")),
    }
    let is_explained = match state {
        JobState::Failed | JobState::Broken => lines.failures == 1,
        // Who waited when it was cancelled leaves no line.
        JobState::Cancelled => lines.failures <= 1,
        _ => lines.failures == 0,
    };
    if !is_explained {
        found.push(format!("it is {state}, and the ledger says {} times that it ended without a receipt", lines.failures));
    }
    for (adapter, held) in lines.held.iter().filter(|(_, held)| **held != 0) {
        found.push(format!("the ledger has {held} bytes of its adapter {adapter} that were allocated and not zeroed"));
    }
    found
}

#[cfg(test)]
mod tests;
