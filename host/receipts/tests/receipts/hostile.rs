//! Hostile bytes: no panic, and no changed bit goes unnoticed.
//!
//! Never a random source of its own: a failure is printed by proptest and replays.

use std::sync::LazyLock;

use cap_tempfile::TempDir;
use nodus_receipts::verify::{CheckName, Outcome};
use nodus_receipts::{Envelope, Ledger, Reader, verify};
use proptest::prelude::*;

use crate::support::{LEDGER, clone, folder, key, known, seal, statement, write_run};

fn envelope() -> Vec<u8> {
    Envelope::sign(serde_json::to_vec(&statement(None)).unwrap(), &key(1)).to_bytes().unwrap()
}

/// Every bit of the file: of payload and signature, and of all that is around them.
#[test]
fn every_flipped_bit_of_an_envelope_is_noticed() {
    let (whole, known) = (envelope(), known(&[&key(1)]));
    assert!(verify(&whole, &known, None, None).is_ok());
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            assert!(!verify(&flipped, &known, None, None).is_ok(), "bit {bit} of byte {at}");
        }
    }
}

/// A run's files and a ledger of three receipts, made once and only read.
static WORLD: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = folder();
    write_run(&dir);
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    for job in ["a", "b", "c"] {
        seal(&mut ledger, job);
    }
    dir
});

/// What is done to bytes.
#[derive(Clone, Debug)]
enum Harm {
    Flip(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
}

fn harms() -> impl Strategy<Value = Vec<Harm>> {
    let harm = prop_oneof![
        (any::<prop::sample::Index>(), 0..8_u8).prop_map(|(at, bit)| Harm::Flip(at, bit)),
        any::<prop::sample::Index>().prop_map(Harm::Cut),
        (any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 1..40)).prop_map(|(at, bytes)| Harm::Insert(at, bytes)),
        (any::<prop::sample::Index>(), 1..40_usize).prop_map(|(at, length)| Harm::Remove(at, length)),
    ];
    prop::collection::vec(harm, 1..4)
}

fn harmed(whole: &[u8], harms: &[Harm]) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for harm in harms {
        if bytes.is_empty() {
            break;
        }
        match harm {
            Harm::Flip(at, bit) => {
                let at = at.index(bytes.len());
                bytes[at] ^= 1 << bit;
            }
            Harm::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Harm::Insert(at, inserted) => {
                let at = at.index(bytes.len());
                bytes.splice(at..at, inserted.iter().copied());
            }
            Harm::Remove(at, length) => {
                let at = at.index(bytes.len());
                bytes.drain(at..(at + length).min(bytes.len()));
            }
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn a_harmed_envelope_fails_and_does_not_panic(harms in harms()) {
        let whole = envelope();
        let bytes = harmed(&whole, &harms);
        let report = verify(&bytes, &known(&[&key(1)]), None, None);
        prop_assert_eq!(report.is_ok(), bytes == whole);
        drop(report.to_string());
    }

    /// A host may have signed anything: a signature that holds makes no payload harmless.
    #[test]
    fn a_signed_but_harmed_statement_does_not_panic(harms in harms()) {
        let dir = &*WORLD;
        let whole = serde_json::to_vec(&statement(None)).unwrap();
        let payload = harmed(&whole, &harms);
        let is_whole = payload == whole;
        let bytes = Envelope::sign(payload, &key(1)).to_bytes().unwrap();
        let report = verify(&bytes, &known(&[&key(1)]), Some(dir), Some(&Reader::new(clone(dir))));
        prop_assert_eq!(report.outcome(CheckName::Signature), Some(&Outcome::Ok));
        prop_assert_eq!(report.is_ok(), is_whole, "only what was sealed is in the ledger");
        drop(report.to_string());
    }

    /// The files of a run come from strangers too.
    #[test]
    fn harmed_files_of_a_run_do_not_panic(harms in harms(), which in 0..3_usize) {
        let run = folder();
        write_run(&run);
        let name = ["losses.jsonl", "held_out.jsonl", "adapter/adapter_config.json"][which];
        run.write(name, harmed(&run.read(name).unwrap(), &harms)).unwrap();
        drop(verify(&envelope(), &known(&[&key(1)]), Some(&run), None).to_string());
    }

    /// What is read of a harmed ledger is a beginning of what was written; opening it to write never panics, and cuts the last line only.
    #[test]
    fn a_harmed_ledger_gives_no_entry_that_was_not_written(harms in harms()) {
        let dir = folder();
        let whole = WORLD.read(LEDGER).unwrap();
        let bytes = harmed(&whole, &harms);
        dir.write(LEDGER, &bytes).unwrap();
        let written = whole.split_inclusive(|&byte| byte == b'\n');
        let mut entries = Reader::new(clone(&dir)).entries().unwrap();
        let mut read = 0;
        let mut failed = None;
        for entry in &mut entries {
            match entry {
                Ok(_) => read += 1,
                Err(error) => failed = Some(error.to_string()),
            }
        }
        let beginning: Vec<u8> = written.take(read).flatten().copied().collect();
        prop_assert!(bytes.starts_with(&beginning));
        prop_assert!(failed.is_some() || entries.torn().is_some() || bytes == beginning);
        let reopened = Ledger::open(clone(&dir), key(1), 1);
        prop_assert_eq!(reopened.is_err(), failed.is_some());
        let left = dir.read(LEDGER).unwrap();
        prop_assert!(left.starts_with(&beginning));
        prop_assert!(reopened.is_ok() || left == bytes, "a corrupt ledger is left as it is");
    }

    /// Bytes that have nothing to do with receipts.
    #[test]
    fn noise_does_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let dir = folder();
        dir.write(LEDGER, &bytes).unwrap();
        drop(Reader::new(clone(&dir)).entries().unwrap().collect::<Vec<_>>());
        prop_assert!(!verify(&bytes, &known(&[&key(1)]), Some(&dir), Some(&Reader::new(clone(&dir)))).is_ok());
    }
}
