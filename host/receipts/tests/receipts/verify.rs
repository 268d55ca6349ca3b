//! Checking a receipt: whole, it passes; whatever is changed is named, with what was expected and found.
//!
//! Never a check that fails for another reason than the one under test.

use cap_std::fs::Dir;
use cap_tempfile::TempDir;
use nodus_protocol::Digest;
use nodus_receipts::verify::{CheckName, Mismatch, Outcome};
use nodus_receipts::{Envelope, Ledger, Reader, Report, SealedReceipt, verify};
use serde_json::Value;

use crate::support::{LEDGER, WEIGHTS, clone, folder, key, known, seal, statement, write_run};

struct World {
    run: TempDir,
    host: TempDir,
    receipts: Vec<SealedReceipt>,
}

fn world() -> World {
    let (run, host) = (folder(), folder());
    write_run(&run);
    let mut ledger = Ledger::open(clone(&host), key(1), 1).unwrap();
    let receipts = ["a", "b", "c"].map(|job| seal(&mut ledger, job)).to_vec();
    World { run, host, receipts }
}

impl World {
    fn ledger(&self) -> Reader {
        Reader::new(clone(&self.host))
    }

    fn check(&self, envelope: &[u8]) -> Report {
        verify(envelope, &known(&[&key(1)]), Some(&self.run), Some(&self.ledger()))
    }

    /// Checks the second receipt, of which only `name` may fail: what does not match.
    fn failure(&self, name: CheckName) -> Vec<Mismatch> {
        only_failure(&self.check(&self.receipts[1].envelope), name)
    }
}

fn only_failure(report: &Report, name: CheckName) -> Vec<Mismatch> {
    for check in &report.checks {
        assert_eq!(matches!(check.outcome, Outcome::Failed(_)), check.name == name, "{report}");
    }
    assert!(!report.is_ok());
    match report.outcome(name) {
        Some(Outcome::Failed(mismatches)) if !mismatches.is_empty() => mismatches.clone(),
        other => panic!("{other:?}"),
    }
}

fn mismatch(name: &str, expected: impl ToString, found: impl ToString) -> Mismatch {
    Mismatch { name: name.into(), expected: expected.to_string(), found: found.to_string() }
}

#[test]
fn a_whole_receipt_passes_every_check() {
    let world = world();
    for receipt in &world.receipts {
        let report = world.check(&receipt.envelope);
        assert!(report.is_ok() && report.is_complete(), "{report}");
        assert_eq!((report.checks.len(), report.receipt, report.keyid), (9, receipt.digest, Some(key(1).public().id())));
    }
    let text = world.check(&world.receipts[0].envelope).to_string();
    assert_eq!(
        text,
        "envelope: ok\npayload type: ok\nsignature: ok\nstatement: ok\nsubject files: ok\nadapter files: ok\nlosses: ok (loss and loss_bits; no other column is signed)\nheld-out losses: ok (adapter, step, loss and loss_bits; no other column is signed)\nchain: ok\n"
    );
}

#[test]
fn what_is_not_given_is_not_checked() {
    let world = world();
    let report = verify(&world.receipts[0].envelope, &known(&[&key(1)]), None, None);
    assert!(report.is_ok() && !report.is_complete());
    assert_eq!(report.outcome(CheckName::Chain), Some(&Outcome::NotChecked("no ledger was given".into())));
    for name in [CheckName::SubjectFiles, CheckName::AdapterFiles, CheckName::Losses, CheckName::HeldOut] {
        assert!(matches!(report.outcome(name), Some(Outcome::NotChecked(_))));
    }
}

#[test]
fn a_wrong_key_is_named() {
    let world = world();
    let report = verify(&world.receipts[1].envelope, &known(&[&key(2)]), Some(&world.run), Some(&world.ledger()));
    let mismatches = only_failure(&report, CheckName::Signature);
    assert!(
        mismatches[0].found.contains(&key(1).public().id().to_string()) && mismatches[0].found.contains(&key(2).public().id().to_string())
    );
}

#[test]
fn a_key_that_the_ledger_did_not_have_is_named() {
    let world = world();
    let payload = serde_json::to_vec(&statement(None)).unwrap();
    let forged = Envelope::sign(payload, &key(2)).to_bytes().unwrap();
    let report = verify(&forged, &known(&[&key(2)]), Some(&world.run), Some(&world.ledger()));
    assert_eq!(only_failure(&report, CheckName::Chain)[0].found, "none among 3 receipts");
}

