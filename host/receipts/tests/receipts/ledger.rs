//! The ledger: what is appended is there, in order, and nothing else is believed.
//!
//! Never goes around the public way, except to tamper with the file.

use std::io::{Seek as _, SeekFrom, Write as _};

use cap_std::fs::{Dir, OpenOptions};
use nodus_protocol::Digest;
use nodus_receipts::ledger::{AdapterBytes, BytesEvent, ENTRY_BYTES_MAX, Entry, Event, Fault, Filter, Kind, LedgerError, no_previous};
use nodus_receipts::{Ledger, Reader};

use crate::support::{LEDGER, bytes_event, clone, folder, key, seal};

fn filled(dir: &Dir) -> Ledger {
    let mut ledger = Ledger::open(clone(dir), key(1), 1).unwrap();
    for (time, (tenant, job, event, bytes)) in [
        ("acme", "a1", BytesEvent::Allocated, 100),
        ("acme", "a1", BytesEvent::Written, 80),
        ("globex", "g1", BytesEvent::Allocated, 7),
        ("acme", "a2", BytesEvent::Allocated, u64::MAX),
        ("acme", "a1", BytesEvent::Exported, 80),
        ("acme", "a1", BytesEvent::Zeroed, 100),
    ]
    .into_iter()
    .enumerate()
    {
        ledger.append(time as u64 + 2, bytes_event(tenant, job, event, bytes)).unwrap();
    }
    ledger
}

fn entries(dir: &Dir) -> Vec<Entry> {
    Reader::new(clone(dir)).entries().unwrap().map(Result::unwrap).collect()
}

fn first_error(dir: &Dir) -> Option<LedgerError> {
    Reader::new(clone(dir)).entries().unwrap().find_map(Result::err)
}

#[test]
fn entries_are_chained_and_the_first_names_the_key() {
    let dir = folder();
    let head = filled(&dir).head().unwrap().unwrap();
    let entries = entries(&dir);
    assert_eq!(entries.len(), 7);
    assert_eq!(entries[0].event, Event::KeyCreated { keyid: key(1).public().id() });
    assert_eq!((entries[0].previous, entries[0].unix_ms), (no_previous(), 1));
    let text = dir.read_to_string(LEDGER).unwrap();
    for (at, (entry, line)) in entries.iter().zip(text.lines()).enumerate() {
        assert_eq!((entry.at.sequence, entry.at.digest), (at as u64, Digest::of(line.as_bytes())));
        assert!(at == 0 || entry.previous == entries[at - 1].at.digest);
    }
    assert_eq!(head, entries[6].at);
    assert_eq!(no_previous().hex(), "0".repeat(64));
}

#[test]
fn several_entries_are_the_same_as_one_after_another() {
    let (dir, other) = (folder(), folder());
    let events = || (0..5).map(|bytes| bytes_event("acme", "a1", BytesEvent::Written, bytes)).collect::<Vec<_>>();
    let mut together = Ledger::open(clone(&dir), key(1), 1).unwrap();
    together.append_all(2, events()).unwrap();
    together.append_all(3, Vec::new()).unwrap();
    let mut apart = Ledger::open(clone(&other), key(1), 1).unwrap();
    events().into_iter().for_each(|event| assert!(apart.append(2, event).is_ok()));
    assert_eq!(dir.read(LEDGER).unwrap(), other.read(LEDGER).unwrap());
    assert_eq!(together.head().unwrap(), apart.head().unwrap());
    let too_long = vec![events().remove(0), bytes_event(&"x".repeat(ENTRY_BYTES_MAX), "a1", BytesEvent::Written, 1)];
    assert!(matches!(together.append_all(4, too_long).unwrap_err(), LedgerError::TooLong { .. }));
    assert_eq!(dir.read(LEDGER).unwrap(), other.read(LEDGER).unwrap(), "all or none of what can be written at all");
    together.append_all(5, events()).unwrap();
    assert_eq!(entries(&dir).len(), 11);
}

#[test]
fn the_form_of_a_line() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    ledger.append(1_700_000_000_000, bytes_event("a \"b\",\"checksum\":\"", "j\n", BytesEvent::Exported, 9)).unwrap();
    let text = dir.read_to_string(LEDGER).unwrap();
    let (first, second) = text.split_once('\n').unwrap();
    let body = format!(
        "{{\"sequence\":1,\"previous\":\"{}\",\"unix_ms\":1700000000000,\"kind\":\"adapter_bytes\",\"job\":\"j\\n\",\
         \"tenant\":\"a \\\"b\\\",\\\"checksum\\\":\\\"\",\"adapter\":0,\"event\":\"exported\",\"bytes\":9",
        Digest::of(first.as_bytes())
    );
    assert_eq!(second, format!("{body},\"checksum\":\"{}\"}}\n", Digest::of(body.as_bytes()).hex()));
    assert_eq!(entries(&dir)[1].event.job(), Some("j\n"));
}

