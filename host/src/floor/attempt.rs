//! One attempt at a job: claimed when its engine is ready, run, and settled.
//!
//! Never leaves a job claimed that nobody runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use nodus_sandbox::{Failure, Outcome};
use nodus_state::{Claim, JobId, StateError, Stop};
use tracing::Instrument as _;

use super::Shared;
use super::board::{Backoff, Run, Wish};
use super::engines::{Engine, lane_name};
use super::follow::At;
use super::rooms;
use super::settle::{Attempted, Ending, settle};
use super::settler::{NO_WRITES, Settler};
use super::transcript::Transcript;
use crate::engine::Process;
use crate::error::{is_disk, over_quota};
use crate::journal::{Fault, Scribe, Terms, identity};
use crate::run::Folder;
use crate::run::course::Ended;
use crate::run::crew::{Fared, Post};
use crate::telemetry::SPANS;

/// How long after a job lost its engine the engine's process may take to end, before it is ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Makes an attempt at a job that was placed.
pub(super) async fn attempt(shared: Arc<Shared>, job: JobId, run: Run, engine: Engine) {
    let (working, device) = (shared.clone(), engine.numbers.device);
    let work = async move {
        // Why an engine did not start is told by who starts it; the job was not claimed yet.
        let mut wishes = run.wishes();
        let ready = tokio::select! {
            ready = engine.ready() => ready,
            _ = wishes.wait_for(|wish| *wish >= Wish::Pause) => return Ok(()),
        };
        let Ok(process) = ready else { return Ok(()) };
        // Its device is of another class than the job began on: it was placed before that was known, and waits for one that is.
        let class = identity(process.class())?;
        if working.board().began.get(&job).is_some_and(|began| *began != class) {
            return Ok(());
        }
        // Its own engine may have more from now on, and others less.
        rooms::settle(&working, engine.numbers.device).await;
        let (claimer, place) = (working.clone(), format!("{}, {}", process.device(), lane_name(engine.numbers.lane)));
        let claimed = tokio::task::spawn_blocking(move || claimer.state.claim(&[job], &place)).await.context("claiming a job")?;
        let claim = match claimed.as_deref() {
            Ok([claim, ..]) => *claim,
            Err(error) if !error.is_refusal() => {
                not_claimed(&working, job, error);
                return Ok(());
            }
            // Its owner may have cancelled it, or the operator disabled its owner.
            _ => return Ok(()),
        };
        working.state.excuse(job, None);
        let span = tracing::info_span!(
            target: SPANS, "attempt", %job, attempt = claim.attempt, lane = lane_name(engine.numbers.lane), device = process.device()
        );
        let made = async {
            let attempted = begin(&working, claim, &run, &engine, &process).await;
            settle(Settler::new(working, claim), attempted).await
        };
        made.instrument(span).await
    };
    match tokio::spawn(work).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(%job, "a job could not be settled: {error:#}"),
        Err(_) => tracing::error!(%job, "a task of the host panicked while it ran the job"),
    }
    shared.board().leave(job);
    shared.wake.notify_one();
    rooms::settle(&shared, device).await;
}

/// The state does not take that a job begins: it is tried again later.
fn not_claimed(shared: &Shared, job: JobId, error: &StateError) {
    tracing::warn!(%job, "a job cannot begin, and is tried again: {error}");
    shared.state.excuse(job, Some(NO_WRITES));
    let mut board = shared.board();
    let backoff = Backoff::refused(board.jobs_later.get(&job), shared.options.backoff, NO_WRITES.to_owned());
    board.jobs_later.insert(job, backoff);
}

