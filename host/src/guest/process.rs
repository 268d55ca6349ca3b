//! A guest process as its parent has it: started, given jobs, listened to, and ended.
//!
//! Never lets one job's trouble be another tenant's: a process that dies, hangs or lies fails the jobs in it and nothing else.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nodus_protocol::frame::{FrameError, FrameReader, FrameWriter};
use nodus_protocol::wire::{Grants, serve};
use nodus_protocol::{Command, Digest, JobSlot};
use nodus_sandbox::{Failure, JobEnd, Limits, Outcome, Precompiled, SealKey, StopFlag, Usage};
use rustix::rand::{GetRandomFlags, getrandom};
use serde_bytes::ByteBuf;
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep_until, timeout};

use super::broker::Broker;
use super::runs::Runs;
use super::size::Size;
use super::words::{Brief, FromJob, SealedCode, ToGuest, ToParent};
use crate::process::fate::Fate;
use crate::process::socket::split;
use crate::process::spawn::{Ends, spawn};
use crate::run::services::RunServices;

/// Words for the process that may wait.
const LINK_QUEUE: usize = 16;
/// Words of one job that may wait; beyond it the process is not read.
const JOB_QUEUE: usize = 256;
/// How long a process may take until it waits for jobs.
const START: Duration = Duration::from_secs(60);
/// How long after its own limit a job may end.
const GRACE: Duration = Duration::from_secs(30);

/// What one job is given.
pub(crate) struct Order {
    pub(crate) job: JobSlot,
    pub(crate) code: Precompiled,
    pub(crate) params: String,
    pub(crate) seed: u64,
    pub(crate) limits: Limits,
    pub(crate) stop_at: Option<u64>,
    pub(crate) cohort: Option<u64>,
    pub(crate) services: RunServices,
    pub(crate) stop: StopFlag,
}

/// A running guest process.
pub(crate) struct Process {
    link: mpsc::Sender<ToGuest>,
    runs: Runs,
    grants: Grants,
    settings: Digest,
    /// Components that it has.
    sent: tokio::sync::Mutex<BTreeSet<Digest>>,
    fate: Arc<Fate>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    missing: Vec<String>,
}

impl Process {
    /// Starts a process, and waits until it is locked down.
    ///
    /// # Errors
    /// Ours: the system starts no process, or it dies at once.
    pub(crate) async fn start(settings: Digest, size: Size) -> anyhow::Result<Self> {
        let (engine_stream, engine_end) = StdStream::pair().context("making a socket")?;
        let (parent_stream, parent_end) = StdStream::pair().context("making a socket")?;
        let ends = Ends { input: OwnedFd::from(engine_end), output: OwnedFd::from(parent_end) };
        let arguments = [("threads", size.threads as u64), ("data-bytes", size.data_bytes), ("cpu-seconds", size.cpu_seconds)]
            .map(|(name, value)| (name, value.to_string()));
        let child = spawn("guest", &arguments, &[], ends).context("starting a guest process")?;
        let fate = Arc::new(Fate::new(child));
        fate.listen("a guest process").context("starting the thread that listens to a guest process")?;

        let (reader, writer) = split(parent_stream)?;
        let mut reader = FrameReader::new(BufReader::new(reader), size.message_bytes_max);
        let missing = match timeout(START, reader.next()).await {
            Ok(Ok(Some(ToParent::Ready(missing)))) => missing,
            _ => {
                fate.seal(None);
                anyhow::bail!("a guest process did not start: it {}", fate.how());
            }
        };
        let (grants, runs) = (Grants::default(), Runs::default());
        let (link, outbox) = mpsc::channel(LINK_QUEUE);
        let (engine_reader, engine_writer) = split(engine_stream)?;
        let serving = serve(engine_reader, engine_writer, grants.clone(), size.message_bytes_max);
        let (judge, reading) = (fate.clone(), read(reader, size.silence, runs.clone(), fate.clone()));
        let tasks = vec![
            tokio::spawn(write(outbox, FrameWriter::new(writer), size.silence / 4)),
            tokio::spawn(reading),
            tokio::spawn(async move {
                if let Err(error) = serving.await
                    && !matches!(error, nodus_protocol::wire::WireError::Frame(FrameError::Io(_)))
                {
                    judge.seal(Some(format!("asked the engine what no guest process asks ({error}) and was ended")));
                }
            }),
        ];
        let sent = tokio::sync::Mutex::default();
        Ok(Self { link, runs, grants, settings, sent, fate, tasks: Mutex::new(tasks), missing })
    }

    /// What the kernel did not grant of its lockdown.
    pub(crate) fn missing(&self) -> &[String] {
        &self.missing
    }

    /// How it ended, where it has.
    pub(crate) fn how_ended(&self) -> Option<String> {
        self.runs.ended()
    }

    /// Runs a job to its end, which may be the process's. Dropped before, it ends the job.
    pub(crate) async fn run(&self, order: Order) -> JobEnd {
        let began = Instant::now();
        let (job, engine) = (order.job, order.services.trunk().engine.clone());
        let mut end = self.work(order).await;
        end.usage.wall_time = began.elapsed();
        // Whatever the process said: nothing of the job stays. An engine that is gone holds nothing.
        drop(engine.call(Command::DropJob { job }).await);
        self.grants.revoke(job);
        end
    }