#[test]
fn opened_again_it_goes_on_and_a_new_key_is_entered_once() {
    let dir = folder();
    let head = filled(&dir).head().unwrap();
    assert_eq!(Ledger::open(clone(&dir), key(1), 9).unwrap().head().unwrap(), head);
    for _ in 0..2 {
        Ledger::open(clone(&dir), key(2), 9).unwrap();
    }
    let keys: Vec<_> = Reader::new(clone(&dir)).select(Filter { kind: Some(Kind::KeyCreated), ..Filter::default() }).unwrap().collect();
    assert_eq!((keys.len(), entries(&dir).len()), (2, 8));
}

#[test]
fn filters_and_sums() {
    let dir = folder();
    let mut ledger = filled(&dir);
    seal(&mut ledger, "a1");
    let reader = ledger.reader().unwrap();
    let acme = Some("acme".to_owned());
    let select = |filter: Filter| -> Vec<u64> { reader.select(filter).unwrap().map(|entry| entry.unwrap().at.sequence).collect() };
    assert_eq!(select(Filter::default()), (0..8).collect::<Vec<_>>());
    assert_eq!(select(Filter { tenant: acme.clone(), ..Filter::default() }), [1, 2, 4, 5, 6, 7]);
    assert_eq!(select(Filter { tenant: acme.clone(), job: Some("a1".into()), ..Filter::default() }), [1, 2, 5, 6, 7]);
    assert_eq!(select(Filter { kind: Some(Kind::Receipt), ..Filter::default() }), [7]);
    assert_eq!(select(Filter { from: Some(2), to: Some(4), ..Filter::default() }), [2, 3, 4]);
    assert_eq!(select(Filter { from: Some(5), to: Some(4), ..Filter::default() }), [] as [u64; 0]);
    let all = reader.summary(&Filter::default()).unwrap();
    assert_eq!((all.entries, all.receipts, all.torn), (8, 1, None));
    assert_eq!(all.head, ledger.head().unwrap());
    let expected = AdapterBytes { allocated: u128::from(u64::MAX) + 100, written: 80, exported: 80, zeroed: 100 };
    assert_eq!(all.adapter_bytes["acme"], expected);
    assert_eq!(all.adapter_bytes["globex"], AdapterBytes { allocated: 7, ..AdapterBytes::default() });
    let job = reader.summary(&Filter { job: Some("a1".into()), ..Filter::default() }).unwrap();
    assert_eq!(job.adapter_bytes["acme"].allocated, job.adapter_bytes["acme"].zeroed);
    assert_eq!("receipt".parse::<Kind>().unwrap(), Kind::Receipt);
    assert!("receipts".parse::<Kind>().is_err());
}

#[test]
fn a_removed_moved_doubled_or_altered_line_is_corruption_and_stops_writers() {
    let dir = folder();
    drop(filled(&dir));
    let whole = dir.read_to_string(LEDGER).unwrap();
    let lines: Vec<_> = whole.split_inclusive('\n').collect();
    let expect = |changed: Vec<&str>, at: u64, is_the_fault: fn(&Fault) -> bool| {
        dir.write(LEDGER, changed.concat()).unwrap();
        for error in [first_error(&dir).unwrap(), Ledger::open(clone(&dir), key(1), 9).unwrap_err()] {
            assert!(matches!(&error, LedgerError::Corrupt { line, fault } if *line == at && is_the_fault(fault)), "{error}");
        }
        assert_eq!(dir.read_to_string(LEDGER).unwrap(), changed.concat(), "nothing is repaired");
    };
    let is_moved = |fault: &Fault| matches!(fault, Fault::Sequence { .. });
    let mut removed = lines.clone();
    removed.remove(2);
    expect(removed, 3, is_moved);
    expect(lines[1..].to_vec(), 1, is_moved);
    let mut swapped = lines.clone();
    swapped.swap(2, 3);
    expect(swapped, 3, is_moved);
    let mut doubled = lines.clone();
    doubled.push(lines[6]);
    expect(doubled, 8, is_moved);
    let altered = lines[1].replace("\"bytes\":100", "\"bytes\":101");
    let mut changed = lines.clone();
    changed[1] = &altered;
    expect(changed.clone(), 2, |fault| matches!(fault, Fault::Checksum { .. }));
    // With a checksum that holds, the next line gives it away.
    let body = altered.split_once(",\"checksum\"").unwrap().0;
    let forged = format!("{body},\"checksum\":\"{}\"}}\n", Digest::of(body.as_bytes()).hex());
    changed[1] = &forged;
    expect(changed, 3, |fault| matches!(fault, Fault::Previous { .. }));
    let mut blank = lines.clone();
    blank.insert(3, "\n");
    expect(blank, 4, |fault| matches!(fault, Fault::Incomplete));
    let unbroken = lines[5].replace('\n', "*");
    let mut joined = lines.clone();
    joined[5] = &unbroken;
    expect(joined, 6, |fault| matches!(fault, Fault::Trailing));
    let spaced_body = lines[6].split_once(",\"checksum\"").unwrap().0.replace("\"kind\":", "\"kind\": ");
    let spaced = format!("{spaced_body},\"checksum\":\"{}\"}}\n", Digest::of(spaced_body.as_bytes()).hex());
    let mut unlike = lines.clone();
    unlike[6] = &spaced;
    expect(unlike, 7, |fault| matches!(fault, Fault::NotCanonical));
    let long = "x".repeat(ENTRY_BYTES_MAX + 1);
    let mut longest = lines;
    longest.push(&long);
    expect(longest, 8, |fault| matches!(fault, Fault::TooLong));
}

