//! Sealing: previous, signature and entry are one step.
//!
//! Never two receipts after the same one.

use std::convert::Infallible;

use nodus_protocol::Digest;
use nodus_receipts::envelope::receipt_digest;
use nodus_receipts::ledger::{Event, SealError};
use nodus_receipts::statement::StatementError;
use nodus_receipts::{Envelope, Ledger, Reader};

use crate::support::{LEDGER, clone, folder, key, known, seal, statement};

#[test]
fn each_receipt_names_the_one_before() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    assert_eq!(ledger.last_receipt().unwrap(), None);
    let first = seal(&mut ledger, "a");
    assert_eq!(first.digest, receipt_digest(&first.envelope));
    assert_eq!(ledger.last_receipt().unwrap(), Some(first.digest));
    // Another process.
    let mut other = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let second = seal(&mut other, "b");
    let third = seal(&mut ledger, "c");
    for (receipt, previous) in [(&second, first.digest), (&third, second.digest)] {
        let envelope = Envelope::parse(&receipt.envelope).unwrap();
        envelope.verify(&known(&[&key(1)])).unwrap();
        assert_eq!(envelope.payload(), serde_json::to_vec(&statement(Some(previous))).unwrap());
    }
    let last = Reader::new(clone(&dir)).entries().unwrap().last().unwrap().unwrap();
    assert_eq!(last.at, third.entry);
    let subjects = vec![Digest::of(b"weights"), Digest::of(b"{\"r\": 8}")];
    assert_eq!(last.event, Event::Receipt { job: "c".into(), tenant: "acme".into(), receipt: third.digest, subjects });
}

#[test]
fn sealers_at_the_same_time_make_one_chain() {
    let dir = folder();
    let sealers: Vec<_> = (0..4)
        .map(|n| {
            let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
            std::thread::spawn(move || (0..10).map(|m| seal(&mut ledger, &format!("{n}-{m}"))).collect::<Vec<_>>())
        })
        .collect();
    let mut receipts: Vec<_> = sealers.into_iter().flat_map(|sealer| sealer.join().unwrap()).collect();
    receipts.sort_by_key(|receipt| receipt.entry.sequence);
    let mut previous = None;
    for receipt in &receipts {
        let envelope = Envelope::parse(&receipt.envelope).unwrap();
        assert_eq!(envelope.payload(), serde_json::to_vec(&statement(previous)).unwrap());
        previous = Some(receipt.digest);
    }
    assert_eq!(receipts.len(), 40);
}

#[test]
fn what_is_no_receipt_is_not_sealed_and_leaves_nothing() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let first = seal(&mut ledger, "a");
    let before = dir.read(LEDGER).unwrap();
    let mut refuse = |statement: &dyn Fn(Option<Digest>) -> Vec<u8>| {
        ledger.seal(9, "b", "acme", |previous| Ok::<_, Infallible>(statement(previous))).unwrap_err()
    };
    let bytes = |value: &serde_json::Value| serde_json::to_vec(value).unwrap();
    assert!(matches!(refuse(&|_| b"{}".to_vec()), SealError::Statement(StatementError::Json(_))));
    let error = refuse(&|_| bytes(&statement(None)));
    assert!(
        matches!(&error, SealError::Previous { expected, found } if *expected == first.digest.to_string() && found == "none"),
        "{error}"
    );
    let error = refuse(&|previous| {
        let mut value = statement(previous);
        value["predicateType"] = "https://slsa.dev/provenance/v1".into();
        bytes(&value)
    });
    assert!(matches!(error, SealError::Statement(StatementError::Type { field: "predicateType", .. })), "{error}");
    let error = refuse(&|previous| {
        let mut value = statement(previous);
        value["subject"][1]["name"] = value["subject"][0]["name"].clone();
        bytes(&value)
    });
    assert!(matches!(error, SealError::Statement(StatementError::SubjectTwice(_))), "{error}");
    let error = ledger.seal(9, "b", "acme", |_| Err::<Vec<u8>, _>("no disk")).unwrap_err();
    assert_eq!(error.to_string(), "the statement could not be made: no disk");
    assert_eq!(dir.read(LEDGER).unwrap(), before);
    assert_eq!(ledger.last_receipt().unwrap(), Some(first.digest));
}

fn seal_once(ledger: &mut Ledger, job: &str, at: u64) -> nodus_receipts::SealedReceipt {
    ledger.seal_once(at, job, "acme", |previous| serde_json::to_vec(&statement(previous))).unwrap()
}

#[test]
fn a_job_that_ends_twice_has_one_receipt_until_it_is_settled() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let first = seal_once(&mut ledger, "a", 7);
    let other = seal_once(&mut ledger, "b", 8);
    drop(ledger);
    // The process died, and another one runs the job again.
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    assert_eq!(seal_once(&mut ledger, "a", 9), first);
    let mut unsettled = ledger.unsettled().unwrap();
    unsettled.sort();
    assert_eq!(unsettled, ["a", "b"]);
    ledger.settle("a").unwrap();
    ledger.settle("a").unwrap();
    assert_eq!(ledger.unsettled().unwrap(), ["b"]);
    let entries: Vec<_> = Reader::new(clone(&dir)).entries().unwrap().map(|entry| entry.unwrap().at).collect();
    assert_eq!(entries[1..], [first.entry, other.entry]);
}

#[test]
fn an_envelope_that_the_ledger_does_not_name_is_signed_anew() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let before = dir.read(LEDGER).unwrap();
    let lost = seal_once(&mut ledger, "a", 7);
    drop(ledger);
    // As a crash between the two leaves it; another receipt came first.
    dir.write(LEDGER, before).unwrap();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let other = seal_once(&mut ledger, "b", 7);
    let again = seal_once(&mut ledger, "a", 7);
    assert_ne!(again.digest, lost.digest);
    assert_eq!(Envelope::parse(&again.envelope).unwrap().payload(), serde_json::to_vec(&statement(Some(other.digest))).unwrap());
    assert_eq!(seal_once(&mut ledger, "a", 9), again);
    let refused = ledger.seal_once(9, "../a", "acme", |_| Ok::<_, Infallible>(Vec::new())).unwrap_err();
    assert!(refused.to_string().contains("letters, digits"), "{refused}");
}