    async fn work(&self, order: Order) -> JobEnd {
        let Order { job, code, params, seed, limits, stop_at, cohort, services, stop } = order;
        let (sender, mut inbox) = mpsc::channel(JOB_QUEUE);
        if let Err(how) = self.runs.enter(job, sender) {
            return failed(Failure::Process { how });
        }
        let mut stay = Stay { process: self, job, is_over: false };
        let trunk = services.trunk();
        self.grants.grant(job, trunk.engine.clone(), vec![trunk.slot], cohort);
        let brief = Brief { component: code.digest(), params, seed, limits, stop_at, cohort };
        let deadline = tokio::time::Instant::now() + Duration::from_millis(limits.wall_ms) + GRACE;
        let mut broker = Broker::new(job, services, limits, self.grants.clone());
        if let Err(error) = self.send_code(&code).await {
            return failed(Failure::Internal(error));
        }
        self.send(ToGuest::Run(job, Box::new(brief))).await;
        let mut is_told = false;
        loop {
            let verdict = tokio::select! {
                words = inbox.recv() => match words {
                    None => return failed(Failure::Process { how: self.runs.how() }),
                    Some(FromJob::Event(event)) => broker.event(event),
                    Some(FromJob::Ask(ask, question)) => match broker.answer(question).await {
                        Ok(answer) => {
                            self.send(ToGuest::Answer(ask, answer)).await;
                            Ok(())
                        }
                        Err(what) => Err(what),
                    },
                    Some(FromJob::Ended(end)) => match broker.end(&end) {
                        Ok(()) => {
                            stay.is_over = true;
                            return *end;
                        }
                        Err(what) => Err(what),
                    },
                },
                () = stop.requested(), if !is_told => {
                    is_told = true;
                    self.send(ToGuest::Stop(job)).await;
                    Ok(())
                }
                () = sleep_until(deadline) => Err("nothing at the end of a job's time"),
            };
            if let Err(what) = verdict {
                self.fate.seal(Some(format!("said {what} and was ended")));
            }
        }
    }

    async fn send_code(&self, code: &Precompiled) -> anyhow::Result<()> {
        let mut sent = self.sent.lock().await;
        if sent.insert(code.digest()) {
            let key = fresh_key()?;
            let sealed = ByteBuf::from(code.reseal(&key, self.settings));
            let code = SealedCode { component: code.digest(), settings: self.settings, key: *key.as_bytes(), sealed };
            self.send(ToGuest::Component(code)).await;
        }
        Ok(())
    }

    async fn send(&self, words: ToGuest) {
        // A process that is gone is noticed where it is read.
        drop(self.link.send(words).await);
    }

    /// Ends the process, whose jobs have all ended, and waits until nothing of it is left on the engine.
    pub(crate) async fn end(&self) {
        self.fate.seal(None);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        for task in tasks.into_iter().skip(1) {
            // A panic of one of them was reported where it happened.
            drop(task.await);
        }
    }
}

/// A key that nobody can guess.
///
/// # Errors
/// Ours: the system has no randomness.
pub(super) fn fresh_key() -> anyhow::Result<SealKey> {
    let mut bytes = [0; SealKey::BYTES];
    let got = getrandom(&mut bytes, GetRandomFlags::empty()).context("asking the system for randomness")?;
    anyhow::ensure!(got == bytes.len(), "the system gave {got} random bytes of {}", bytes.len());
    Ok(SealKey::new(bytes))
}

/// A job in the process. Dropped before the job's end, it has the process end the job.
struct Stay<'a> {
    process: &'a Process,
    job: JobSlot,
    is_over: bool,
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        self.process.runs.leave(self.job);
        if !self.is_over {
            self.process.grants.close(self.job);
            // A process that does not listen is ended by whoever has it.
            drop(self.process.link.try_send(ToGuest::Cancel(self.job)));
        }
    }
}

fn failed(failure: Failure) -> JobEnd {
    JobEnd { outcome: Outcome::Failed(failure), usage: Usage::default(), stopped_at: None }
}

/// Passes words on, and asks for a word now and then. Ends when nobody has more to say, or nobody listens.
async fn write(mut outbox: mpsc::Receiver<ToGuest>, mut writer: FrameWriter<OwnedWriteHalf>, quiet: Duration) {
    loop {
        let words = match timeout(quiet, outbox.recv()).await {
            Ok(Some(words)) => words,
            Ok(None) => return,
            Err(_) => ToGuest::Ping,
        };
        if writer.send(&words).await.is_err() {
            return;
        }
    }
}

/// Listens until the process ends, or must end.
async fn read(mut reader: FrameReader<BufReader<OwnedReadHalf>>, silence: Duration, runs: Runs, fate: Arc<Fate>) {
    let reason = loop {
        match timeout(silence, reader.next()).await {
            Ok(Ok(Some(ToParent::Of(job, words)))) => runs.pass(job, words).await,
            Ok(Ok(Some(ToParent::Pong))) => {}
            Ok(Ok(Some(ToParent::Ready(_)))) => break Some("said twice that it is ready and was ended".to_owned()),
            Ok(Ok(None) | Err(FrameError::Io(_))) => break None,
            Ok(Err(error)) => break Some(format!("said what no guest process says ({error}) and was ended")),
            Err(_) => break Some(format!("gave no sign of life for {} ms and was ended", silence.as_millis())),
        }
    };
    fate.seal(reason);
    let how = tokio::task::spawn_blocking(move || fate.how()).await;
    runs.end(how.unwrap_or_else(|_| "was lost".to_owned()));
}