/// Opens the job and runs it.
async fn begin(shared: &Arc<Shared>, claim: Claim, run: &Run, engine: &Engine, process: &Arc<Process>) -> anyhow::Result<Attempted> {
    let (opener, class) = (shared.clone(), identity(process.class())?);
    let open = move || {
        let work = opener.state.work(claim.job).context("reading the job")?;
        let cohort = opener.board().cohort(work.cohort);
        let job = opener.cellar.job(&work, cohort)?;
        let (transcript, caught_up) = Transcript::new(opener.state.clone(), claim)?;
        let book = opener.shelf.book(&claim.job.to_string(), work.tenant.number(), class)?;
        if book.is_new && !*caught_up.borrow() {
            let job = claim.job;
            tracing::warn!(%job, "what was kept of a job is gone: it begins anew, and what it told before is held against what it tells now");
        }
        anyhow::Ok((work, Arc::new(job), transcript, caught_up, book))
    };
    let (work, job, transcript, caught_up, book) = tokio::task::spawn_blocking(open).await.context("opening a job")??;
    if let Some(stop) = work.stop {
        run.wish(if stop == Stop::Cancel { Wish::Cancel } else { Wish::Stop });
    }
    let workspace = shared.store.workspace()?;
    let copy = workspace.dir().try_clone().context("opening a job's folder")?;
    let post = Post { job: job.clone(), folder: Arc::new(Folder::new(copy, PathBuf::from("the job's folder"))) };
    let mut trunk = process.trunk(&job.model);
    let every = shared.options.snapshot_every;
    let terms = Terms { engine: trunk.engine.clone(), job: run.slot, trunk: trunk.slot, cohort: Some(job.cohort), every };
    let scribe = Scribe::start(terms, book);
    trunk.engine = scribe.client();
    let floor = At { shared, claim, run, engine, process, scribe: &scribe };
    let told = caught_up.clone();
    let ended = floor.follow((&post, trunk), &work, transcript, caught_up).await;
    let is_whole = *told.borrow() && scribe.is_caught_up();
    let fault = scribe.fault();
    // What was written for it is on the disk before the next attempt reads it.
    let last = scribe.end().await;
    if let Some(Fault::Lost(how)) = &fault {
        give_up(process, how).await;
    }
    // The process must live to say it, so that a job that ended with its engine is not taken for one that ended well.
    let used = process.forget(run.slot).await;
    let (bytes, device_ns) = used.clone().unwrap_or_default();
    // A short job may have ended before anybody asked what it used.
    shared.board().count(run.slot, device_ns);
    let class = Arc::new(process.class().clone());
    let fared = Fared { ended: ended.map(Some), engine: Ok(()), bytes, class };
    let ending = match (fault, ending(&fared, (used.is_some(), last.was_at_work), process, run)) {
        (Some(Fault::Diverged(how)), _) => Ending::Diverged(how),
        (Some(Fault::Host(how)), _) => Ending::HostFault(how),
        (_, Ending::Over) if has_end(&fared) && !is_whole && !is_out_of_time(&fared) => {
            Ending::Diverged("run again, the job ended before it had asked and told all that it asked and told before".to_owned())
        }
        (_, ending) => ending,
    };
    Ok(Attempted { work, post, fared, ending, is_further: last.is_further, device_ns, lane: lane_name(engine.numbers.lane), workspace })
}

/// Ends an engine process that cannot work any more, where it does not end by itself.
async fn give_up(process: &Process, how: &str) {
    if tokio::time::timeout(LAST_WORDS, process.ended()).await.is_err() {
        process.condemn(format!("lost its device and was ended: {how}")).await;
    }
}

/// Whether the job came to an end of its own.
fn has_end(fared: &Fared) -> bool {
    matches!(&fared.ended, Ok(Some(Ended { end: Some(_), .. })))
}

/// Whether the job has used up its time, which may be anywhere: how far it gets in that is no matter of what it computes.
fn is_out_of_time(fared: &Fared) -> bool {
    let Ok(Some(Ended { end: Some(end), .. })) = &fared.ended else { return false };
    matches!(end.outcome, Outcome::Failed(Failure::CpuTime { .. } | Failure::WallTime { .. }))
}

/// How the attempt ended.
fn ending(fared: &Fared, (is_alive, was_at_work): (bool, bool), process: &Process, run: &Run) -> Ending {
    let how = || process.how_ended().unwrap_or_else(|| "was lost".to_owned());
    match &fared.ended {
        Err(error) if error.downcast_ref::<super::transcript::Diverged>().is_some() => Ending::Diverged(format!("{error:#}")),
        _ if !is_alive => Ending::EngineProcess { how: how(), was_at_work },
        Err(error) if is_disk(error) => Ending::Refused(format!("{error:#}")),
        Err(error) if let Some(why) = over_quota(error) => Ending::OverQuota(why),
        Err(error) => Ending::HostFault(format!("{error:#}")),
        Ok(None) => Ending::HostFault("it was not started".to_owned()),
        Ok(Some(Ended { end: None, .. })) if *run.wishes().borrow() == Wish::Cancel => Ending::Over,
        Ok(Some(Ended { end: None, .. })) => Ending::Paused,
        Ok(Some(Ended { end: Some(end), .. })) => match &end.outcome {
            Outcome::Failed(Failure::Process { how }) => Ending::GuestProcess(how.clone()),
            Outcome::Failed(Failure::Internal(error)) => Ending::HostFault(format!("{error:#}")),
            _ => Ending::Over,
        },
    }
}
