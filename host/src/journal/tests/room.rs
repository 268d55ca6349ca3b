//! Journals on disks and in rooms that are full.

use std::sync::Arc;
use std::time::Duration;

use nodus_protocol::frame::encode;
use nodus_protocol::{Client, Digest, EngineError, Reply, TrunkSlot};

use super::super::book::Book;
use super::super::keeper::Keeper;
use super::super::record::frame;
use super::super::shelf::bytes_of;
use super::super::space::Space;
use super::super::{Scribe, Shelf, Terms, call as calling};
use super::{CALLS, Flaw, JOB, NEVER, account, call, calls, engine, kept, open, refusal};

#[tokio::test]
async fn a_disk_that_refuses_costs_the_snapshot_and_nothing_else() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (engine, _) = engine(Flaw::None);
    let mut book = open(&dir).unwrap();
    // A handle that cannot be written stands for a disk that is full.
    let refusing =
        Keeper::start((dir.try_clone().unwrap(), dir.open("replies").unwrap()), (32, 0), Digest::of(b"class"), account()).unwrap();
    std::mem::replace(&mut book.keeper, refusing).end();
    let terms = Terms { engine: engine.clone(), job: JOB, trunk: TrunkSlot(0), cohort: None, every: Duration::ZERO };
    let scribe = Scribe::start(terms, book);
    assert!(calls(&scribe, 0..CALLS).await.iter().all(|answer| answer.starts_with("Ok")));
    scribe.checkpoint().await;
    assert!(scribe.fault().is_none());
    scribe.end().await;
    let book = open(&dir).unwrap();
    assert!(book.is_new && book.past.state.is_none());
    assert_eq!(dir.entries().unwrap().count(), 1, "nothing half-made is left");
}

/// A job whose journal finds no room goes on all the same, is not kept, and still says where it began.
#[tokio::test]
async fn a_journal_without_room_costs_its_being_kept() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (engine, _) = engine(Flaw::None);
    // A tenant has a quarter: room for a few replies.
    let space = Arc::new(Space::new(4 * 600));
    let book = Book::open(dir.try_clone().unwrap(), Digest::of(b"class"), space.account("job", 1)).unwrap();
    let terms = Terms { engine: engine.clone(), job: JOB, trunk: TrunkSlot(0), cohort: None, every: NEVER };
    let scribe = Scribe::start(terms, book);
    assert!(calls(&scribe, 0..CALLS).await.iter().all(|answer| answer.starts_with("Ok")));
    assert!(scribe.fault().is_none());
    let last = scribe.end().await;
    assert!(!last.is_further);
    assert_eq!(dir.read("replies").unwrap(), Digest::of(b"class").as_bytes());
    assert!(open(&dir).unwrap().is_new);
}

/// What an attempt still reads is not taken from under it: the room is given back when it is over.
#[tokio::test]
async fn a_journal_that_is_given_up_is_read_to_its_end() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let class = Digest::of(b"class");
    // Killed when the last of two calls was answered and the one before it was not: of call 7 the reply is there, of call 6 it is not.
    let mut file = class.as_bytes().to_vec();
    for number in [0, 1, 2, 3, 4, 5, 7] {
        let reply: Result<Reply, EngineError> = if number == 0 { Ok(Reply::Done) } else { Err(refusal()) };
        let asked = calling::fingerprint(&call(number)).unwrap().unwrap();
        file.extend(frame(number, 0, asked, &encode(&reply).unwrap()).unwrap());
    }
    dir.write("replies", &file).unwrap();
    let (engine, _) = engine(Flaw::Wordy);
    let book = Book::open(dir.try_clone().unwrap(), class, Arc::new(Space::new(4)).account("job", 1)).unwrap();
    let terms = Terms { engine: engine.clone(), job: JOB, trunk: TrunkSlot(0), cohort: None, every: NEVER };
    let scribe = Scribe::start(terms, book);
    calls(&scribe, 0..7).await;
    // The thread that writes has found no room by then.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(calls(&scribe, 7..8).await[0].starts_with("Err"));
    assert!(scribe.fault().is_none() && scribe.is_caught_up(), "{:?}", scribe.fault());
    scribe.end().await;
    assert_eq!(dir.read("replies").unwrap(), class.as_bytes());
}

/// What all journals take is counted as they grow and shrink, and not looked for on the disk.
#[tokio::test]
async fn the_count_of_a_journals_room_is_what_it_takes() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let space = Arc::new(Space::new(1 << 30));
    for attempt in 1..4 {
        let (engine, _) = engine(Flaw::None);
        let book = Book::open(dir.try_clone().unwrap(), Digest::of(b"class"), space.account("job", 1)).unwrap();
        let terms = Terms { engine: engine.clone(), job: JOB, trunk: TrunkSlot(0), cohort: None, every: Duration::from_millis(1) };
        let scribe = Scribe::start(terms, book);
        for step in 0..attempt * 4 {
            calls(&scribe, step..step + 1).await;
            if step + 1 > (attempt - 1) * 4 {
                kept(&dir, &format!("snapshot-{}", step + 1)).await;
            }
        }
        scribe.end().await;
        assert_eq!(space.held_by("job"), bytes_of(&dir).unwrap(), "attempt {attempt}");
        assert_eq!(dir.entries().unwrap().count(), 3, "replies and two snapshots");
    }
}

/// What a job did after a moment is forgotten, in whatever order it was answered.
#[tokio::test]
async fn a_journal_that_is_cut_has_the_first_calls_and_no_others() {
    let data = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let shelf = Shelf::open(&data, Space::new(1 << 30)).unwrap();
    let begin = |engine: &Client| {
        let terms = Terms { engine: engine.clone(), job: JOB, trunk: TrunkSlot(0), cohort: None, every: NEVER };
        Scribe::start(terms, shelf.book("job", 1, Digest::of(b"class")).unwrap())
    };
    let (first, _) = engine(Flaw::None);
    let scribe = begin(&first);
    let made = scribe.calls();
    let expected = calls(&scribe, 0..5).await;
    assert_eq!(made.made(), 5);
    calls(&scribe, 5..8).await;
    scribe.checkpoint().await;
    scribe.end().await;
    shelf.cut("job", 5).unwrap();
    shelf.cut("another", 5).unwrap();
    // What comes next may be another call than before.
    let (second, _) = engine(Flaw::None);
    let scribe = begin(&second);
    assert_eq!(calls(&scribe, 0..5).await, expected);
    assert!(scribe.is_caught_up());
    assert!(calls(&scribe, 9..10).await[0].starts_with("Ok"));
    assert_eq!((scribe.fault(), scribe.tally().repeated), (None, 5), "the snapshot was of later");
    scribe.end().await;
}
