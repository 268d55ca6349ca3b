//! The course of one job: its memory reserved, its guest run, what it tells written down, its memory given back.
//!
//! Knows neither where the guest runs nor who listens: a run of the command line and the service share it.

use std::future::Future;

use anyhow::Context as _;
use nodus_protocol::{Client, Command, JobSlot};
use nodus_sandbox::services::Trunk;
use nodus_sandbox::{JobEnd, StopFlag};

use super::alarm::Alarm;
use super::inputs::Job;
use super::neighbours::Neighbours;
use super::output::Folder;
use super::record::{Figures, Record};
use super::recorder::{Audience, Recorder};
use super::services::{Note, RunServices};
use crate::guest::Order;
use crate::machine;

/// A job about to run.
pub(crate) struct Course<'a> {
    /// What its engine knows it by.
    pub(crate) slot: JobSlot,
    pub(crate) job: &'a Job,
    /// Where its results go.
    pub(crate) folder: &'a Folder,
    /// Its model in the engine.
    pub(crate) trunk: Trunk,
    pub(crate) stop: StopFlag,
    pub(crate) audience: Box<dyn Audience>,
    pub(crate) note: Note,
    /// Those in the same engine.
    pub(crate) neighbours: &'a Neighbours,
}

/// How a job ended.
pub(crate) struct Ended {
    /// None where a second Ctrl-C cut it off.
    pub(crate) end: Option<JobEnd>,
    pub(crate) figures: Figures,
    pub(crate) started_unix_ms: u64,
    /// Other jobs that were there meanwhile.
    pub(crate) neighbours: u64,
}

impl Ended {
    /// The question at which it learnt that it was to stop; see [`JobSpec::stop_at`].
    pub(crate) fn stopped_at(&self) -> Option<u64> {
        self.end.as_ref().and_then(|end| end.stopped_at)
    }
}

impl Course<'_> {
    /// Runs the job to its end, or until `end` resolves.
    ///
    /// # Errors
    /// Ours: the engine refuses the memory, or the disk refuses what the job told.
    pub(crate) async fn run<F>(self, guest: impl FnOnce(Order) -> F, end: impl Future<Output = ()>) -> anyhow::Result<Ended>
    where
        F: Future<Output = JobEnd>,
    {
        let job = self.job;
        let reservation = Reservation::make(&self.trunk.engine, self.slot, job).await?;
        let ended = self.reserved(guest, end).await;
        // Before the seat is free again: the next job may need the room.
        reservation.end().await;
        ended
    }

    async fn reserved<F>(self, guest: impl FnOnce(Order) -> F, end: impl Future<Output = ()>) -> anyhow::Result<Ended>
    where
        F: Future<Output = JobEnd>,
    {
        let Self { slot, job, folder, trunk, stop, audience, note, neighbours } = self;
        let (alarm, mut alarms) = Alarm::new();
        let (listener, recorder) = Recorder::start(Record::create(folder)?, audience, alarm.clone())?;
        let output = folder.dir().try_clone().context("opening the results' folder")?;
        let order = Order {
            job: slot,
            code: job.component.code.clone(),
            params: serde_json::to_string(&job.parameters)?,
            seed: job.seed,
            limits: job.limits,
            stop_at: job.stop_at,
            cohort: Some(job.cohort),
            services: RunServices::new(job, trunk, output, (listener, note, alarm)),
            stop,
        };
        neighbours.enter(slot);
        let started_unix_ms = machine::unix_ms();
        let end = tokio::select! {
            end = guest(order) => Ok(Some(end)),
            () = end => Ok(None),
            error = alarms.raised() => Err(error),
        };
        let neighbours = neighbours.leave(slot);
        let figures = tokio::task::spawn_blocking(move || recorder.finish()).await.context("waiting for the recorder")?;
        let end = end?;
        // What was refused last, while the job came to its end.
        if let Some(error) = alarms.last() {
            return Err(error);
        }
        let figures = figures.context("the recorder's thread panicked")?;
        Ok(Ended { end, figures, started_unix_ms, neighbours })
    }
}

/// Device memory that is reserved for a job, given back however the job ends.
struct Reservation {
    engine: Client,
    job: Option<JobSlot>,
}

impl Reservation {
    async fn make(engine: &Client, slot: JobSlot, job: &Job) -> anyhow::Result<Self> {
        let (adapter_bytes, activation_bytes) = (job.limits.device_bytes, job.limits.activation_bytes);
        let reserve = Command::Reserve { job: slot, adapter_bytes, activation_bytes };
        engine.call(reserve).await.context("reserving device memory for a job that was admitted")?;
        let made = Self { engine: engine.clone(), job: Some(slot) };
        if job.is_urgent {
            engine.call(Command::Prioritise { job: slot }).await.context("giving a job its priority")?;
        }
        Ok(made)
    }

    /// Gives it back, and waits for it; an engine that is gone holds nothing.
    async fn end(mut self) {
        if let Some(job) = self.job.take() {
            drop(self.engine.call(Command::DropJob { job }).await);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(job) = self.job.take() {
            self.engine.send_detached(Command::DropJob { job });
        }
    }
}
