//! The guest process: locks itself down, then runs the jobs that its parent sends, and ends with its parent.
//!
//! Needs no device, no data folder, no network, no environment: two sockets are all that it has.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, bail};
use nodus_protocol::frame::{FrameReader, FrameWriter};
use nodus_protocol::wire::connect;
use nodus_protocol::{Client, Digest, JobSlot};
use nodus_sandbox::{Failure, JobEnd, JobSpec, Outcome, Precompiled, Sandbox, SandboxOptions, SealKey, StopFlag, Usage, ValidComponent};
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinError};

use super::lockdown::{Ration, close_the_door, give_up};
use super::remote::{Parent, Remote};
use super::shelf::Shelf;
use super::words::{Brief, FromJob, SealedCode, ToGuest, ToParent};
use crate::cli::GuestArgs;
use crate::process::socket::inherited;

/// Threads beside those that run guests, for tokenising and for what a tokenizer blocks.
const THREADS_BESIDE: usize = 16;

/// Serves the parent at standard input (the engine) and standard output (the parent itself) until it is gone.
///
/// # Errors
/// Ours: the process cannot be set up, or the parent is not understood.
pub(crate) fn serve(args: &GuestArgs) -> anyhow::Result<()> {
    let (engine, parent) = (inherited(io::stdin().as_fd())?, inherited(io::stdout().as_fd())?);
    let ration = Ration { data_bytes: Some(args.data_bytes), address_bytes: None, cpu_seconds: args.cpu_seconds };
    let mut missing = give_up(ration);
    let sandbox = Arc::new(Sandbox::new(SandboxOptions::default())?);
    // Nothing would stop a guest that spins: better that all jobs of this tenant fail.
    sandbox.watch_ticker(|| std::process::abort()).context("watching the ticker")?;
    let mut guests = Builder::new_multi_thread();
    let guests = guests.worker_threads(args.threads).max_blocking_threads(args.threads + THREADS_BESIDE).enable_time().build()?;
    // Sockets have a runtime of their own, on this thread: no guest delays it.
    let desk = Builder::new_current_thread().enable_io().enable_time().build()?;
    missing.extend(close_the_door());
    let ended = desk.block_on(work(&guests, sandbox, engine, parent, missing));
    guests.shutdown_background();
    ended
}

async fn work(guests: &Runtime, sandbox: Arc<Sandbox>, engine: StdStream, parent: StdStream, missing: Vec<String>) -> anyhow::Result<()> {
    let (reader, writer) = UnixStream::from_std(engine)?.into_split();
    let (engine, carrying) = connect(reader, writer);
    tokio::spawn(carrying);
    let (reader, writer) = UnixStream::from_std(parent)?.into_split();
    let (out, mut outbox) = mpsc::unbounded_channel();
    let parent = Parent::new(out);
    tokio::spawn(async move {
        let mut writer = FrameWriter::new(writer);
        while let Some(words) = outbox.recv().await {
            if writer.send(&words).await.is_err() {
                return;
            }
        }
    });
    parent.tell(ToParent::Ready(missing));
    let mut reader = FrameReader::new(BufReader::new(reader), u64::from(u32::MAX));
    let mut desk =
        Desk { guests, sandbox, engine, parent, shelf: Arc::default(), components: BTreeMap::new(), running: Running::default() };
    while let Some(words) = reader.next().await? {
        desk.hear(words)?;
    }
    Ok(())
}

struct Desk<'a> {
    guests: &'a Runtime,
    sandbox: Arc<Sandbox>,
    engine: Client,
    parent: Parent,
    shelf: Arc<Shelf>,
    components: BTreeMap<Digest, ValidComponent>,
    running: Running,
}

/// The jobs that run. What is left of one that ended is nothing: a handle would keep all of its task's memory.
#[derive(Clone, Default)]
struct Running(Arc<Mutex<BTreeMap<JobSlot, (StopFlag, AbortHandle)>>>);

impl Running {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobSlot, (StopFlag, AbortHandle)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk<'_> {
    fn hear(&mut self, words: ToGuest) -> anyhow::Result<()> {
        match words {
            ToGuest::Component(code) => self.load(&code)?,
            ToGuest::Run(job, brief) => self.run(job, *brief)?,
            // A job that has ended hears nothing any more.
            ToGuest::Stop(job) => self.running.lock().get(&job).into_iter().for_each(|(stop, _)| stop.request()),
            ToGuest::Cancel(job) => self.running.lock().remove(&job).into_iter().for_each(|(_, task)| task.abort()),
            ToGuest::Answer(ask, answer) => self.parent.answered(ask, answer),
            ToGuest::Ping => self.parent.tell(ToParent::Pong),
        }
        Ok(())
    }

    fn load(&mut self, code: &SealedCode) -> anyhow::Result<()> {
        let opened = Precompiled::open(&SealKey::new(code.key), code.component, code.settings, &code.sealed);
        let Some(opened) = opened else { bail!("the parent sent code under a broken seal") };
        self.components.insert(code.component, self.sandbox.load(&opened)?);
        Ok(())
    }

    fn run(&mut self, job: JobSlot, brief: Brief) -> anyhow::Result<()> {
        let component = self.components.get(&brief.component).context("the parent named a component that it did not send")?.clone();
        let stop = StopFlag::default();
        let Brief { params, seed, limits, stop_at, cohort, .. } = brief;
        let spec = JobSpec { params, seed, job, limits, stop: stop.clone(), stop_at, cohort };
        let remote = Remote { job, parent: self.parent.clone(), engine: self.engine.clone(), shelf: self.shelf.clone() };
        let (sandbox, parent) = (self.sandbox.clone(), self.parent.clone());
        let task = self.guests.spawn(async move { component.run(&sandbox, spec, Box::new(remote)).await });
        self.running.lock().insert(job, (stop, task.abort_handle()));
        let running = self.running.clone();
        self.guests.spawn(async move {
            let ended = task.await;
            running.lock().remove(&job);
            if let Some(end) = end_of(ended) {
                parent.tell(ToParent::Of(job, FromJob::Ended(Box::new(end))));
            }
        });
        Ok(())
    }
}

/// What is told of a task that ended; of one that was cancelled, nothing.
fn end_of(ended: Result<JobEnd, JoinError>) -> Option<JobEnd> {
    ended.map_or_else(|error| error.is_panic().then(panicked), Some)
}

fn panicked() -> JobEnd {
    let failure = Failure::Internal(anyhow::anyhow!("the host's own code panicked within a call of the component"));
    JobEnd { outcome: Outcome::Failed(failure), usage: Usage::default(), stopped_at: None }
}

#[cfg(test)]
mod tests {
    use nodus_sandbox::{Failure, JobEnd, Outcome, Usage};

    use super::end_of;

    #[tokio::test]
    async fn a_panic_is_our_failure_and_a_cancelled_job_is_not_told_of() {
        let ended = tokio::spawn(async { panic!("a defect of the host's own code") }).await;
        let Some(JobEnd { outcome: Outcome::Failed(Failure::Internal(error)), .. }) = end_of(ended) else { panic!("no failure of ours") };
        assert!(error.to_string().contains("panicked"), "{error}");
        let waiting = tokio::spawn(std::future::pending());
        waiting.abort();
        assert!(end_of(waiting.await).is_none());
        let completed = JobEnd { outcome: Outcome::Completed, usage: Usage::default(), stopped_at: None };
        assert!(matches!(end_of(Ok(completed)), Some(JobEnd { outcome: Outcome::Completed, .. })));
    }
}