#[test]
fn lines_cut_off_or_altered_under_an_open_ledger_are_noticed() {
    let dir = folder();
    let mut ledger = filled(&dir);
    let whole = dir.read(LEDGER).unwrap();
    let file = dir.open_with(LEDGER, OpenOptions::new().write(true)).unwrap();
    file.set_len(whole.len() as u64 - 1).unwrap();
    let error = ledger.append(9, bytes_event("acme", "a1", BytesEvent::Zeroed, 1)).unwrap_err();
    assert!(matches!(error, LedgerError::Shortened { .. }), "{error}");
    dir.write(LEDGER, &whole).unwrap();
    ledger.append(9, bytes_event("acme", "a1", BytesEvent::Zeroed, 1)).unwrap();
    dir.remove_file(LEDGER).unwrap();
    assert!(matches!(ledger.head(), Err(LedgerError::Io { .. })));
    assert!(!dir.exists(LEDGER), "a ledger that has vanished is not begun anew");
}

#[test]
fn an_entry_that_is_too_long_is_refused_and_leaves_nothing() {
    let dir = folder();
    let mut ledger = filled(&dir);
    let before = dir.read(LEDGER).unwrap();
    let error = ledger.append(9, bytes_event(&"t".repeat(ENTRY_BYTES_MAX), "j", BytesEvent::Zeroed, 1)).unwrap_err();
    assert!(matches!(error, LedgerError::TooLong { .. }), "{error}");
    assert_eq!(dir.read(LEDGER).unwrap(), before);
    ledger.append(9, bytes_event("t", "j", BytesEvent::Zeroed, 1)).unwrap();
}

#[test]
fn a_reader_needs_a_ledger_and_makes_none() {
    let dir = folder();
    assert!(matches!(Reader::new(clone(&dir)).entries(), Err(LedgerError::Io { .. })));
    assert_eq!(dir.entries().unwrap().count(), 0);
}

#[test]
fn writers_take_turns_and_no_entry_is_lost() {
    const WRITERS: u64 = 4;
    const EACH: u64 = 25;
    let dir = folder();
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let mut ledger = Ledger::open(clone(&dir), key(1), writer).unwrap();
            std::thread::spawn(move || {
                for n in 0..EACH {
                    ledger.append(n, bytes_event(&format!("t{writer}"), "j", BytesEvent::Written, 1)).unwrap();
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
    let summary = Reader::new(clone(&dir)).summary(&Filter::default()).unwrap();
    assert_eq!(summary.entries, WRITERS * EACH + 1);
    assert!(summary.adapter_bytes.values().all(|bytes| bytes.written == u128::from(EACH)));
}

#[test]
fn the_second_writer_waits_for_the_first() {
    let dir = folder();
    let mut ledger = Ledger::open(clone(&dir), key(1), 1).unwrap();
    let lock = dir.open_with("ledger.lock", OpenOptions::new().write(true)).unwrap().into_std();
    lock.lock().unwrap();
    let second = std::thread::spawn(move || ledger.append(2, bytes_event("t", "j", BytesEvent::Written, 1)).unwrap());
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(!second.is_finished());
    assert_eq!(entries(&dir).len(), 1);
    lock.unlock().unwrap();
    assert_eq!(second.join().unwrap().sequence, 1);
}

#[test]
fn every_flipped_bit_is_noticed() {
    let dir = folder();
    drop(filled(&dir));
    let whole = dir.read(LEDGER).unwrap();
    let last = whole[..whole.len() - 1].iter().rposition(|&byte| byte == b'\n').unwrap() + 1;
    let mut file = dir.open_with(LEDGER, OpenOptions::new().write(true)).unwrap();
    let mut put = |at: usize, byte: u8| {
        file.seek(SeekFrom::Start(at as u64)).unwrap();
        file.write_all(&[byte]).unwrap();
    };
    for (at, &byte) in whole.iter().enumerate() {
        for bit in 0..8 {
            put(at, byte ^ 1 << bit);
            let mut entries = Reader::new(clone(&dir)).entries().unwrap();
            let error = entries.find_map(Result::err);
            assert!(error.is_some() || entries.torn().is_some(), "bit {bit} of byte {at}");
            assert!(error.is_some() || at >= last, "bit {bit} of byte {at} is before the last line and no torn tail");
        }
        put(at, byte);
    }
}
