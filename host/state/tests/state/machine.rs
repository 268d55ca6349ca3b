//! The life of jobs against a model of it: whatever is done in whatever order, state and model agree, and what the model refuses is refused.

use nodus_state::{Cancelled, Claim, Depth, JobId, JobState, Outcome, StateError, Stop, TenantId};
use proptest::prelude::*;

use crate::support::{Fixture, ending, fixture, sweep};

#[derive(Clone, Copy, Debug)]
enum Act {
    Submit,
    Claim(usize),
    Reclaim(usize),
    Requeue(usize),
    /// With a claim that was taken away.
    Stale(usize),
    Finish(usize, Outcome),
    Cancel(usize, Stop),
    Delete(usize),
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    let job = 0_usize..4;
    prop_oneof![
        2 => Just(Act::Submit),
        4 => job.clone().prop_map(Act::Claim),
        1 => job.clone().prop_map(Act::Reclaim),
        2 => job.clone().prop_map(Act::Requeue),
        1 => job.clone().prop_map(Act::Stale),
        3 => (job.clone(), proptest::sample::select(Outcome::ALL)).prop_map(|(job, outcome)| Act::Finish(job, outcome)),
        2 => (job.clone(), proptest::sample::select(Stop::ALL)).prop_map(|(job, stop)| Act::Cancel(job, stop)),
        1 => job.prop_map(Act::Delete),
        1 => Just(Act::Restart),
    ]
}

/// What the model knows of a job.
#[derive(Clone, Copy, Debug)]
struct Known {
    id: JobId,
    state: JobState,
    attempts: u64,
    stop: Option<Stop>,
}

impl Known {
    fn claim(&self) -> Claim {
        Claim { job: self.id, attempt: self.attempts }
    }

    /// One act; whether the state must do as well.
    fn act(&mut self, act: Act) -> bool {
        match (act, self.state) {
            (Act::Claim(_), JobState::Queued) | (Act::Reclaim(_), JobState::Running) => {
                (self.state, self.attempts) = (JobState::Running, self.attempts + 1);
            }
            (Act::Requeue(_), JobState::Running) => {
                self.state = if self.stop == Some(Stop::Cancel) { JobState::Running } else { JobState::Queued };
            }
            (Act::Finish(_, outcome), JobState::Running) => self.state = outcome.into(),
            (Act::Cancel(_, stop), JobState::Queued) if self.attempts == 0 || stop == Stop::Cancel => self.state = JobState::Cancelled,
            (Act::Cancel(_, stop), JobState::Queued | JobState::Running) => self.stop = self.stop.max(Some(stop)),
            (Act::Delete(_), state) => return state.is_ended(),
            _ => return false,
        }
        true
    }
}

