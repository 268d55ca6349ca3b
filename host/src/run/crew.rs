//! Runs jobs: in the fused lane all in one engine, in the solo lane one after another, each in an engine of its own.
//!
//! Both lanes are this one path: a lane is a list of groups, and a group is an engine with the jobs that share it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use anyhow::{Context as _, bail};
use nodus_engine::JobBytes;
use nodus_protocol::{EngineError, JobSlot};
use nodus_sandbox::services::Trunk;
use nodus_sandbox::{Failure, JobEnd, JobSpec, Outcome, Sandbox, StopFlag, Usage};
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::course::{Course, Ended};
use super::device::{Class, Device, Rig};
use super::display::Display;
use super::inputs::Job;
use super::keep::Keep;
use super::neighbours::Neighbours;
use super::output::Folder;
use super::sharing::Sharing;
use super::stop::Stopper;
use super::view::View;
use crate::cli::Lane;
use crate::error::{again, refusal};
use crate::guest::{OS_SANDBOX, Order, Process, Size, Terms};
use crate::journal::{Fault, Scribe, Tally};
use crate::machine;
use crate::text::count;

/// A job with the folder that its results go to.
#[derive(Clone)]
pub(crate) struct Post {
    pub(crate) job: Arc<Job>,
    pub(crate) folder: Arc<Folder>,
}

/// A job about to run.
struct Seat {
    /// What its engine knows it by.
    slot: JobSlot,
    post: Post,
    /// Its model in the engine.
    trunk: Trunk,
    /// Of the engine's device.
    class: Arc<Class>,
}

/// Run again, the job did otherwise than before: gone on with, it would do so every time.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Diverged(String);

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
    /// Whether no run can go on with it.
    pub(super) fn has_diverged(&self) -> bool {
        self.ended.as_ref().is_err_and(|error| error.is::<Diverged>())
    }

    /// Its engine could not be started.
    fn not_at_all(error: &anyhow::Error) -> Self {
        Self { ended: Err(again(error)), ..Self::not_started() }
    }

    /// The run was to stop before its turn came.
    fn not_started() -> Self {
        Self { ended: Ok(None), engine: Ok(()), bytes: JobBytes::default(), class: Arc::default() }
    }
}

/// What the jobs of a run share.
pub(crate) struct Crew {
    runtime: Runtime,
    shared: Arc<Shared>,
}

struct Shared {
    sandbox: Arc<Sandbox>,
    terms: Terms,
    /// Threads that guests run on.
    threads: usize,
    /// Whether the user was told that the kernel locks guests down less than wholly.
    is_warned: AtomicBool,
    display: Display,
    stopper: Arc<Stopper>,
    /// What the run keeps of itself, where it is one that can go on.
    keep: Option<Arc<Keep>>,
    neighbours: Neighbours,
}

/// Where guests run.
#[derive(Clone)]
enum Home {
    /// In this process.
    Here,
    /// In a process of their own.
    Apart(Arc<Process>),
}

