//! One attempt at a job: claimed when its engine is ready, run, and settled.
//!
//! Never leaves a job claimed that nobody runs.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use nodus_sandbox::{Failure, JobEnd, Outcome, StopFlag, Usage};
use nodus_state::{Claim, JobId, Stop, Work};
use tokio::sync::watch;

use super::Shared;
use super::board::{Run, Wish};
use super::engines::{Engine, lane_name};
use super::settle::{Attempted, Ending, settle};
use super::transcript::Transcript;
use crate::engine::Process;
use crate::guest::{Need, Order};
use crate::run::Folder;
use crate::run::course::{Course, Ended};
use crate::run::crew::{Fared, Post};
use crate::run::inputs::Job;

/// Makes an attempt at a job that was placed.
pub(super) async fn attempt(shared: Arc<Shared>, job: JobId, run: Run, engine: Engine) {
    let working = shared.clone();
    let work = async move {
        // Why an engine did not start is told by who starts it; the job was not claimed yet.
        let mut wishes = run.wishes();
        let ready = tokio::select! {
            ready = engine.ready() => ready,
            _ = wishes.wait_for(|wish| *wish >= Wish::Pause) => return Ok(()),
        };
        let Ok(process) = ready else { return Ok(()) };
        let (claimer, place) = (working.clone(), format!("{}, {}", process.device(), lane_name(engine.numbers.lane)));
        let claimed = tokio::task::spawn_blocking(move || claimer.state.claim(&[job], &place)).await.context("claiming a job")?;
        // Its owner may have cancelled it, or the operator disabled its owner.
        let Some(claim) = claimed.ok().and_then(|claims| claims.first().copied()) else { return Ok(()) };
        let attempted = begin(&working, claim, &run, &engine, &process).await;
        settle(&working, claim, attempted).await
    };
    match tokio::spawn(work).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(%job, "a job could not be settled: {error:#}"),
        Err(_) => tracing::error!(%job, "a task of the host panicked while it ran the job"),
    }
    shared.board().leave(job);
    shared.wake.notify_one();
}

/// Opens the job and runs it.
async fn begin(shared: &Arc<Shared>, claim: Claim, run: &Run, engine: &Engine, process: &Arc<Process>) -> anyhow::Result<Attempted> {
    let opener = shared.clone();
    let open = move || {
        let work = opener.state.work(claim.job).context("reading the job")?;
        let cohort = opener.board().cohort(work.cohort);
        let job = opener.cellar.job(&work, cohort)?;
        let (transcript, caught_up) = Transcript::new(opener.state.clone(), claim)?;
        anyhow::Ok((work, Arc::new(job), transcript, caught_up))
    };
    let (work, job, transcript, caught_up) = tokio::task::spawn_blocking(open).await.context("opening a job")??;
    if let Some(stop) = work.stop {
        run.wish(if stop == Stop::Cancel { Wish::Cancel } else { Wish::Stop });
    }
    let workspace = shared.store.workspace()?;
    let copy = workspace.dir().try_clone().context("opening a job's folder")?;
    let post = Post { job: job.clone(), folder: Arc::new(Folder::new(copy, PathBuf::from("the job's folder"))) };
    let floor = At { shared, claim, run, engine, process };
    let told = caught_up.clone();
    let ended = floor.follow(&post, &work, transcript, caught_up).await;
    // The process must live to say it, so that a job that ended with its engine is not taken for one that ended well.
    let used = process.forget(run.slot).await;
    let (bytes, device_ns) = used.clone().unwrap_or_default();
    // A short job may have ended before anybody asked what it used.
    shared.board().count(run.slot, device_ns);
    let class = Arc::new(process.class().clone());
    let fared = Fared { ended: ended.map(Some), engine: Ok(()), bytes, class };
    let ending = match ending(&fared, used.is_some(), process, run) {
        Ending::Over if has_end(&fared) && !*told.borrow() => {
            Ending::Diverged("run again, the job ended before it had told all that it told before".to_owned())
        }
        ending => ending,
    };
    Ok(Attempted { work, post, fared, ending, device_ns, lane: lane_name(engine.numbers.lane), workspace })
}

/// Whether the job came to an end of its own.
fn has_end(fared: &Fared) -> bool {
    matches!(&fared.ended, Ok(Some(Ended { end: Some(_), .. })))
}

/// How the attempt ended.
fn ending(fared: &Fared, is_alive: bool, process: &Process, run: &Run) -> Ending {
    let how = || process.how_ended().unwrap_or_else(|| "was lost".to_owned());
    match &fared.ended {
        Err(error) if error.downcast_ref::<super::transcript::Diverged>().is_some() => Ending::Diverged(format!("{error:#}")),
        _ if !is_alive => Ending::HostFault(format!("an engine process {}", how())),
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

/// An attempt under way.
struct At<'a> {
    shared: &'a Arc<Shared>,
    claim: Claim,
    run: &'a Run,
    engine: &'a Engine,
    process: &'a Arc<Process>,
}

impl At<'_> {
    async fn follow(&self, post: &Post, work: &Work, transcript: Transcript, caught_up: watch::Receiver<bool>) -> anyhow::Result<Ended> {
        let (stop, claim, noter) = (StopFlag::default(), self.claim, self.shared.state.clone());
        let course = Course {
            slot: self.run.slot,
            job: &post.job,
            folder: &post.folder,
            trunk: self.process.trunk(&post.job.model),
            stop: stop.clone(),
            audience: Box::new(transcript),
            note: Box::new(move |question| Ok(noter.note_stop(&claim, question)?)),
            neighbours: &self.engine.neighbours,
        };
        let ended = course.run(|order| self.guest(work, &post.job, order), self.cut());
        // A job that was told before at which question it is to stop is told at the same one.
        let is_told = work.stop_question.is_some();
        tokio::select! {
            ended = ended => ended,
            () = self.pass_stop_on(&stop, caught_up), if !is_told => anyhow::bail!("a stop was passed on for ever"),
        }
    }

    /// Runs the guest in a process of its tenant.
    async fn guest(&self, work: &Work, job: &Job, order: Order) -> JobEnd {
        let need = Need::of(&job.limits, job.dataset_bytes());
        let client = order.services.trunk().engine.clone();
        match self.engine.homes.seat(work.tenant, client, need).await {
            Ok(seat) => seat.home.process.run(order).await,
            Err(error) => JobEnd { outcome: Outcome::Failed(Failure::Internal(error)), usage: Usage::default(), stopped_at: None },
        }
    }

    /// Resolves when the job is to be cut off, or its engine is gone.
    async fn cut(&self) {
        let mut wishes = self.run.wishes();
        let is_cut = wishes.wait_for(|wish| *wish >= Wish::Pause);
        tokio::select! {
            _ = is_cut => {}
            _ = self.process.ended() => {}
        }
    }

    /// Asks the job to stop once its owner does; not before it has told again what it told when it was run before, since then it had not
    /// been asked. Never resolves.
    async fn pass_stop_on(&self, stop: &StopFlag, mut caught_up: watch::Receiver<bool>) {
        let mut wishes = self.run.wishes();
        if wishes.wait_for(|wish| *wish >= Wish::Stop).await.is_ok() && caught_up.wait_for(|is_so| *is_so).await.is_ok() {
            stop.request();
        }
        std::future::pending().await
    }
}
