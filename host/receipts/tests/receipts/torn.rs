//! A crash in the middle of an append, at every byte.
//!
//! Never loses an entry that was returned.

use cap_std::fs::Dir;
use nodus_receipts::ledger::{BytesEvent, EntryRef, Fault, Filter, TORN_FILE};
use nodus_receipts::{Ledger, Reader};

use crate::support::{LEDGER, bytes_event, clone, folder, key, seal};

/// A ledger of four entries: its bytes, where the last line begins, and the third entry.
fn crashed(dir: &Dir) -> (Vec<u8>, usize, EntryRef) {
    let mut ledger = Ledger::open(clone(dir), key(1), 1).unwrap();
    ledger.append(2, bytes_event("acme", "a", BytesEvent::Allocated, 5)).unwrap();
    seal(&mut ledger, "a");
    let third = ledger.head().unwrap().unwrap();
    ledger.append(3, bytes_event("acme", "a", BytesEvent::Exported, 5)).unwrap();
    let whole = dir.read(LEDGER).unwrap();
    let last = whole[..whole.len() - 1].iter().rposition(|&byte| byte == b'\n').unwrap() + 1;
    (whole, last, third)
}

#[test]
fn at_every_byte_of_the_last_line() {
    let dir = folder();
    let (whole, last, third) = crashed(&dir);
    for end in last..whole.len() {
        dir.write(LEDGER, &whole[..end]).unwrap();
        let torn_bytes = (end - last) as u64;
        let seen = Reader::new(clone(&dir)).summary(&Filter::default()).unwrap();
        assert_eq!((seen.entries, seen.torn.map(|torn| torn.bytes)), (3, (torn_bytes > 0).then_some(torn_bytes)));
        assert_eq!(dir.read(LEDGER).unwrap().len(), end, "a reader changes nothing");

        let mut ledger = Ledger::open(clone(&dir), key(1), 9).unwrap();
        assert_eq!(
            ledger.torn().iter().map(|torn| (torn.line, torn.bytes)).collect::<Vec<_>>(),
            Vec::from_iter((end > last).then_some((4, torn_bytes)))
        );
        assert_eq!(ledger.head().unwrap(), Some(third));
        assert_eq!(dir.read(LEDGER).unwrap(), &whole[..last]);
        if end % 16 == 0 {
            // The same entry again gives the same line: nothing of the torn one is in the way.
            ledger.append(3, bytes_event("acme", "a", BytesEvent::Exported, 5)).unwrap();
            assert_eq!(dir.read(LEDGER).unwrap(), whole);
        }
    }
    let kept = dir.read(TORN_FILE).unwrap();
    assert_eq!(kept.iter().filter(|&&byte| byte == b'\n').count(), whole.len() - 1 - last, "every torn line is kept aside");
}

#[test]
fn with_blocks_that_never_reached_the_disk() {
    let dir = folder();
    let (whole, last, third) = crashed(&dir);
    for from in last..whole.len() {
        for to in [from + 1, whole.len()] {
            let mut holed = whole.clone();
            holed[from..to].fill(0);
            dir.write(LEDGER, &holed).unwrap();
            let seen = Reader::new(clone(&dir)).summary(&Filter::default()).unwrap();
            assert_eq!((seen.head, seen.torn.is_some()), (Some(third), true), "zeros from {from} to {to}");
            if from % 16 == 0 {
                let mut ledger = Ledger::open(clone(&dir), key(1), 9).unwrap();
                assert_eq!((ledger.head().unwrap(), ledger.torn().len()), (Some(third), 1), "zeros from {from} to {to}");
            }
        }
    }
}

#[test]
fn of_the_very_first_entry() {
    let dir = folder();
    drop(Ledger::open(clone(&dir), key(1), 1).unwrap());
    let whole = dir.read(LEDGER).unwrap();
    for end in 0..whole.len() {
        dir.write(LEDGER, &whole[..end]).unwrap();
        let ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
        assert_eq!(ledger.torn().len(), usize::from(end > 0));
        assert_eq!(dir.read(LEDGER).unwrap(), whole);
    }
}

#[test]
fn of_another_process_while_this_one_has_the_ledger_open() {
    let dir = folder();
    let (whole, last, third) = crashed(&dir);
    dir.write(LEDGER, &whole[..last]).unwrap();
    let mut ledger = Ledger::open(clone(&dir), key(1), 9).unwrap();
    dir.write(LEDGER, &whole[..last + 40]).unwrap();
    let entry = ledger.append(9, bytes_event("acme", "a", BytesEvent::Zeroed, 5)).unwrap();
    assert_eq!(entry.sequence, third.sequence + 1);
    assert!(matches!(ledger.torn(), [torn] if torn.fault == Fault::Incomplete && torn.bytes == 40));
    assert_eq!(Reader::new(clone(&dir)).summary(&Filter::default()).unwrap().torn, None);
}