impl Crew {
    /// Starts the threads that guests run on.
    ///
    /// # Errors
    /// Ours: the system has no threads left.
    pub(crate) fn start(
        sandbox: Arc<Sandbox>,
        terms: Terms,
        (display, stopper, keep): (Display, Arc<Stopper>, Option<Arc<Keep>>),
        guests: usize,
        rig: Rig<'_>,
    ) -> anyhow::Result<Self> {
        let threads = machine::threads(rig.args.threads)?.min(guests).max(1);
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(threads).enable_all().build().context("starting the runtime")?;
        if terms.in_process {
            // Nothing would stop a guest that spins.
            sandbox.watch_ticker(|| std::process::abort()).context("watching the sandbox's ticker")?;
        }
        let (neighbours, is_warned) = (Neighbours::default(), AtomicBool::new(false));
        stopper.tell_on(display.clone());
        let shared = Arc::new(Shared { sandbox, terms, threads, is_warned, display, stopper, keep, neighbours });
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
        if self.shared.stopper.is_asked() {
            return Ok(posts.iter().map(|_| Fared::not_started()).collect());
        }
        let device = Device::start(posts.iter().map(|(_, post)| &*post.job.model), rig)?;
        let classes: Vec<Arc<Class>> = posts.iter().map(|(_, post)| Arc::new(device.class(&post.job.model))).collect();
        let seat = |((slot, post), class): (&(JobSlot, Post), &Arc<Class>)| {
            Ok(Seat { slot: *slot, post: post.clone(), trunk: device.trunk(&post.job.model)?, class: class.clone() })
        };
        let seats = posts.iter().zip(&classes).map(seat).collect::<anyhow::Result<Vec<_>>>()?;
        let ended = self.runtime.block_on(async {
            let home = self.shared.home(&seats).await?;
            let ended = self.together(seats, at_once, &home).await;
            if let Home::Apart(process) = home {
                process.end().await;
            }
            anyhow::Ok(ended)
        })?;
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
    async fn together(&self, seats: Vec<Seat>, at_once: usize, home: &Home) -> Vec<anyhow::Result<Option<Ended>>> {
        let gate = Arc::new(Semaphore::new(at_once.max(1)));
        let mut outcomes = Vec::new();
        for seat in seats {
            let permit = gate.clone().acquire_owned().await.context("waiting for a seat");
            let work = run_one(self.shared.clone(), home.clone(), seat, permit);
            let (sender, outcome) = oneshot::channel();
            // Not the task's handle, which would keep all of the task's memory.
            tokio::spawn(async move { sender.send(work.await) });
            outcomes.push(outcome);
        }
        let mut ended = Vec::new();
        for outcome in outcomes {
            let panicked = |_| Err(anyhow::anyhow!("a thread of the host panicked while it ran the job"));
            ended.push(outcome.await.unwrap_or_else(panicked));
        }
        ended
    }
}

impl Shared {
    /// A place for the guests of these jobs, all of one tenant.
    ///
    /// # Errors
    /// Ours: no process can be started. The user's: the kernel locks it down less than was demanded.
    async fn home(&self, seats: &[Seat]) -> anyhow::Result<Home> {
        if seats.is_empty() || self.terms.in_process {
            return Ok(Home::Here);
        }
        let jobs = || seats.iter().map(|seat| &seat.post.job);
        let dataset_bytes = jobs().map(|job| job.dataset_bytes()).sum();
        let size = Size::new(self.threads, jobs().map(|job| job.limits), dataset_bytes, self.terms.silence);
        let process = Process::start(self.sandbox.settings(), size).await?;
        if !process.missing().is_empty() {
            let missing = process.missing().join("; ");
            if self.terms.require_os_sandbox {
                return Err(refusal(OS_SANDBOX, format!("--require-os-sandbox: the kernel does not lock guests down wholly: {missing}")));
            }
            if !self.is_warned.swap(true, Relaxed) {
                self.display.note(&format!("warning: the kernel does not lock guests down wholly: {missing}"));
            }
        }
        Ok(Home::Apart(Arc::new(process)))
    }

