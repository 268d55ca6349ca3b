//! Checks a receipt: who signed it, whether the files are those it speaks of, and where it stands in the host's chain.
//!
//! Believes nothing it reads, never stops at the first failure, and never panics on hostile bytes.

mod chain;
mod lines;
mod report;
mod subjects;

use cap_std::fs::Dir;

pub use lines::{HELD_OUT_FILE, LOSSES_FILE};
pub use report::{Check, CheckName, Mismatch, Outcome, Report};

use crate::envelope::{Envelope, PAYLOAD_TYPE, receipt_digest};
use crate::key::KnownKeys;
use crate::ledger::Reader;
use crate::statement::Statement;

/// Checks the receipt in `envelope` (the bytes of `receipt.json`) against the keys whose signatures are believed, the folder of the
/// run's files, and the host's ledger. What is not given is reported as not checked.
#[must_use]
pub fn verify(envelope: &[u8], known: &KnownKeys, run: Option<&Dir>, ledger: Option<&Reader>) -> Report {
    let mut report = Report { receipt: receipt_digest(envelope), keyid: None, checks: Vec::new() };
    let statement = match Envelope::parse(envelope) {
        Ok(parsed) => {
            report.keyid = Some(parsed.keyid());
            open(&parsed, known, &mut report)
        }
        Err(error) => {
            report.push(CheckName::Envelope, Outcome::Failed(vec![Mismatch::new("the receipt", "a DSSE envelope", error)]));
            for name in [CheckName::PayloadType, CheckName::Signature, CheckName::Statement] {
                report.push(name, Outcome::not_checked("there is no envelope to look into"));
            }
            None
        }
    };
    let Some(statement) = statement else {
        for name in [CheckName::SubjectFiles, CheckName::AdapterFiles, CheckName::Losses, CheckName::HeldOut, CheckName::Chain] {
            report.push(name, Outcome::not_checked("there is no statement to hold it against"));
        }
        return report;
    };
    check_files(&statement, run, &mut report);
    let chain = match ledger {
        Some(ledger) => chain::check(&statement, &report, ledger),
        None => Outcome::not_checked("no ledger was given"),
    };
    report.push(CheckName::Chain, chain);
    report
}

/// The checks of the envelope itself; its statement, if it is one.
fn open(envelope: &Envelope, known: &KnownKeys, report: &mut Report) -> Option<Statement> {
    report.push(CheckName::Envelope, Outcome::Ok);
    let is_typed = envelope.payload_type() == PAYLOAD_TYPE;
    let mismatch = (!is_typed).then(|| Mismatch::new("payloadType", PAYLOAD_TYPE, envelope.payload_type()));
    report.push(CheckName::PayloadType, Outcome::of(mismatch.into_iter().collect()));
    let signature = envelope.verify(known).err().map(|error| Mismatch::new("the signature", "one of a known key over this payload", error));
    report.push(CheckName::Signature, Outcome::of(signature.into_iter().collect()));
    if !is_typed {
        report.push(CheckName::Statement, Outcome::not_checked("the payload is of another type"));
        return None;
    }
    match Statement::parse(envelope.payload()) {
        Ok(statement) => {
            report.push(CheckName::Statement, Outcome::Ok);
            Some(statement)
        }
        Err(error) => {
            report.push(CheckName::Statement, Outcome::Failed(vec![Mismatch::new("the payload", "the statement of a receipt", error)]));
            None
        }
    }
}

fn check_files(statement: &Statement, run: Option<&Dir>, report: &mut Report) {
    type Checker = fn(&Statement, &Dir) -> Outcome;
    let checks: [(CheckName, Checker); 4] = [
        (CheckName::SubjectFiles, subjects::check_subjects),
        (CheckName::AdapterFiles, subjects::check_adapters),
        (CheckName::Losses, lines::check_losses),
        (CheckName::HeldOut, lines::check_held_out),
    ];
    for (name, check) in checks {
        let outcome = run.map_or_else(|| Outcome::not_checked("the run's folder was not given"), |run| check(statement, run));
        report.push(name, outcome);
    }
}
