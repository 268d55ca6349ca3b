//! A job on its way: its guest in a process of its tenant, its calls by its journal, and what is wished of it meanwhile.
//!
//! Never passes a wish on before the job is where it was when it was run before.

use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, describe_counter};
use nodus_sandbox::services::Trunk;
use nodus_sandbox::{Failure, JobEnd, Outcome, StopFlag, Usage};
use nodus_state::{Claim, Work};
use tokio::sync::watch;

use super::Shared;
use super::board::{Run, Wish};
use super::engines::Engine;
use super::stint::Stint;
use super::transcript::Transcript;
use crate::engine::Process;
use crate::guest::{Need, Order};
use crate::journal::{Scribe, Tally};
use crate::run::course::{Course, Ended};
use crate::run::crew::Post;
use crate::run::inputs::Job;

/// Calls of jobs that were run again: answered from their journals, and computed again.
const CALLS: &str = "nodus_journal_calls_total";
/// A job that was at work in an engine that died is suspected for as long as so many snapshots are apart, beyond where it was.
const TRIAL_SNAPSHOTS: u32 = 2;
/// How often it is looked whether a job has asked something new.
const LOOK: Duration = Duration::from_millis(100);
/// How long a job that makes room may take to be kept as it is.
const CHECKPOINT: Duration = Duration::from_secs(60);

/// Says what is counted here.
pub(super) fn describe() {
    describe_counter!(CALLS, "Calls of jobs that were run again: answered from the journal, or repeated");
}

/// An attempt under way.
pub(super) struct At<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) claim: Claim,
    pub(super) run: &'a Run,
    pub(super) engine: &'a Engine,
    pub(super) process: &'a Arc<Process>,
    pub(super) scribe: &'a Scribe,
}

impl At<'_> {
    /// Runs the job to its end, or until it is cut off.
    ///
    /// # Errors
    /// Ours; see [`Course::run`].
    pub(super) async fn follow(
        &self,
        (post, trunk): (&Post, Trunk),
        work: &Work,
        transcript: Transcript,
        caught_up: watch::Receiver<bool>,
    ) -> anyhow::Result<Ended> {
        let (stop, claim, noter) = (StopFlag::default(), self.claim, self.shared.state.clone());
        let course = Course {
            slot: self.run.slot,
            job: &post.job,
            folder: &post.folder,
            trunk,
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
            () = self.pass_stop_on(&stop, caught_up.clone()), if !is_told => anyhow::bail!("a stop was passed on for ever"),
            () = self.tell_going_on(caught_up) => anyhow::bail!("that a job went on was told for ever"),
        }
    }

    /// Runs the guest in a process of its tenant.
    async fn guest(&self, work: &Work, job: &Job, order: Order) -> JobEnd {
        let need = Need::of(&job.limits, job.dataset_bytes());
        match self.engine.homes.seat(work.tenant, need).await {
            Ok(seat) => seat.home.process.run(order).await,
            Err(error) => JobEnd { outcome: Outcome::Failed(Failure::Internal(error)), usage: Usage::default(), stopped_at: None },
        }
    }

    /// Resolves when the job is to be cut off, or its engine is gone, or it cannot go on. A job that makes room is kept as it is first.
    async fn cut(&self) {
        let paused = async {
            let mut wishes = self.run.wishes();
            let is_kept = wishes.wait_for(|wish| *wish >= Wish::Pause).await.is_ok_and(|wish| *wish == Wish::Pause);
            if is_kept && tokio::time::timeout(CHECKPOINT, self.scribe.checkpoint()).await.is_err() {
                tracing::warn!(job = %self.claim.job, "a job that makes room could not be kept in time: some of its work is to be done again");
            }
        };
        tokio::select! {
            () = paused => {}
            () = self.trial_over() => {}
            _ = self.process.ended() => {}
            _ = self.scribe.failed() => {}
        }
    }

    /// A job that was suspected is not any more once it has worked for a while and done no harm; one that was tried alone for that goes back
    /// among the others. Never resolves.
    async fn trial_over(&self) {
        self.scribe.caught_up().await;
        tokio::time::sleep(TRIAL_SNAPSHOTS * self.shared.options.snapshot_every).await;
        self.shared.board().suspects.clear(self.claim.job);
        if self.run.is_tried {
            tracing::info!(job = %self.claim.job, "a suspected job did no harm alone");
            self.run.pause();
        }
        std::future::pending().await
    }

    /// Says what was done again, once nothing more is; the job is at work once it asks something new. One that is not kept, and so begins anew, is where
    /// it was once it has told again what it told. Never resolves.
    async fn tell_going_on(&self, mut caught_up: watch::Receiver<bool>) {
        self.scribe.caught_up().await;
        if caught_up.wait_for(|is_so| *is_so).await.is_err() {
            // It has ended.
            std::future::pending::<()>().await;
        }
        let Tally { answered, repeated, repeated_steps, repeated_ms, .. } = self.scribe.tally();
        self.tell_stint(Stint::arrive);
        if answered + repeated > 0 {
            let job = self.claim.job;
            counter!(CALLS, "how" => "answered").increment(answered);
            counter!(CALLS, "how" => "repeated").increment(repeated);
            tracing::info!(%job, answered, repeated, repeated_steps, repeated_ms, "a job went on where it was cut off");
        }
        while self.scribe.calls().made() <= answered + repeated {
            tokio::time::sleep(LOOK).await;
        }
        self.tell_stint(Stint::begin);
        std::future::pending().await
    }

    fn tell_stint(&self, tell: fn(&mut Stint)) {
        self.shared.board().running.get_mut(&self.claim.job).into_iter().for_each(|run| tell(&mut run.stint));
    }

    /// Asks the job to stop once its owner does; not before it has told again what it told when it was run before, since then it had not
    /// been asked, and asked again what it asked. Never resolves.
    async fn pass_stop_on(&self, stop: &StopFlag, mut caught_up: watch::Receiver<bool>) {
        let mut wishes = self.run.wishes();
        // One that makes room is not asked: it goes on later.
        if wishes.wait_for(|wish| *wish == Wish::Stop).await.is_ok() && caught_up.wait_for(|is_so| *is_so).await.is_ok() {
            self.scribe.caught_up().await;
            stop.request();
        }
        std::future::pending().await
    }
}
