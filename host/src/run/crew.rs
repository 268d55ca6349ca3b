//! Runs jobs: in the fused lane all in one engine, in the solo lane one after another, each in an engine of its own.
//!
//! Both lanes are this one path: a lane is a list of groups, and a group is an engine with the jobs that share it.

use std::sync::{Arc, PoisonError};

use anyhow::Context as _;
use nodus_engine::JobBytes;
use nodus_protocol::{Client, Command, EngineError, JobSlot};
use nodus_sandbox::services::Trunk;
use nodus_sandbox::{JobEnd, JobSpec, Limits, Sandbox, StopFlag};
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::device::{Class, Device, Rig};
use super::display::Display;
use super::inputs::Job;
use super::neighbours::Neighbours;
use super::output::Folder;
use super::record::{Figures, Record};
use super::recorder::Recorder;
use super::services::RunServices;
use super::sharing::Sharing;
use super::stop::Stopper;
use crate::cli::Lane;
use crate::error::{exit_code, user};
use crate::machine;

/// A job with the folder that its results go to.
#[derive(Clone)]
pub(crate) struct Post {
    pub(crate) job: Arc<Job>,
    pub(crate) folder: Arc<Folder>,
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

/// How a job fared, and the engine that it ran in.
pub(crate) struct Fared {
    /// None where it was not started; ours where the host failed it.
    pub(crate) ended: anyhow::Result<Option<Ended>>,
    pub(crate) engine: Result<(), EngineError>,
    /// What the engine gave the job, and got back.
    pub(crate) bytes: JobBytes,
    pub(crate) class: Arc<Class>,
}

impl Fared {
    /// Its engine could not be started.
    fn not_at_all(error: &anyhow::Error) -> Self {
        let again = if exit_code(error) == 2 { user(error.to_string()) } else { anyhow::anyhow!("{error:#}") };
        Self { ended: Err(again), engine: Ok(()), bytes: JobBytes::default(), class: Arc::default() }
    }
}

/// What the jobs of a run share.
pub(crate) struct Crew {
    runtime: Runtime,
    shared: Arc<Shared>,
}

struct Shared {
    sandbox: Arc<Sandbox>,
    display: Display,
    stopper: Arc<Stopper>,
    neighbours: Neighbours,
}

impl Crew {
    /// Starts the threads that guests run on, and listens to Ctrl-C.
    ///
    /// # Errors
    /// Ours: the system has no threads left.
    pub(crate) fn start(sandbox: Arc<Sandbox>, display: Display, guests: usize, rig: Rig<'_>) -> anyhow::Result<Self> {
        let threads = machine::threads(rig.args.threads)?.min(guests).max(1);
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(threads).enable_all().build().context("starting the runtime")?;
        let shared = Arc::new(Shared { sandbox, display, stopper: Stopper::new(), neighbours: Neighbours::default() });
        let listener = shared.clone();
        runtime.spawn(async move { listener.stopper.obey_interrupts(|text| listener.display.note(text)).await });
        Ok(Self { runtime, shared })
    }

    /// Runs all jobs to their ends, at most `at_once` at the same time; how each fared, in order, and what the engines did.
    pub(crate) fn run(&self, posts: &[Post], lane: Lane, at_once: usize, rig: Rig<'_>) -> (Vec<Fared>, Sharing) {
        let numbered: Vec<(JobSlot, Post)> = (0..).map(JobSlot).zip(posts.iter().cloned()).collect();
        let group_len = match lane {
            Lane::Fused => numbered.len().max(1),
            Lane::Solo => 1,
        };
        let (mut fared, mut sharing) = (Vec::new(), Sharing::default());
        for group in numbered.chunks(group_len) {
            // Jobs of other groups are not to suffer where one engine cannot be started.
            let group_fared = self.group(group, at_once, rig, &mut sharing);
            fared.extend(group_fared.unwrap_or_else(|error| group.iter().map(|_| Fared::not_at_all(&error)).collect()));
        }
        self.shared.display.finish();
        (fared, sharing)
    }