#[test]
fn a_changed_subject_file_is_named_with_both_digests() {
    let world = world();
    world.run.write(WEIGHTS, "weightz").unwrap();
    assert_eq!(world.failure(CheckName::SubjectFiles), [mismatch(WEIGHTS, Digest::of(b"weights"), Digest::of(b"weightz"))]);
}

#[test]
fn a_missing_adapter_file_is_named() {
    let world = world();
    world.run.remove_file(WEIGHTS).unwrap();
    let report = world.check(&world.receipts[1].envelope);
    let of = |name| match report.outcome(name) {
        Some(Outcome::Failed(mismatches)) => mismatches.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(of(CheckName::SubjectFiles), [mismatch(WEIGHTS, Digest::of(b"weights"), "no such file")]);
    let expected =
        [mismatch(WEIGHTS, "a file", "no such file"), mismatch("bytes of adapter/", 15, 8), mismatch("bytes of all adapters", 15, 8)];
    assert_eq!(of(CheckName::AdapterFiles), expected);
}

#[test]
fn a_file_that_the_receipt_does_not_name_is_named() {
    let world = world();
    world.run.write("adapter/pytorch_model.bin", "").unwrap();
    let expected = mismatch("adapter/pytorch_model.bin", "no such file: the receipt does not name it", "a file");
    assert_eq!(world.failure(CheckName::AdapterFiles), [expected]);
}

#[test]
fn changed_losses_are_named() {
    let world = world();
    let losses = world.run.read_to_string("losses.jsonl").unwrap();
    let edit = |from: &str, to: &str| {
        assert!(losses.contains(from));
        world.run.write("losses.jsonl", losses.replacen(from, to, 1)).unwrap();
        world.failure(CheckName::Losses)
    };
    let digest =
        |text: &[u8]| mismatch("digest over the loss_bits of losses.jsonl", Digest::of(b"0x40b80c4a\n0x40b00000\n"), Digest::of(text));
    let both = edit("\"loss\":5.5,\"loss_bits\":\"0x40b00000\"", "\"loss\":5.25,\"loss_bits\":\"0x40a80000\"");
    assert_eq!(both, [digest(b"0x40b80c4a\n0x40a80000\n")]);
    let printed = edit("\"loss\":5.5,", "\"loss\":5.4,");
    assert_eq!(printed, [mismatch("losses.jsonl line 2, loss", "5.5, as its loss_bits say", 5.4)]);
    let null = edit("\"loss\":5.5,", "\"loss\":null,");
    assert_eq!(null, [mismatch("losses.jsonl line 2, loss", "5.5, as its loss_bits say", "null")]);
    let fewer = edit(losses.split_inclusive('\n').next().unwrap(), "");
    assert_eq!(fewer, [digest(b"0x40b00000\n"), mismatch("lines of losses.jsonl", 2, 1)]);
    assert!(edit("{\"step\":1", "\"step\":1")[0].name.contains("line 1"));
    world.run.write("losses.jsonl", losses.trim_end()).unwrap();
    assert!(world.failure(CheckName::Losses)[0].found.contains("line 2 does not end"));
    world.run.remove_file("losses.jsonl").unwrap();
    assert_eq!(world.failure(CheckName::Losses), [mismatch("losses.jsonl", "a line for every step", "no such file")]);
}

#[test]
fn changed_held_out_lines_are_named() {
    let world = world();
    let lines = world.run.read_to_string("held_out.jsonl").unwrap();
    let edit = |from: &str, to: &str| {
        assert!(lines.contains(from));
        world.run.write("held_out.jsonl", lines.replacen(from, to, 1)).unwrap();
        world.failure(CheckName::HeldOut)
    };
    let expected = mismatch("held_out.jsonl line 2", "adapter 1, step 2, loss_bits 0x40b00000", "adapter 0, step 2, loss_bits 0x40b00000");
    assert_eq!(edit(",\"adapter\":1", ""), [expected]);
    let expected = mismatch("held_out.jsonl line 2", "adapter 1, step 2, loss_bits 0x40b00000", "adapter 1, step 2, loss_bits 0x40a80000");
    assert_eq!(edit("\"loss\":5.5,\"loss_bits\":\"0x40b00000\"", "\"loss\":5.25,\"loss_bits\":\"0x40a80000\""), [expected]);
    let extra = edit(&lines.clone(), &format!("{lines}{lines}"));
    assert_eq!(extra, [mismatch("lines of held_out.jsonl", 2, 4)]);
}

#[test]
fn a_broken_chain_is_named() {
    let world = world();
    let ledger = world.host.read_to_string(LEDGER).unwrap();
    let lines: Vec<_> = ledger.split_inclusive('\n').collect();
    world.host.write(LEDGER, [lines[0], lines[2], lines[3]].concat()).unwrap();
    let removed = world.failure(CheckName::Chain);
    assert!(removed[0].found.starts_with("line 2 of the ledger: the entry has sequence 2, expected 1"), "{removed:?}");
    world.host.write(LEDGER, lines[..2].concat()).unwrap();
    let shorter = world.failure(CheckName::Chain);
    let expected = mismatch("the receipt's entry in the ledger", world.receipts[1].digest, "none among 1 receipts");
    assert_eq!(shorter, [expected]);
    world.host.write(LEDGER, &ledger[..ledger.len() - 200]).unwrap();
    assert!(world.check(&world.receipts[1].envelope).is_ok(), "a torn line after the receipt is no harm to it");
    let torn = only_failure(&world.check(&world.receipts[2].envelope), CheckName::Chain);
    assert!(torn[0].found.contains("line 4 is torn"), "{torn:?}");
    world.host.remove_file(LEDGER).unwrap();
    assert_eq!(world.failure(CheckName::Chain)[0].name, "the ledger");
}

/// A ledger whose lines are in order, made by somebody who can write to the folder: the signed `previous_receipt` gives it away.
#[test]
fn a_receipt_taken_out_of_a_rewritten_ledger_is_named() {
    let world = world();
    let second = &world.receipts[1];
    let rewritten = folder();
    let mut ledger = Ledger::open(clone(&rewritten), key(1), 1).unwrap();
    let subjects = vec![Digest::of(b"weights"), Digest::of(b"{\"r\": 8}")];
    let entry = |receipt, subjects| nodus_receipts::ledger::Event::Receipt { job: "b".into(), tenant: "acme".into(), receipt, subjects };
    ledger.append(7, entry(second.digest, subjects)).unwrap();
    let check = |host: &Dir, receipt: &SealedReceipt| {
        verify(&receipt.envelope, &known(&[&key(1)]), Some(&world.run), Some(&Reader::new(clone(host))))
    };
    let report = check(&rewritten, second);
    assert_eq!(only_failure(&report, CheckName::Chain), [mismatch("previous_receipt", "none", world.receipts[0].digest)]);
    ledger.append(7, entry(world.receipts[2].digest, vec![Digest::of(b"weights")])).unwrap();
    let mismatches = only_failure(&check(&rewritten, &world.receipts[2]), CheckName::Chain);
    assert_eq!(mismatches[0].name, "subjects");
}

#[test]
fn other_payloads_are_named() {
    let world = world();
    let check = |value: &Value| {
        let envelope = Envelope::sign(serde_json::to_vec(value).unwrap(), &key(1)).to_bytes().unwrap();
        verify(&envelope, &known(&[&key(1)]), Some(&world.run), None)
    };
    let mut value = statement(None);
    value["_type"] = "https://in-toto.io/Statement/v0.1".into();
    let mismatches = only_failure(&check(&value), CheckName::Statement);
    assert!(mismatches[0].found.contains("Statement/v0.1") && mismatches[0].found.contains("Statement/v1"), "{mismatches:?}");
    let mut value = statement(None);
    value["subject"][0]["name"] = "../../etc/passwd".into();
    let report = check(&value);
    assert!(
        matches!(report.outcome(CheckName::SubjectFiles), Some(Outcome::Failed(m)) if m[0].found.starts_with("unreadable")),
        "{report}"
    );
    let mut value = statement(None);
    value["predicate"].as_object_mut().unwrap().retain(|field, _| field == "lane");
    let report = check(&value);
    assert!(report.is_ok(), "{report}");
    for name in [CheckName::AdapterFiles, CheckName::Losses, CheckName::HeldOut] {
        assert!(matches!(report.outcome(name), Some(Outcome::NotChecked(_))), "{report}");
    }
}

#[test]
fn texts_of_strangers_are_escaped_and_cut() {
    let world = world();
    let mut value = statement(None);
    value["subject"][0]["name"] = format!("\u{1b}[2J{}", "x".repeat(1000)).into();
    let envelope = Envelope::sign(serde_json::to_vec(&value).unwrap(), &key(1)).to_bytes().unwrap();
    let text = verify(&envelope, &known(&[&key(1)]), Some(&world.run), None).to_string();
    assert!(text.contains("\\u{1b}[2Jxxx") && !text.contains('\u{1b}') && text.lines().all(|line| line.len() < 900), "{text}");
}
