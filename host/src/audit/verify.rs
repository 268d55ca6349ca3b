//! `audit verify`: receipts held against keys, files and the ledger.
//!
//! Needs no data folder where it is given a key; makes nothing.

use std::io::Write;
use std::path::Path;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_receipts::envelope::ENVELOPE_BYTES_MAX;
use nodus_receipts::verify::{Check, Mismatch, Outcome};
use nodus_receipts::{KnownKeys, Reader, Report};
use serde_json::json;

use super::trust::{Trust, trust};
use crate::cli::VerifyArgs;
use crate::error::{Ending, user};
use crate::paths::{Paths, shown};
use crate::receipt::FILE;
use crate::text::{count, escape};

/// A receipt, and the folder of its run where that is known.
struct Found {
    name: String,
    bytes: Vec<u8>,
    run: Option<Dir>,
}

/// Checks the receipts that a path names and says what each check found.
///
/// # Errors
/// The user's: there is no receipt, or one does not hold.
pub(crate) fn verify(paths: Paths, data_dir: &Path, args: &VerifyArgs, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let Trust { known, ledger } = trust(paths, data_dir, &args.keys, args.ledger.as_deref())?;
    check(paths, &args.path, (&known, ledger.as_ref()), (false, out))
}

/// Checks the receipts that a path names against these keys, and the ledger where there is one. What was found is said as text, or as a JSON object
/// for each receipt.
///
/// # Errors
/// As [`verify`].
pub(crate) fn check(
    paths: Paths,
    path: &Path,
    (known, ledger): (&KnownKeys, Option<&Reader>),
    (as_json, out): (bool, &mut dyn Write),
) -> anyhow::Result<Ending> {
    let found = find(paths, path)?;
    let mut wrong = Vec::new();
    for Found { name, bytes, run } in &found {
        let report = nodus_receipts::verify(bytes, known, run.as_ref(), ledger);
        let title = if found.len() > 1 { format!("{name}\n") } else { String::new() };
        let text = if as_json { format!("{}\n", object(name, &report)) } else { format!("{title}{report}") };
        out.write_all(text.as_bytes()).context("writing to standard output")?;
        if !report.is_ok() {
            wrong.push(name.as_str());
        }
    }
    if wrong.is_empty() {
        return Ok(Ending::Done);
    }
    Err(user(format!("{} of {} not what was signed: {}", wrong.len(), count(found.len() as u64, "receipt"), wrong.join(", "))))
}

/// What was found of a receipt, for programs.
fn object(name: &str, report: &Report) -> serde_json::Value {
    let check = |Check { name, outcome }: &Check| match outcome {
        Outcome::Ok => json!({ "check": name.to_string(), "outcome": "ok" }),
        Outcome::NotChecked(why) => json!({ "check": name.to_string(), "outcome": "not-checked", "why": why }),
        Outcome::Failed(mismatches) => {
            let mismatch = |Mismatch { name, expected, found }: &Mismatch| json!({ "what": name, "expected": expected, "found": found });
            json!({ "check": name.to_string(), "outcome": "failed", "mismatches": mismatches.iter().map(mismatch).collect::<Vec<_>>() })
        }
    };
    let checks: Vec<_> = report.checks.iter().map(check).collect();
    json!({ "receipt": name, "digest": report.receipt.to_string(), "ok": report.is_ok(), "checks": checks })
}

/// A receipt's file (with its folder, if it still has its name), a run's folder, or the runs' folders in a folder.
fn find(paths: Paths, path: &Path) -> anyhow::Result<Vec<Found>> {
    if !paths.is_dir(path)? {
        let bytes = paths.read(path, ENVELOPE_BYTES_MAX as u64)?;
        let is_in_place = path.file_name().is_some_and(|name| name == FILE);
        let run = if is_in_place { Some(paths.parent(path)?.0) } else { None };
        return Ok(vec![Found { name: shown(path), bytes, run }]);
    }
    let run = |name: String, path: &Path| -> anyhow::Result<Found> {
        let bytes = paths.read(&path.join(FILE), ENVELOPE_BYTES_MAX as u64)?;
        Ok(Found { name, bytes, run: Some(paths.open_dir(path)?) })
    };
    let dir = paths.open_dir(path)?;
    if dir.exists(FILE) {
        return Ok(vec![run(shown(path), path)?]);
    }
    let mut found = Vec::new();
    for entry in dir.entries().with_context(|| format!("listing {}", shown(path)))? {
        let name = entry.with_context(|| format!("listing {}", shown(path)))?.file_name();
        if dir.is_file(Path::new(&name).join(FILE)) {
            found.push(run(escape(&name.to_string_lossy()), &path.join(&name))?);
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    if found.is_empty() {
        return Err(user(format!("{} holds no {FILE}, nor does a folder in it", shown(path))));
    }
    Ok(found)
}
