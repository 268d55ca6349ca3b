//! Jobs go: their owners see nothing of them at once, and what is left of them goes in pieces.

use nodus_protocol::Digest;
use nodus_state::{Depth, Filter, Key, Outcome, StateError, Stop, Stream};

use crate::support::{ending, event, fixture, sweep};

#[test]
fn a_job_of_many_events_is_gone_at_once_and_goes_in_pieces_that_a_kill_does_not_stop() {
    let f = fixture();
    let a = f.tenant("a");
    let named = |name: &str| nodus_state::JobSpec { name: name.into(), ..f.spec(a) };
    let key = Key { key: "k".into(), request: Digest::of(b"1") };
    let submitted = f.state.submit(a, Some(&key), &sweep(&[named("first"), named("last")])).unwrap();
    let (first, last) = (submitted.jobs[0], submitted.jobs[1]);
    let claims = f.state.claim(&submitted.jobs, "cpu").unwrap();
    f.state.append(&claims[0], &[event(1)]).unwrap();
    // The cohort's last events are of the job that goes.
    f.state.finish(&claims[0], &ending(Outcome::Succeeded)).unwrap();
    f.state.append(&claims[1], &(1..=5000).map(event).collect::<Vec<_>>()).unwrap();
    f.state.finish(&claims[1], &ending(Outcome::Succeeded)).unwrap();
    let before = f.state.usage(a).unwrap().stored_bytes;
    f.state.delete_job(a, last).unwrap();
    let is_gone = |f: &crate::support::Fixture| {
        assert!(matches!(f.state.job(a, last).unwrap_err(), StateError::NotFound("job")));
        assert!(matches!(f.state.delete_job(a, last).unwrap_err(), StateError::NotFound("job")));
        assert!(matches!(f.state.events(a, Stream::Job(last), 0, &[], 9).unwrap_err(), StateError::NotFound("job")));
        assert!(matches!(f.state.receipt(a, last).unwrap_err(), StateError::NotFound("job")));
        let listed: Vec<_> = f.state.jobs(a, &Filter::default(), 9).unwrap().jobs.iter().map(|job| job.id).collect();
        let members: Vec<_> = f.state.members(a, submitted.cohort, None, 9).unwrap().jobs.iter().map(|job| job.id).collect();
        assert_eq!((listed.as_slice(), members.as_slice()), (&[first][..], &[first][..]));
        let told = f.state.events(a, Stream::Cohort(submitted.cohort), 0, &[], 9).unwrap();
        assert!(told.len() == 4 && told.iter().all(|event| event.job == first), "{told:?}");
        assert_eq!(f.state.submitted(a, &key).unwrap().unwrap().names, ["first"]);
        let mut ended = Vec::new();
        f.state.ended(|job| ended.push(job.job)).unwrap();
        assert_eq!(ended, [first]);
        assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
    };
    is_gone(&f);
    assert!(f.state.usage(a).unwrap().stored_bytes < before);
    assert!(f.state.delete_piece().unwrap(), "5,000 events are more than one piece");
    is_gone(&f);
    let f = f.reopened();
    is_gone(&f);
    let mut pieces = 0;
    while f.state.delete_piece().unwrap() {
        pieces += 1;
    }
    assert!((1..9).contains(&pieces), "{pieces}");
    is_gone(&f);
    f.state.delete_job(a, first).unwrap();
    assert!(!f.state.delete_piece().unwrap(), "few events go with their job");
    assert!(matches!(f.state.members(a, submitted.cohort, None, 9).unwrap_err(), StateError::NotFound("cohort")));
    assert_eq!(f.state.submitted(a, &key).unwrap(), None);
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
}

/// With its last member a sweep is gone, though events are left of it.
#[test]
fn a_key_may_come_again_while_what_it_named_before_goes() {
    let f = fixture();
    let a = f.tenant("a");
    let key = Key { key: "k".into(), request: Digest::of(b"1") };
    let before = f.state.submit(a, Some(&key), &f.spec(a).into()).unwrap();
    let claim = f.state.claim(&before.jobs, "cpu").unwrap()[0];
    f.state.append(&claim, &(1..=5000).map(event).collect::<Vec<_>>()).unwrap();
    f.state.finish(&claim, &ending(Outcome::Succeeded)).unwrap();
    f.state.delete_job(a, before.jobs[0]).unwrap();
    assert!(matches!(f.state.has_ended(a, Stream::Cohort(before.cohort)).unwrap_err(), StateError::NotFound("cohort")));
    assert_eq!(f.state.usage(a).unwrap().stored_bytes, ("component".len() + "rows".len()) as u64);
    let again = f.state.submit(a, Some(&key), &f.spec(a).into()).unwrap();
    assert!(again.is_new && again.jobs != before.jobs);
    while f.state.delete_piece().unwrap() {}
    f.state.cancel(a, again.jobs[0], Stop::Cancel).unwrap();
    assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
}