    fn group(&self, posts: &[(JobSlot, Post)], at_once: usize, rig: Rig<'_>, sharing: &mut Sharing) -> anyhow::Result<Vec<Fared>> {
        let device = Device::start(posts.iter().map(|(_, post)| &*post.job.model), rig)?;
        let classes: Vec<Arc<Class>> = posts.iter().map(|(_, post)| Arc::new(device.class(&post.job.model))).collect();
        let seats = posts.iter().map(|(slot, post)| Ok((*slot, post.clone(), device.trunk(&post.job.model)?)));
        let seats = seats.collect::<anyhow::Result<Vec<_>>>()?;
        let ended = self.runtime.block_on(self.together(seats, at_once));
        let spent = device.finish();
        sharing.add(&spent.counts);
        let fared = posts.iter().zip(classes).zip(ended).map(|(((slot, _), class), ended)| Fared {
            ended,
            engine: spent.end.clone(),
            bytes: spent.jobs.get(slot).cloned().unwrap_or_default(),
            class,
        });
        Ok(fared.collect())
    }

    /// Starts jobs in order, each as soon as there is a seat, and waits for all.
    async fn together(&self, seats: Vec<(JobSlot, Post, Trunk)>, at_once: usize) -> Vec<anyhow::Result<Option<Ended>>> {
        let gate = Arc::new(Semaphore::new(at_once.max(1)));
        let mut tasks = Vec::new();
        for (slot, post, trunk) in seats {
            let seat = gate.clone().acquire_owned().await.context("waiting for a seat");
            tasks.push(tokio::spawn(run_one(self.shared.clone(), slot, post, trunk, seat)));
        }
        let mut ended = Vec::new();
        for task in tasks {
            let panicked = |_| Err(anyhow::anyhow!("a thread of the host panicked while it ran the job"));
            ended.push(task.await.unwrap_or_else(panicked));
        }
        ended
    }
}

/// Runs a job to its end, or to the second Ctrl-C; none where it was not started.
async fn run_one(
    shared: Arc<Shared>,
    slot: JobSlot,
    post: Post,
    trunk: Trunk,
    seat: anyhow::Result<OwnedSemaphorePermit>,
) -> anyhow::Result<Option<Ended>> {
    let _seat = seat?;
    let Some(stop) = shared.stopper.enlist() else { return Ok(None) };
    let Post { job, folder } = post;
    let reservation = Reservation::make(&trunk.engine, slot, &job.limits).await?;
    let ended = run_reserved(&shared, slot, &job, &folder, (trunk, stop)).await;
    // Before the seat is free again: the next job may need the room.
    reservation.end().await;
    job.tokens.lock().unwrap_or_else(PoisonError::into_inner).clear();
    ended.map(Some)
}

/// Runs a job whose device memory is reserved.
async fn run_reserved(
    shared: &Shared,
    slot: JobSlot,
    job: &Job,
    folder: &Folder,
    (trunk, stop): (Trunk, StopFlag),
) -> anyhow::Result<Ended> {
    let progress = shared.display.job(job.name.as_deref());
    let (listener, recorder) = Recorder::start(Record::create(folder)?, progress, stop.clone())?;
    let output = folder.dir().try_clone().context("opening the results' folder")?;
    let services = Box::new(RunServices::new(job, trunk, output, listener));
    let params = serde_json::to_string(&job.parameters)?;
    let spec = JobSpec { params, seed: job.seed, job: slot, limits: job.limits, stop, stop_at: job.stop_at, cohort: Some(job.cohort) };
    shared.neighbours.enter(slot);
    let started_unix_ms = machine::unix_ms();
    let end = tokio::select! {
        end = job.component.valid.run(&shared.sandbox, spec, services) => Some(end),
        () = shared.stopper.end() => None,
    };
    let neighbours = shared.neighbours.leave(slot);
    let figures = tokio::task::spawn_blocking(move || recorder.finish()).await.context("waiting for the recorder")??;
    Ok(Ended { end, figures, started_unix_ms, neighbours })
}

/// Device memory that is reserved for a job, given back however the job ends.
struct Reservation {
    engine: Client,
    job: Option<JobSlot>,
}

impl Reservation {
    async fn make(engine: &Client, job: JobSlot, limits: &Limits) -> anyhow::Result<Self> {
        let (adapter_bytes, activation_bytes) = (limits.device_bytes, limits.activation_bytes);
        let reserve = Command::Reserve { job, adapter_bytes, activation_bytes };
        engine.call(reserve).await.context("reserving device memory for a job that was admitted")?;
        Ok(Self { engine: engine.clone(), job: Some(job) })
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
