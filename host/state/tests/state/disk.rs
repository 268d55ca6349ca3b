//! The disk: full, read-only, damaged, shared with another process.

use std::io::{self, Write as _};
use std::time::Duration;

use nodus_protocol::Digest;
use nodus_state::{Access, Depth, Fault, ItemKind, JobState, Outcome, Owner, Reference, StateError};

use crate::support::{Fixture, ending, event, fixture, open, sweep};

/// The database may not grow any more; what fills it up is refused, and what was there is there.
#[test]
fn a_full_disk_is_a_clean_error_and_nothing_is_lost() {
    let f = fixture();
    let a = f.tenant("a");
    let job = f.job(a);
    let claim = f.state.claim(&[job], "cpu").unwrap()[0];
    f.state.append(&claim, &[event(1)]).unwrap();
    f.state.bound_database(1).unwrap();
    let large = nodus_state::NewEvent { body: format!("{{\"text\":\"{}\"}}", "x".repeat(1 << 20)), ..event(2) };
    assert!(matches!(f.state.append(&claim, &[large]).unwrap_err(), StateError::Full));
    let specs = vec![f.spec(a); 500];
    assert!(matches!(f.state.submit(a, None, &sweep(&specs)).unwrap_err(), StateError::Full));
    assert_eq!(f.state.job(a, job).unwrap().state, JobState::Running);
    assert_eq!(f.state.queued().unwrap(), []);
    f.state.bound_database(1 << 40).unwrap();
    assert_eq!(f.state.append(&claim, &[event(1), event(2)]).unwrap(), 1);
    f.state.finish(&claim, &ending(Outcome::Succeeded)).unwrap();
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
}

/// What a full disk keeps from being written is told all the same: to the job's owner, and until it ends.
#[test]
fn why_a_job_stands_still_is_told_without_the_disk() {
    let f = fixture();
    let (a, b) = (f.tenant("a"), f.tenant("b"));
    let (job, other) = (f.job(a), f.job(b));
    let claim = f.state.claim(&[job], "cpu").unwrap()[0];
    f.state.excuse(job, Some("the disk takes no writes"));
    let told = f.state.job(a, job).unwrap();
    assert_eq!((told.state, told.reason.as_deref()), (JobState::Running, Some("the disk takes no writes")));
    assert_eq!(f.state.jobs(a, &nodus_state::Filter::default(), 9).unwrap().jobs, std::slice::from_ref(&told));
    assert_eq!(f.state.members(a, told.cohort, None, 9).unwrap().jobs, [told]);
    assert_eq!(f.state.job(b, other).unwrap().reason, None);
    f.state.finish(&claim, &ending(Outcome::Succeeded)).unwrap();
    assert_eq!(f.state.job(a, job).unwrap().reason, None);
    f.state.excuse(other, Some("the same"));
    f.state.keep_excuses(|kept| kept != other);
    assert_eq!(f.state.job(b, other).unwrap().reason, None);
}

#[test]
fn a_service_that_is_started_while_another_ends_waits_for_the_folder() {
    let Fixture { folder, state, .. } = fixture();
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(state);
    });
    drop(open(&folder, Access::Whole).unwrap());
    ending.join().unwrap();
}

#[test]
fn what_an_older_program_serves_is_not_brought_up_to_date_under_it() {
    let f = fixture();
    let database = rusqlite::Connection::open(f.folder.path().join("state.db")).unwrap();
    let version: i64 = database.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    database.pragma_update(None, "user_version", version - 1).unwrap();
    assert!(matches!(open(&f.folder, Access::Rows).err().unwrap(), StateError::Older));
    assert_eq!(database.pragma_query_value::<i64, _>(None, "user_version", |row| row.get(0)).unwrap(), version - 1);
}

#[test]
fn one_process_serves_a_folder_and_others_may_have_its_rows() {
    let f = fixture();
    assert!(matches!(open(&f.folder, Access::Whole).err().unwrap(), StateError::InUse));
    let beside = open(&f.folder, Access::Rows).unwrap();
    let a = f.tenant("a");
    assert_eq!(beside.tenant_named("a").unwrap().id, a);
    let token = beside.add_token(Some(a)).unwrap();
    assert!(f.state.bearer(&token).unwrap().is_some());
    assert!(matches!(beside.stage(1).err().unwrap(), StateError::RowsOnly));
}

#[test]
fn an_upload_beyond_its_size_leaves_nothing() {
    let f = fixture();
    let mut staged = f.state.stage(3).unwrap();
    staged.write_all(b"abc").unwrap();
    assert_eq!(staged.write_all(b"d").unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    drop(staged);
    assert_eq!(std::fs::read_dir(f.folder.path().join("tmp")).unwrap().count(), 0);
}

#[test]
fn what_a_killed_process_was_writing_goes_at_the_next_start() {
    let f = fixture();
    let left = f.folder.path().join("tmp/left");
    std::fs::write(&left, "half").unwrap();
    drop(f.state);
    open(&f.folder, Access::Whole).unwrap();
    assert!(!left.exists());
}

/// Several put the same content in place at once, again and again, while what nobody refers to is removed: whoever has it kept finds it there.
#[test]
fn what_is_kept_by_many_at_once_is_there_for_each_whatever_is_removed_meanwhile() {
    let f = fixture();
    let (folder, state) = (f.folder.path(), &f.state);
    std::thread::scope(|scope| {
        let keep = || {
            for _ in 0..40 {
                let mut staged = state.stage(100).unwrap();
                staged.write_all(b"the same").unwrap();
                let kept = staged.keep().unwrap();
                let hex = kept.digest().hex();
                let found = std::fs::read(folder.join("blobs").join(&hex[..2]).join(&hex)).unwrap();
                assert_eq!(found, b"the same");
            }
        };
        let keepers: Vec<_> = (0..4).map(|_| scope.spawn(keep)).collect();
        while !keepers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            state.gc().unwrap();
        }
    });
    assert!(state.gc().unwrap().blobs <= 1);
    assert_eq!(state.gc().unwrap(), nodus_state::Collected::default(), "nothing is pinned any more");
}

