//! Does what the schedule decided: engines are started and stopped, jobs begun, owners told why they wait.
//!
//! Waits for nothing that takes long; what it begins goes on by itself.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nodus_schedule::{EngineId, NewEngine, Plan, Seat};
use nodus_state::{JobId, Outcome, StateError, Stop};

use super::Shared;
use super::attempt::attempt;
use super::board::{Board, Run, Wish};
use super::engines::{self, Stage};
use super::scene::{View, tenant_of};
use super::settle;
use super::settler::Settler;
use super::stint::Stint;
use crate::run::conclude::REFUSED;

/// How long it is remembered that a job gave way.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// Obeys a plan that was made for this view.
///
/// # Errors
/// Ours: the state refuses.
pub(super) async fn obey(shared: &Arc<Shared>, plan: &Plan, view: View) -> anyhow::Result<()> {
    for engine in &plan.stop {
        stop(shared, *engine);
    }
    pause(&mut shared.board(), plan);
    let started = start(shared, plan, &view);
    place(shared, plan, &view, &started);
    let reasons = reasons(&mut shared.board(), plan, &view);
    let (waits, aside) = (plan.wait.iter().map(|wait| wait.reason.code()), view.aside.iter().map(|_| "aside"));
    shared.numbers.queue(waits.chain(aside));
    let teller = shared.clone();
    let tell = move || {
        let told = tell(&teller, &reasons, &view.hopeless);
        if told.is_err() {
            // They are told once that can be written.
            teller.board().said.clear();
        }
        told
    };
    tokio::task::spawn_blocking(tell).await.context("telling owners")?
}

fn stop(shared: &Arc<Shared>, id: EngineId) {
    let Some(engine) = shared.board().engines.get_mut(&id).map(|engine| {
        engine.is_stopping = true;
        engine.clone()
    }) else {
        return;
    };
    tokio::spawn(async move { engine.end().await });
}

fn pause(board: &mut Board, plan: &Plan) {
    board.gave_way.retain(|_, since| since.elapsed() < REMEMBERED);
    for (job, run) in board.running.iter().filter(|(_, run)| plan.pause.contains(&run.numbers.id)) {
        run.pause();
        board.gave_way.insert(*job, Instant::now());
    }
}

/// Starts engines; their numbers, in the order of the plan.
fn start(shared: &Arc<Shared>, plan: &Plan, view: &View) -> Vec<Option<EngineId>> {
    let first = |seat: usize| {
        let first = plan.place.iter().find(|placed| placed.seat == Seat::New(seat))?;
        view.waiting.get(&first.job).map(|waiting| (waiting.model.clone(), waiting.numbers))
    };
    let begin = |(seat, numbers): (usize, &NewEngine)| {
        let (model, job) = first(seat)?;
        Some(engines::start(shared, (*numbers, job), model))
    };
    (0..).zip(&plan.start).map(begin).collect()
}

/// Begins jobs, each in its engine.
fn place(shared: &Arc<Shared>, plan: &Plan, view: &View, started: &[Option<EngineId>]) {
    for placed in &plan.place {
        let engine = match placed.seat {
            Seat::Engine(id) => Some(id),
            Seat::New(place) => started.get(place).copied().flatten(),
        };
        let (Some(id), Some(waiting)) = (engine, view.waiting.get(&placed.job)) else { continue };
        let mut board = shared.board();
        let slot = board.next_slot();
        // An engine that died meanwhile takes nobody; the next decision finds another place.
        let Some(engine) = board.engines.get_mut(&id) else { continue };
        engine.idle_since = None;
        let engine = engine.clone();
        // Who gave way once works for a while before it does so again: else a stream of urgent jobs would leave it none.
        let gave_way = board.gave_way.remove(&waiting.job);
        let stint = Stint::new(placed.is_turn.then(|| board.waits.end(tenant_of(waiting.tenant))), gave_way);
        let run = Run::new((waiting.tenant, waiting.cohort), (waiting.numbers, waiting.is_tried), (id, slot), stint);
        board.running.insert(waiting.job, run.clone());
        board.aging.remove(&waiting.job);
        drop(board);
        tokio::spawn(attempt(shared.clone(), waiting.job, run, engine));
    }
}

