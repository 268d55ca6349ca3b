//! A job's own entries, without the rest of the ledger.

use std::time::Duration;

use nodus_receipts::ledger::{BytesEvent, Entry, LOCK_FILE, LedgerError};
use nodus_receipts::{Follower, Ledger, Reader};

use crate::support::{LEDGER, bytes_event, clone, folder, key, seal};

#[test]
fn a_job_has_its_own_entries_whoever_wrote_them_and_from_wherever_they_are_wanted() {
    let dir = folder();
    let mut follower = Follower::new(clone(&dir));
    assert!(matches!(follower.entries("a", 0).err().unwrap(), LedgerError::Io { .. }), "there is none yet");
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let mut other = Ledger::open(clone(&dir), key(1), 1).unwrap();
    for round in 0..5_u64 {
        let many = (0..200).map(|n| bytes_event("t", "a", BytesEvent::Written, 1000 * round + n)).collect();
        ledger.append_all(2, many).unwrap();
        other.append(3, bytes_event("t", "b", BytesEvent::Written, round)).unwrap();
        if round == 2 {
            seal(&mut ledger, "a");
        }
        // Read meanwhile, it goes on from there.
        assert_eq!(follower.entries("b", 0).unwrap().count() as u64, round + 1);
    }
    for job in ["a", "b", "c"] {
        let whole = Reader::new(clone(&dir)).entries().unwrap().map(Result::unwrap);
        let own: Vec<Entry> = whole.filter(|entry| entry.event.job() == Some(job)).collect();
        assert_eq!(
            own.len(),
            if job == "a" {
                1001
            } else if job == "b" {
                5
            } else {
                0
            }
        );
        assert_eq!(ledger.entries_of(job).unwrap().map(Result::unwrap).collect::<Vec<_>>(), own);
        for from in [0, 1, 3, 199, 200, 255, 256, 257, 600, 1000, 1001, 5000] {
            let found: Vec<Entry> = follower.entries(job, from).unwrap().map(Result::unwrap).collect();
            assert_eq!(found, own[own.len().min(usize::try_from(from).unwrap())..], "{job} from {from}");
        }
    }
}

/// However long the ledger is: lines of others could as well not be there.
#[test]
fn nothing_but_a_jobs_own_lines_is_read_again() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    for job in ["a", "b", "a"] {
        ledger.append(2, bytes_event("t", job, BytesEvent::Written, 7)).unwrap();
    }
    let mut follower = Follower::new(clone(&dir));
    assert_eq!(follower.entries("b", 0).unwrap().count(), 1);
    let text = dir.read_to_string(LEDGER).unwrap();
    let altered: String =
        text.lines().map(|line| if line.contains("\"b\"") { "x".repeat(line.len()) + "\n" } else { format!("{line}\n") }).collect();
    dir.write(LEDGER, altered).unwrap();
    assert_eq!(follower.entries("a", 0).unwrap().filter_map(Result::ok).count(), 2);
    assert_eq!(ledger.entries_of("a").unwrap().filter_map(Result::ok).count(), 2);
    // It is checked all the same.
    assert!(matches!(follower.entries("b", 0).unwrap().next().unwrap(), Err(LedgerError::Corrupt { line: 3, .. })));
    dir.write(LEDGER, &text[..text.len() / 2]).unwrap();
    assert!(matches!(follower.entries("a", 0).err().unwrap(), LedgerError::Shortened { .. }));
}

/// As on a disk that fills up in the middle of a line, or at its end: the writer takes it back before it gives up the lock.
#[test]
fn a_line_that_is_taken_back_was_never_read() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    ledger.append(2, bytes_event("t", "a", BytesEvent::Written, 7)).unwrap();
    let before = dir.read(LEDGER).unwrap();
    ledger.append(3, bytes_event("t", "a", BytesEvent::Written, 8)).unwrap();
    let whole = dir.read(LEDGER).unwrap();
    drop(ledger);
    let mut follower = Follower::new(clone(&dir));
    for written in [whole.len(), whole.len() - 1, before.len() + 40] {
        dir.write(LEDGER, &before).unwrap();
        let lock = dir.open(LOCK_FILE).unwrap().into_std();
        lock.lock().unwrap();
        dir.write(LEDGER, &whole[..written]).unwrap();
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| follower.entries("a", 0).unwrap().map(Result::unwrap).count());
            std::thread::sleep(Duration::from_millis(100));
            dir.write(LEDGER, &before).unwrap();
            drop(lock);
            assert_eq!(reading.join().unwrap(), 1, "{written}");
        });
    }
    // Another line takes its place.
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    ledger.append(4, bytes_event("t", "a", BytesEvent::Zeroed, 7)).unwrap();
    assert_eq!(follower.entries("a", 0).unwrap().map(Result::unwrap).count(), 2);
}

/// More than is read under the lock, and a torn line at its end.
#[test]
fn a_long_ledger_is_followed_to_its_last_whole_line() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let lines = 16_000;
    ledger.append_all(2, (0..lines).map(|n| bytes_event("t", "a", BytesEvent::Written, n)).collect()).unwrap();
    let whole = dir.read(LEDGER).unwrap();
    assert!(whole.len() > 3 << 20, "{}", whole.len());
    dir.write(LEDGER, [&whole[..], &whole[..100]].concat()).unwrap();
    let mut follower = Follower::new(clone(&dir));
    assert_eq!(follower.entries("a", 0).unwrap().map(Result::unwrap).count() as u64, lines);
    // The writer cuts the torn line off, and goes on.
    ledger.append(3, bytes_event("t", "a", BytesEvent::Zeroed, 1)).unwrap();
    assert_eq!(ledger.torn().len(), 1);
    assert_eq!(follower.entries("a", lines).unwrap().map(Result::unwrap).count(), 1);
}

#[test]
fn what_a_ledger_has_read_is_not_read_again_by_who_follows_it() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    for job in ["a", "b", "a"] {
        ledger.append(2, bytes_event("t", job, BytesEvent::Written, 7)).unwrap();
    }
    let mut follower = ledger.follower().unwrap();
    let text = dir.read_to_string(LEDGER).unwrap();
    let altered: String =
        text.lines().map(|line| if line.contains("\"b\"") { "x".repeat(line.len()) + "\n" } else { format!("{line}\n") }).collect();
    dir.write(LEDGER, altered).unwrap();
    assert_eq!(follower.entries("a", 0).unwrap().map(Result::unwrap).count(), 2, "the line between is read by nobody");
    ledger.append(3, bytes_event("t", "a", BytesEvent::Zeroed, 7)).unwrap();
    assert_eq!(follower.entries("a", 0).unwrap().map(Result::unwrap).count(), 3);
}