#[test]
fn gc_removes_what_a_crash_left_and_never_what_is_about_to_be_referred_to() {
    let f = fixture();
    let a = f.tenant("a");
    let kept = f.finished(a);
    let gone = f.finished(a);
    let pinned = f.blob(b"about to be referred to");
    let weights = f.blob_path(&format!("weights of {gone}").into_bytes());
    let content = std::fs::read(&weights).unwrap();
    f.state.delete_job(a, gone).unwrap();
    // The process ended after the rows were gone, and before the file was.
    std::fs::write(&weights, &content).unwrap();
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
    let collected = f.state.gc().unwrap();
    assert_eq!((collected.blobs, collected.bytes), (1, content.len() as u64));
    let name = ("content".to_owned(), pinned);
    let digest = name.1.digest();
    let new = nodus_state::NewItem {
        kind: ItemKind::Data,
        owner: Owner::Tenant(a),
        name: Some("late"),
        digest,
        about: &serde_json::Value::Null,
        files: &[name],
    };
    f.state.add_item(&new).unwrap();
    assert_eq!(f.state.gc().unwrap(), nodus_state::Collected::default());
    assert_eq!(f.state.artifacts(a, kept).unwrap().len(), 1);
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
}

/// What cannot be read is not read later either: it is said, and nobody waits for it.
#[test]
fn a_database_of_which_a_part_is_overwritten_is_broken_and_stays_so_until_it_is_opened_anew() {
    let f = fixture();
    let a = f.tenant("a");
    let job = f.job(a);
    let claim = f.state.claim(&[job], "cpu").unwrap()[0];
    for first in (0..20_000).step_by(2000) {
        f.state.append(&claim, &(first + 1..=first + 2000).map(event).collect::<Vec<_>>()).unwrap();
    }
    let crate::support::Fixture { folder, state } = f;
    drop(state);
    let path = folder.path().join("state.db");
    let whole = std::fs::read(&path).unwrap();
    let mut broken = whole.clone();
    let third = broken.len() / 3;
    broken[third..2 * third].fill(0xa5);
    std::fs::write(&path, &broken).unwrap();
    let state = open(&folder, Access::Whole).unwrap();
    assert!(state.is_ready().is_ok() && !state.is_broken(), "nobody has looked there yet");
    let read = || state.events(a, nodus_state::Stream::Job(job), 0, &[], 20_000);
    let error = read().unwrap_err();
    assert!(matches!(error, StateError::Broken(_)) && !error.is_disk(), "{error}");
    assert!(state.is_broken());
    drop(state);
    std::fs::write(&path, &whole).unwrap();
    let state = open(&folder, Access::Whole).unwrap();
    assert!(!state.is_broken());
    assert_eq!(state.fsck(Depth::Contents).unwrap(), []);
}

#[test]
fn fsck_names_what_is_missing_cut_or_altered() {
    let f = fixture();
    let a = f.tenant("a");
    let paths = [&b"one"[..], b"two", b"three"].map(|content| {
        f.item(Owner::Tenant(a), ItemKind::Component, None, content).unwrap();
        f.blob_path(content)
    });
    std::fs::remove_file(&paths[0]).unwrap();
    std::fs::write(&paths[1], "t").unwrap();
    std::fs::write(&paths[2], "THREE").unwrap();
    assert_eq!(f.state.fsck(Depth::Lengths).unwrap().len(), 2);
    let faults = f.state.fsck(Depth::Contents).unwrap();
    for fault in [
        Fault::Missing(Digest::of(b"one")),
        Fault::Length { digest: Digest::of(b"two"), found: 1, expected: 3 },
        Fault::Content { digest: Digest::of(b"three"), found: Digest::of(b"THREE") },
    ] {
        assert!(faults.contains(&fault), "{fault} is not among {faults:?}");
    }
    let reference = Reference::Digest(Digest::of(b"one"));
    let file = f.state.item_files(a, ItemKind::Component, &reference).unwrap().remove(0);
    assert!(matches!(f.state.open_file(&file).unwrap_err(), StateError::Damaged(_)));
}

/// Whatever stands under a content's name, nobody is given anything else for it; and it is put right by the content itself.
#[test]
fn a_damaged_blob_is_nobodys_content_and_heals() {
    let f = fixture();
    let a = f.tenant("a");
    for (content, damaged) in [(&b"one"[..], &b"o"[..]), (b"two", b"TWO"), (b"three", b"three and more")] {
        f.item(Owner::Tenant(a), ItemKind::Component, None, content).unwrap();
        let digest = Digest::of(content);
        let file = f.state.item_files(a, ItemKind::Component, &Reference::Digest(digest)).unwrap().remove(0);
        assert_eq!(f.state.read_file(&file).unwrap(), content);
        std::fs::write(f.blob_path(content), damaged).unwrap();
        let error = f.state.read_file(&file).unwrap_err();
        assert!(matches!(&error, StateError::Damaged(why) if why.contains(&digest.to_string())) && !error.is_refusal(), "{error}");
        drop(f.blob(content));
        assert_eq!(f.state.read_file(&file).unwrap(), content);
    }
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
}
