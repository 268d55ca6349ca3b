//! Holds the files of a run's folder against the subjects and the adapters of its receipt.
//!
//! Opens nothing outside the folder, and never keeps a whole file in memory.

use std::collections::BTreeSet;
use std::io;

use cap_std::fs::Dir;

use super::report::{Mismatch, Outcome};
use crate::files::digest_of;
use crate::statement::{Artifact, Statement};

/// Every subject's file is there and has its digest.
pub(super) fn check_subjects(statement: &Statement, run: &Dir) -> Outcome {
    let mismatch = |subject: &crate::statement::Subject| {
        let expected = subject.digest.0;
        match digest_of(run, &subject.name) {
            Ok((found, _)) if found == expected => None,
            Ok((found, _)) => Some(Mismatch::new(&subject.name, expected, found)),
            Err(error) => Some(Mismatch::new(&subject.name, expected, cannot_read(&error))),
        }
    };
    Outcome::of(statement.subject.iter().filter_map(mismatch).collect())
}

/// Every adapter's folder holds exactly its subjects, and they have as many bytes as the receipt says.
pub(super) fn check_adapters(statement: &Statement, run: &Dir) -> Outcome {
    let Some(artifacts) = &statement.predicate.artifacts else {
        return Outcome::not_checked("the receipt names no adapters");
    };
    let mut mismatches = Vec::new();
    let mut all_bytes = 0_u64;
    for artifact in artifacts {
        let bytes = check_adapter(statement, artifact, run, &mut mismatches);
        all_bytes = all_bytes.saturating_add(bytes);
    }
    if let Some(expected) = statement.predicate.adapter_bytes
        && all_bytes != expected
    {
        mismatches.push(Mismatch::new("bytes of all adapters", expected, all_bytes));
    }
    Outcome::of(mismatches)
}

/// Adds what does not match in one adapter's folder; the bytes of its files.
fn check_adapter(statement: &Statement, artifact: &Artifact, run: &Dir, mismatches: &mut Vec<Mismatch>) -> u64 {
    let folder = format!("{}/", artifact.name);
    let named: BTreeSet<String> =
        statement.subject.iter().filter_map(|subject| subject.name.strip_prefix(&folder)).map(str::to_owned).collect();
    if named.is_empty() {
        mismatches.push(Mismatch::new(&folder, "files of the adapter among the subjects", "none"));
    }
    let present = match files_of(run, &artifact.name) {
        Ok(present) => present,
        Err(error) => {
            mismatches.push(Mismatch::new(&folder, "the adapter's folder", cannot_read(&error)));
            return 0;
        }
    };
    for missing in named.iter().filter(|name| !present.iter().any(|(present, _)| present == *name)) {
        mismatches.push(Mismatch::new(format!("{folder}{missing}"), "a file", "no such file"));
    }
    for (extra, _) in present.iter().filter(|(name, _)| !named.contains(name)) {
        mismatches.push(Mismatch::new(format!("{folder}{extra}"), "no such file: the receipt does not name it", "a file"));
    }
    let bytes = present.iter().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    if bytes != artifact.bytes {
        mismatches.push(Mismatch::new(format!("bytes of {folder}"), artifact.bytes, bytes));
    }
    bytes
}

/// What is in a folder, sorted, each with its length in bytes. A name that is no UTF-8 is shown as one, and matches no subject.
fn files_of(run: &Dir, folder: &str) -> io::Result<Vec<(String, u64)>> {
    let mut files = Vec::new();
    for entry in run.read_dir(folder)? {
        let entry = entry?;
        files.push((entry.file_name().to_string_lossy().into_owned(), entry.metadata()?.len()));
    }
    files.sort();
    Ok(files)
}

/// Why a file cannot be read, as a report says it.
pub(super) fn cannot_read(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file".to_owned(),
        _ => format!("unreadable: {error}"),
    }
}
