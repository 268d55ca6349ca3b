//! Holds a receipt against the host's ledger.
//!
//! Reads the ledger to its end: a chain that is broken behind the receipt is a broken chain.

use std::collections::BTreeSet;

use nodus_protocol::Digest;

use super::report::{Mismatch, Outcome, Report};
use crate::ledger::{Event, Reader, shown};
use crate::statement::{DigestSet, Statement};

/// The ledger is whole and has this receipt, after the one that it names, signed with a key entered before.
pub(super) fn check(statement: &Statement, report: &Report, ledger: &Reader) -> Outcome {
    let mut mismatches = Vec::new();
    let (mut keys, mut last, mut receipts, mut is_found) = (BTreeSet::new(), None, 0_u64, false);
    let mut entries = match ledger.entries() {
        Ok(entries) => entries,
        Err(error) => return Outcome::of(vec![Mismatch::new("the ledger", "a ledger", error)]),
    };
    for entry in &mut entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                mismatches.push(Mismatch::new("the ledger", "an unbroken chain", error));
                break;
            }
        };
        match entry.event {
            Event::KeyCreated { keyid } if !is_found => {
                keys.insert(keyid);
            }
            Event::Receipt { receipt, subjects, .. } => {
                receipts += 1;
                if receipt == report.receipt && !is_found {
                    is_found = true;
                    mismatches.extend(check_entry(statement, last, &subjects));
                }
                last = Some(receipt);
            }
            Event::KeyCreated { .. } | Event::AdapterBytes { .. } | Event::JobFailed { .. } => {}
        }
    }
    if !is_found {
        let torn = entries.torn().map(|torn| format!(", and line {} is torn: {}", torn.line, torn.fault)).unwrap_or_default();
        mismatches.push(Mismatch::new(
            "the receipt's entry in the ledger",
            report.receipt,
            format!("none among {receipts} receipts{torn}"),
        ));
    } else if let Some(keyid) = report.keyid
        && !keys.contains(&keyid)
    {
        mismatches.push(Mismatch::new("the key's entry in the ledger", keyid, "none before the receipt"));
    }
    Outcome::of(mismatches)
}

fn check_entry(statement: &Statement, last: Option<Digest>, subjects: &[Digest]) -> Vec<Mismatch> {
    let mut mismatches = Vec::new();
    let named = statement.predicate.previous_receipt.map(|DigestSet(digest)| digest);
    if named != last {
        mismatches.push(Mismatch::new("previous_receipt", shown(last), shown(named)));
    }
    if !statement.subjects().eq(subjects.iter().copied()) {
        let list = |digests: &mut dyn Iterator<Item = Digest>| digests.map(|digest| digest.to_string()).collect::<Vec<_>>().join(", ");
        let (entered, named) = (list(&mut subjects.iter().copied()), list(&mut statement.subjects()));
        mismatches.push(Mismatch::new("subjects", entered, named));
    }
    mismatches
}