fn act_on(f: &Fixture, of: TenantId, known: &Known, act: Act) -> Result<(), StateError> {
    match act {
        Act::Claim(_) => f.state.claim(&[known.id], "cpu").map(|claims| assert_eq!(claims[0].attempt, known.attempts + 1)),
        Act::Reclaim(_) => f.state.reclaim(known.id, "cpu").map(|claim| assert_eq!(claim.attempt, known.attempts + 1)),
        Act::Requeue(_) => {
            f.state.requeue(&known.claim(), "the engine died").map(|waits| assert_eq!(waits, known.stop != Some(Stop::Cancel)))
        }
        Act::Stale(_) => f.state.finish(&Claim { attempt: known.attempts.wrapping_sub(1), ..known.claim() }, &ending(Outcome::Failed)),
        Act::Finish(_, outcome) => f.state.finish(&known.claim(), &ending(outcome)),
        Act::Cancel(_, stop) => f.state.cancel(of, known.id, stop).map(|how| {
            let at_once = known.state == JobState::Queued && (known.attempts == 0 || stop == Stop::Cancel);
            assert_eq!(how, if at_once { Cancelled::AtOnce } else { Cancelled::Asked });
        }),
        Act::Delete(_) => f.state.delete_job(of, known.id),
        Act::Submit | Act::Restart => Ok(()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn state_and_model_agree(acts in proptest::collection::vec(act(), 1..60)) {
        let mut f = fixture();
        let a = f.tenant("a");
        let (mut jobs, mut device_ms) = (Vec::<Known>::new(), 0);
        for act in acts {
            match act {
                Act::Submit => jobs.push(Known { id: f.job(a), state: JobState::Queued, attempts: 0, stop: None }),
                Act::Restart => {
                    let Fixture { folder, state } = f;
                    drop(state);
                    let state = crate::support::open(&folder, nodus_state::Access::Whole).unwrap();
                    f = Fixture { folder, state };
                }
                Act::Claim(n) | Act::Reclaim(n) | Act::Requeue(n) | Act::Stale(n) | Act::Finish(n, _) | Act::Cancel(n, _) | Act::Delete(n) => {
                    let Some(known) = jobs.get_mut(n) else { continue };
                    let mut after = *known;
                    let is_allowed = after.act(act);
                    let done = act_on(&f, a, known, act);
                    prop_assert_eq!(done.is_ok(), is_allowed, "{:?} of {:?}: {:?}", act, known, done.err());
                    if matches!((act, done), (Act::Finish(..), Ok(()))) {
                        device_ms += 3;
                    }
                    *known = after;
                    if matches!(act, Act::Delete(_)) && is_allowed {
                        jobs.remove(n);
                    }
                }
            }
            for known in &jobs {
                let job = f.state.job(a, known.id).unwrap();
                prop_assert_eq!((job.state, job.attempts, job.stop), (known.state, known.attempts, known.stop));
                prop_assert_eq!((job.has_receipt, job.ended_ms.is_some()), (matches!(known.state, JobState::Succeeded | JobState::Stopped), known.state.is_ended()));
            }
            let of = |state| jobs.iter().filter(|known| known.state == state).map(|known| known.id).collect::<Vec<_>>();
            prop_assert_eq!(f.state.queued().unwrap().iter().map(|queued| queued.job).collect::<Vec<_>>(), of(JobState::Queued));
            prop_assert_eq!(f.state.running().unwrap().iter().map(|running| running.job).collect::<Vec<_>>(), of(JobState::Running));
            prop_assert_eq!(f.state.usage(a).unwrap().device_ms, device_ms);
        }
        prop_assert_eq!(f.state.fsck(Depth::Contents).unwrap(), []);
    }
}

#[test]
fn a_sweep_is_claimed_whole_or_not_at_all() {
    let f = fixture();
    let a = f.tenant("a");
    let spec = f.spec(a);
    let jobs = f.state.submit(a, None, &sweep(&[spec.clone(), spec])).unwrap().jobs;
    f.state.cancel(a, jobs[1], Stop::Cancel).unwrap();
    assert!(matches!(f.state.claim(&jobs, "cpu").unwrap_err(), StateError::WrongState { found: JobState::Cancelled, .. }));
    assert_eq!(f.state.job(a, jobs[0]).unwrap().state, JobState::Queued);
}

#[test]
fn a_job_that_ended_well_has_a_receipt_and_no_other_has_one() {
    let f = fixture();
    let a = f.tenant("a");
    let job = f.job(a);
    let claim = f.state.claim(&[job], "cpu").unwrap()[0];
    for outcome in Outcome::ALL {
        let mut wrong = ending(*outcome);
        wrong.receipt = if outcome.has_receipt() { None } else { Some(b"receipt") };
        assert!(f.state.finish(&claim, &wrong).is_err(), "{outcome}");
        assert_eq!(f.state.job(a, job).unwrap().state, JobState::Running);
    }
    f.state.finish(&claim, &ending(Outcome::Succeeded)).unwrap();
    assert_eq!(f.state.receipt(a, job).unwrap(), b"receipt");
}