/// What owners are to be told that they were not told yet. What the next scene is to know of this plan is noted on the way.
fn reasons(board: &mut Board, plan: &Plan, view: &View) -> Vec<(JobId, String)> {
    let mut reasons: BTreeMap<JobId, String> = view.aside.iter().cloned().collect();
    let mut aging = BTreeMap::new();
    for wait in &plan.wait {
        let Some(waiting) = view.waiting.get(&wait.job) else { continue };
        if wait.ages {
            aging.insert(waiting.job, board.aging.get(&waiting.job).copied().unwrap_or_else(Instant::now));
        }
        reasons.insert(waiting.job, wait.reason.to_string());
    }
    board.aging = aging;
    board.waits.heed(&plan.clocks);
    board.keep(&plan.keep, |job| view.waiting.get(&job).map(|waiting| waiting.tenant));
    for (job, run) in &board.running {
        let is_starting = board.engines.get(&run.engine).is_some_and(|engine| matches!(*engine.stage.borrow(), Stage::Starting));
        if is_starting {
            reasons.insert(*job, "its engine is being started".to_owned());
        }
    }
    let news = reasons.iter().filter(|(job, reason)| board.said.get(*job) != Some(*reason));
    let news = news.map(|(job, reason)| (*job, reason.clone())).collect();
    board.said = reasons;
    news
}

/// Writes to the state what follows from it. Blocks.
fn tell(shared: &Arc<Shared>, reasons: &[(JobId, String)], hopeless: &[(JobId, String)]) -> anyhow::Result<()> {
    // First: whatever else the state refuses, an owner's word is passed on.
    let asked = std::mem::take(&mut shared.board().to_stop);
    let unheard = heed(
        asked,
        |job| shared.state.stop_of(job),
        |job, wish| shared.board().running.get(&job).into_iter().for_each(|run| run.wish(wish)),
    );
    shared.board().to_stop.extend(unheard);
    for (job, why) in hopeless {
        // Its owner may have been quicker and cancelled it.
        let Ok(claims) = shared.state.claim(&[*job], "nowhere") else { continue };
        for claim in claims {
            let (settler, why) = (Settler::new(shared.clone(), claim), why.clone());
            // Not waited for: the disk may take no writes for long.
            tokio::task::spawn_blocking(move || {
                if let Err(error) = settle::end(&settler, (Outcome::Failed, &why, REFUSED), 0) {
                    tracing::error!(job = %settler.claim.job, "a job that cannot run could not be ended: {error:#}");
                }
            });
        }
    }
    shared.state.say_why(reasons).context("saying why jobs wait")
}

/// Passes on what owners ask of their jobs; those of which the state does not say it now, to be asked again.
fn heed(jobs: Vec<JobId>, ask: impl Fn(JobId) -> Result<Option<Stop>, StateError>, tell: impl Fn(JobId, Wish)) -> Vec<JobId> {
    let is_unheard = |job: &JobId| match ask(*job) {
        Ok(stop) => {
            let wish = stop.map(|stop| if stop == Stop::Cancel { Wish::Cancel } else { Wish::Stop });
            wish.into_iter().for_each(|wish| tell(*job, wish));
            false
        }
        // Deleted meanwhile.
        Err(StateError::NotFound(_)) => false,
        Err(error) => {
            tracing::warn!(%job, "what a job's owner asks cannot be read, and is asked for again: {error}");
            true
        }
    };
    jobs.into_iter().filter(is_unheard).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use nodus_state::{JobId, StateError, Stop};

    use super::{Wish, heed};

    #[test]
    fn what_an_owner_asks_is_passed_on_though_the_state_refuses_for_a_while() {
        let jobs: Vec<JobId> = (1..5).map(|n| format!("01890000-0000-7000-8000-00000000000{n}").parse().unwrap()).collect();
        let [first, second, third, last] = jobs[..] else { panic!("four") };
        let told = RefCell::new(Vec::new());
        let tell = |job, wish| told.borrow_mut().push((job, wish));
        let refuses = |job| match job {
            job if job == first => Ok(Some(Stop::Stop)),
            job if job == second => Err(StateError::Full),
            job if job == third => Err(StateError::NotFound("job")),
            _ => Ok(None),
        };
        let left = heed(vec![first, second, third, last], refuses, tell);
        assert_eq!((left.as_slice(), told.borrow().as_slice()), (&[second][..], &[(first, Wish::Stop)][..]));
        assert!(heed(left, |_| Ok(Some(Stop::Cancel)), tell).is_empty());
        assert_eq!(told.borrow().last(), Some(&(second, Wish::Cancel)));
    }
}