    /// Runs a job where it lives.
    async fn run(&self, home: &Home, job: &Job, order: Order) -> JobEnd {
        match home {
            Home::Apart(process) => process.run(order).await,
            Home::Here => match self.sandbox.load(&job.component.code) {
                Ok(component) => {
                    let Order { job, params, seed, limits, stop_at, cohort, services, stop, .. } = order;
                    let spec = JobSpec { params, seed, job, limits, stop, stop_at, cohort };
                    component.run(&self.sandbox, spec, Box::new(services)).await
                }
                Err(error) => JobEnd { outcome: Outcome::Failed(Failure::Internal(error)), usage: Usage::default(), stopped_at: None },
            },
        }
    }
}

/// Runs a job to its end, or to the second Ctrl-C; none where it was not started.
async fn run_one(
    shared: Arc<Shared>,
    home: Home,
    seat: Seat,
    permit: anyhow::Result<OwnedSemaphorePermit>,
) -> anyhow::Result<Option<Ended>> {
    let _permit = permit?;
    let Some(stop) = shared.stopper.enlist() else { return Ok(None) };
    let view = View::start(shared.display.job(seat.post.job.name.as_deref()))?;
    if let Some(keep) = shared.keep.clone() {
        let (opener, class, engine, cohort) = (keep.clone(), seat.class.clone(), seat.trunk.clone(), seat.post.job.cohort);
        let open = move || opener.scribe(seat.slot, &class, &engine, cohort);
        if let Some(scribe) = tokio::task::spawn_blocking(open).await.context("opening a job's journal")?? {
            return kept(&shared, &home, (seat, view), (keep, scribe)).await.map(Some);
        }
        let name = seat.post.job.name.as_deref().map_or_else(String::new, |name| format!("{name}: "));
        shared.display.note(&format!("{name}what was kept of the run was taken away: the job begins anew, and is not kept"));
    }
    let Seat { slot, post, trunk, .. } = &seat;
    let course = Course {
        slot: *slot,
        job: &post.job,
        folder: &post.folder,
        trunk: trunk.clone(),
        stop,
        audience: Box::new(view),
        note: Box::new(|_| Ok(())),
        neighbours: &shared.neighbours,
    };
    course.run(|order| shared.run(&home, &post.job, order), shared.stopper.end()).await.map(Some)
}

/// The same of a job that is kept as it goes, and goes on where it was interrupted.
async fn kept(shared: &Shared, home: &Home, (seat, view): (Seat, View), (keep, scribe): (Arc<Keep>, Scribe)) -> anyhow::Result<Ended> {
    let Seat { slot, post, mut trunk, .. } = seat;
    trunk.engine = scribe.client();
    let calls = scribe.calls();
    let stop = StopFlag::default();
    let course = Course {
        slot,
        job: &post.job,
        folder: &post.folder,
        trunk,
        stop: stop.clone(),
        audience: Box::new(view),
        note: Box::new(move |_| {
            keep.note_stop(slot, calls.made());
            Ok(())
        }),
        neighbours: &shared.neighbours,
    };
    let cut = async {
        tokio::select! {
            () = shared.stopper.end() => {}
            _ = scribe.failed() => {}
        }
    };
    let ended = tokio::select! {
        ended = course.run(|order| shared.run(home, &post.job, order), cut) => ended,
        () = pass_stop_on((&shared.stopper, &stop), &scribe) => bail!("a stop was passed on for ever"),
        () = tell_going_on(shared, &scribe, post.job.name.as_deref()) => bail!("that a job went on was told for ever"),
    };
    let (is_whole, fault) = (scribe.is_caught_up(), scribe.fault());
    scribe.end().await;
    match (fault, ended?) {
        (Some(Fault::Lost(how)), _) => bail!("the device was lost: {how}"),
        (Some(Fault::Host(how)), _) => bail!(how),
        (Some(Fault::Diverged(how)), _) => Err(Diverged(how).into()),
        (None, ended) if ended.end.is_some() && !is_whole => {
            Err(Diverged("run again, the job ended before it had asked all that it asked before".to_owned()).into())
        }
        (None, ended) => Ok(ended),
    }
}

/// Asks a job to stop once that is asked of the run, and the job is where it was when it was interrupted: what it did until then it did unasked.
/// Never resolves.
async fn pass_stop_on((stopper, stop): (&Stopper, &StopFlag), scribe: &Scribe) {
    stopper.asked().await;
    scribe.caught_up().await;
    stop.request();
    std::future::pending().await
}

/// Says what was done again, once nothing more is. Never resolves.
async fn tell_going_on(shared: &Shared, scribe: &Scribe, name: Option<&str>) {
    scribe.caught_up().await;
    let Tally { answered, repeated, repeated_steps, .. } = scribe.tally();
    if answered + repeated > 0 {
        let name = name.map_or_else(String::new, |name| format!("{name}: "));
        let (calls, steps) = (count(answered, "call"), count(repeated_steps, "step"));
        shared.display.note(&format!("{name}went on where it was cut off: {calls} answered from its journal, {steps} done again"));
    }
    std::future::pending().await
}
