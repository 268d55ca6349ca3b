//! Events: told once however often a job is replayed, read from where a reader stopped, and heard of.

use std::sync::mpsc::channel;

use nodus_state::{EventKind, Kinds, Outcome, StateError, Stop, Stream, What};
use proptest::prelude::*;

use crate::support::{ending, event, fixture, sweep};

#[test]
fn a_replayed_job_writes_nothing_twice() {
    let f = fixture();
    let a = f.tenant("a");
    let job = f.job(a);
    let first = f.state.claim(&[job], "cpu").unwrap()[0];
    assert_eq!(f.state.append(&first, &[event(1), event(2), event(3)]).unwrap(), 3);
    let second = f.state.reclaim(job, "cpu").unwrap();
    assert!(matches!(f.state.append(&first, &[event(4)]).unwrap_err(), StateError::StaleClaim));
    assert_eq!(f.state.append(&second, &[event(2), event(3), event(4)]).unwrap(), 1);
    assert!(!f.state.has_ended(a, Stream::Job(job)).unwrap());
    f.state.finish(&second, &ending(Outcome::Succeeded)).unwrap();
    let cohort = f.state.job(a, job).unwrap().cohort;
    assert!([Stream::Job(job), Stream::Cohort(cohort)].iter().all(|stream| f.state.has_ended(a, *stream).unwrap()));
    assert!(matches!(f.state.append(&second, &[event(5)]).unwrap_err(), StateError::StaleClaim));
    let told = f.state.events(a, Stream::Job(job), 0, &[EventKind::Step], 99).unwrap();
    assert_eq!(
        told.iter().map(|event| event.body.as_str()).collect::<Vec<_>>(),
        (1..=4).map(|n| format!("{{\"step\":{n}}}")).collect::<Vec<_>>()
    );
    let states = f.state.events(a, Stream::Job(job), 0, &[EventKind::State], 99).unwrap();
    let states: Vec<_> = states.iter().map(|event| event.body.as_str()).collect();
    assert_eq!(
        states,
        [
            r#"{"state":"queued","member":0}"#,
            r#"{"state":"running","attempt":1,"placed":"cpu"}"#,
            r#"{"state":"running","attempt":2,"placed":"cpu"}"#,
            r#"{"state":"succeeded"}"#
        ]
    );
    assert!(f.state.fsck(nodus_state::Depth::Contents).unwrap().is_empty());
}

#[test]
fn every_change_is_told_after_it_is_there() {
    let f = fixture();
    let a = f.tenant("a");
    let (told, tells) = channel();
    f.state.listen(move |change| told.send((change.job, change.what)).unwrap());
    let job = f.job(a);
    let claim = f.state.claim(&[job], "cpu").unwrap()[0];
    f.state.append(&claim, &[event(1)]).unwrap();
    f.state.append(&claim, &[event(1)]).unwrap();
    f.state.cancel(a, job, Stop::Stop).unwrap();
    f.state.cancel(a, job, Stop::Stop).unwrap();
    f.state.finish(&claim, &ending(Outcome::Stopped)).unwrap();
    f.state.delete_job(a, job).unwrap();
    let job = Some(job);
    let expected = [
        (None, What::Submitted),
        (job, What::State),
        (job, What::Events(Kinds::from_iter([EventKind::Step]))),
        (job, What::Stop),
        (job, What::State),
        (job, What::Deleted),
    ];
    assert_eq!(tells.try_iter().collect::<Vec<_>>(), expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// However a stream is read in pieces, and whatever is told twice, it is the same events in the same order.
    #[test]
    fn a_stream_read_in_pieces_is_whole(batches in proptest::collection::vec((0_usize..2, 1_u64..30, 1_u64..6), 1..20), piece in 1_usize..7) {
        let f = fixture();
        let a = f.tenant("a");
        let spec = f.spec(a);
        let submitted = f.state.submit(a, None, &sweep(&[spec.clone(), spec])).unwrap();
        let claims = f.state.claim(&submitted.jobs, "cpu").unwrap();
        let mut expected = Vec::new();
        for (member, first, count) in batches {
            let events: Vec<_> = (first..first + count).map(event).collect();
            f.state.append(&claims[member], &events).unwrap();
            for event in events {
                let told = (submitted.jobs[member], event.body);
                if !expected.contains(&told) {
                    expected.push(told);
                }
            }
        }
        for stream in [Stream::Cohort(submitted.cohort), Stream::Job(submitted.jobs[0])] {
            let (mut after, mut read) = (0, Vec::new());
            loop {
                let page = f.state.events(a, stream, after, &[EventKind::Step, EventKind::Log], piece).unwrap();
                let Some(last) = page.last() else { break };
                after = last.position;
                read.extend(page.into_iter().map(|event| (event.job, event.body)));
            }
            let only = |told: &&(_, String)| matches!(stream, Stream::Cohort(_)) || told.0 == submitted.jobs[0];
            prop_assert_eq!(read, expected.iter().filter(only).cloned().collect::<Vec<_>>());
        }
    }
}

#[test]
fn nothing_comes_after_the_last_position_that_there_can_be() {
    let f = fixture();
    let a = f.tenant("a");
    let job = f.finished(a);
    for after in [99, i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
        for kinds in [&[][..], EventKind::ALL] {
            assert_eq!(f.state.events(a, Stream::Job(job), after, kinds, 9).unwrap(), []);
        }
    }
}
