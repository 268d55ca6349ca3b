//! An engine process as its parent has it: started, spoken to, watched, and ended.
//!
//! Never hides that it died: whoever waits for it is told, and what its jobs held of the device went with it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use cap_std::fs::Dir;
use nodus_engine::JobBytes;
use nodus_protocol::frame::{FrameReader, FrameWriter};
use nodus_protocol::wire::connect;
use nodus_protocol::{Client, Command, JobSlot};
use nodus_sandbox::services::{Text, Trunk};
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::words::{Facts, FromEngine, Load, ToEngine, Vitals};
use crate::cli::DeviceArgs;
use crate::cuda::{ALONE, DeviceEnv, VISIBLE};
use crate::error::user;
use crate::name::Name;
use crate::process::fate::{self, Fate};
use crate::process::handover;
use crate::process::mps::Mps;
use crate::process::socket::split;
use crate::process::spawn::{Ends, spawn};
use crate::process::weights::Keeper;
use crate::run::device::Class;
use crate::run::inputs::OpenModel;
use crate::run::services::HostText;

/// Words for the process that may wait.
const LINK_QUEUE: usize = 64;

/// What an engine process is set up with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) model: Name,
    pub(crate) device: DeviceArgs,
    /// The card that it is to see, and no other.
    pub(crate) card: Option<String>,
    /// Bytes of its buffers at most: all but the weights.
    pub(crate) buffer_bytes_max: u64,
    pub(crate) environment: DeviceEnv,
    /// The daemon that it is to be a client of.
    pub(crate) mps: Option<MpsTerms>,
    pub(crate) watch: Watch,
}

/// How an engine process is a client of an MPS daemon.
#[derive(Clone, Debug)]
pub(crate) struct MpsTerms {
    pub(crate) daemon: Arc<Mps>,
    /// Bytes of the card's memory that it may have in all.
    pub(crate) memory_bytes: u64,
    /// Whom it has its weights from, and gives them to.
    pub(crate) weights: Arc<Keeper>,
}

impl Setup {
    /// Its card alone; of a client all threads of it, and no more memory than is planned.
    fn environment(&self) -> Vec<(String, String)> {
        let mut variables: Vec<_> = self.card.iter().map(|card| (VISIBLE, card.clone())).collect();
        if let Some(mps) = &self.mps {
            variables.extend(mps.daemon.environment(Some(100)));
            variables.push(Mps::memory_limit(ALONE, mps.memory_bytes));
        }
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl MpsTerms {
    /// Waits until the process is a client: the driver would run it all the same.
    async fn prove(&self, process: u32) -> anyhow::Result<()> {
        let daemon = self.daemon.clone();
        tokio::task::spawn_blocking(move || daemon.expect_clients(&[process])).await.context("asking the MPS daemon")?
    }
}

/// How long a process may take before it counts as one that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Watch {
    /// Until it has loaded its model and proven its device.
    pub(crate) start: Duration,
    /// Without a word; it is asked for one four times as often.
    pub(crate) silence: Duration,
    /// At one pass, or one other command.
    pub(crate) pass: Duration,
}

/// A running engine process.
pub(crate) struct Process {
    client: Client,
    link: mpsc::Sender<ToEngine>,
    facts: Facts,
    board: Arc<Board>,
    fate: Arc<Fate>,
}

/// What was heard from it.
struct Board {
    vitals: Mutex<Vitals>,
    /// Who waits for a job's figures.
    asking: Mutex<BTreeMap<JobSlot, oneshot::Sender<(JobBytes, u64)>>>,
    ended: watch::Sender<Option<String>>,
}

impl Board {
    fn asking(&self) -> MutexGuard<'_, BTreeMap<JobSlot, oneshot::Sender<(JobBytes, u64)>>> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Process {
    /// Starts a process with a model of a data folder, and waits until it takes commands.
    ///
    /// # Errors
    /// Ours: the system starts no process, or it dies or hangs at its start. The operator's: the model or the device is not there.
    pub(crate) async fn start(dir: &Dir, setup: &Setup) -> anyhow::Result<Self> {
        let (command_stream, command_end) = StdStream::pair().context("making a socket")?;
        let (control_stream, control_end) = StdStream::pair().context("making a socket")?;
        let ends = Ends { input: OwnedFd::from(command_end), output: OwnedFd::from(control_end) };
        let child = spawn("engine", &[], &setup.environment(), ends).context("starting an engine process")?;
        let fate = Arc::new(Fate::of_client(child, setup.mps.as_ref().map(|mps| mps.daemon.clone())));
        let begun = Self::begin(dir, setup, &fate, (command_stream, control_stream)).await;
        if begun.is_err() {
            // Dropped, it would be waited for on this thread.
            fate::end(&fate, None).await;
        }
        begun
    }

    /// Tells a process what to load, and waits until it has.
    async fn begin(
        dir: &Dir,
        setup: &Setup,
        fate: &Arc<Fate>,
        (command_stream, control_stream): (StdStream, StdStream),
    ) -> anyhow::Result<Self> {
        fate.listen("an engine process").context("starting the thread that listens to an engine process")?;
        let linked = setup.mps.as_ref().map(|mps| mps.weights.link()).transpose();
        let (weights, turn) = linked.context("making a socket for an engine process's weights")?.unzip();
        let handed: Vec<_> = [dir.as_fd()].into_iter().chain(weights.as_ref().map(StdStream::as_fd)).collect();
        handover::give(&control_stream, &handed).context("handing the data folder to an engine process")?;
        drop(weights);
        let (reader, writer) = split(control_stream)?;
        let (mut reader, mut writer) = (FrameReader::new(BufReader::new(reader), u64::from(u32::MAX)), FrameWriter::new(writer));
        let Setup { model, device, card, buffer_bytes_max, environment, watch, mps } = setup.clone();
        let (sees_it_alone, limit) = (card.is_some(), mps.as_ref().map(|mps| mps.memory_bytes));
        // A process that is gone already is noticed where it is read.
        drop(writer.send(&ToEngine::Load(Box::new(Load { model, device, sees_it_alone, buffer_bytes_max, limit, environment }))).await);
        let facts = match in_time(reader.next(), turn, watch.start).await {
            Ok(Ok(Some(FromEngine::Ready(facts)))) => *facts,
            Ok(Ok(Some(FromEngine::Refused { text, is_users: true }))) => return Err(user(text)),
            Ok(Ok(Some(FromEngine::Refused { text, .. }))) => bail!("an engine process could not start: {text}"),
            Ok(_) => {
                bail!("an engine process did not start: it {}", fate::end(fate, None).await);
            }
            Err(_) => bail!("an engine process was not ready after {} s", watch.start.as_secs()),
        };
        if let Some(mps) = &mps {
            mps.prove(fate.id()).await?;
        }
        let (command_reader, command_writer) = split(command_stream)?;
        let (client, carrying) = connect(command_reader, command_writer);
        tokio::spawn(carrying);
        let (link, outbox) = mpsc::channel(LINK_QUEUE);
        let board = Arc::new(Board { vitals: Mutex::default(), asking: Mutex::default(), ended: watch::Sender::new(None) });
        tokio::spawn(write(outbox, writer, watch));
        tokio::spawn(read(reader, board.clone(), fate.clone(), watch));
        Ok(Self { client, link, facts, board, fate: fate.clone() })
    }

    /// The model that it holds, as jobs use it.
    pub(crate) fn trunk(&self, model: &OpenModel) -> Trunk {
        let text = model.text.clone().map(|text| Arc::new(HostText(text)) as Arc<dyn Text>);
        Trunk { config: model.config.clone(), digest: model.digest, engine: self.client.clone(), slot: self.facts.slot, text }
    }

    /// What decides the bits of its results.
    pub(crate) fn class(&self) -> &Class {
        &self.facts.class
    }

    /// The device, as people call it.
    pub(crate) fn device(&self) -> &str {
        &self.facts.device
    }

    /// How it was when it was heard from last.
    pub(crate) fn vitals(&self) -> Vitals {
        self.board.vitals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What a job that was dropped used of the device's memory, and its time in passes in nanoseconds. None where the process died: what the job
    /// held is gone with it.
    pub(crate) async fn forget(&self, job: JobSlot) -> Option<(JobBytes, u64)> {
        let (asker, answer) = oneshot::channel();
        self.board.asking().insert(job, asker);
        if self.how_ended().is_some() {
            self.board.asking().remove(&job);
        }
        drop(self.link.send(ToEngine::Forget(job)).await);
        answer.await.ok()
    }

    /// How it ended, where it has.
    pub(crate) fn how_ended(&self) -> Option<String> {
        self.board.ended.borrow().clone()
    }

    /// Resolves when it has ended, with how.
    pub(crate) async fn ended(&self) -> String {
        let mut ended = self.board.ended.subscribe();
        let how = ended.wait_for(Option::is_some).await.ok().and_then(|how| how.clone());
        how.unwrap_or_else(|| "was lost".to_owned())
    }

    /// Has its buffers take no more than so many bytes from now on, and waits until what it kept beyond them is given back. One that dies holds nothing.
    pub(crate) async fn bound(&self, bytes: u64) {
        if let Err(error) = self.client.call(Command::Bound { bytes }).await {
            tracing::debug!(%error, "an engine was not told what it may have");
        }
    }

    /// Ends it, and waits until it is gone.
    pub(crate) async fn end(&self) {
        seal(&self.fate, None).await;
        self.ended().await;
    }

    /// Ends it for a reason, which is how it ended, and waits until it is gone. Its device is lost: nothing of it is at work there.
    pub(crate) async fn condemn(&self, reason: String) {
        let fate = self.fate.clone();
        // It waits where somebody waits for the process already.
        drop(tokio::task::spawn_blocking(move || fate.seal_at_once(Some(reason))).await);
        self.ended().await;
    }
}

/// What a process says, within its time. While it waits for its turn that stands still: whoever it waits for has a time of its own.
async fn in_time<T>(words: impl Future<Output = T>, turn: Option<oneshot::Receiver<()>>, limit: Duration) -> Result<T, Elapsed> {
    let mut words = pin!(words);
    if let Some(turn) = turn {
        tokio::select! {
            words = &mut words => return Ok(words),
            // Where nobody is left to tell, its time begins.
            _ = turn => {}
        }
    }
    timeout(limit, words).await
}

/// Ends a process, which may block.
async fn seal(fate: &Arc<Fate>, reason: Option<String>) {
    let fate = fate.clone();
    // A panic of it was reported where it happened.
    drop(tokio::task::spawn_blocking(move || fate.seal(reason)).await);
}

/// Passes words on, and asks for a word now and then. Ends when nobody has more to say, or nobody listens.
async fn write(mut outbox: mpsc::Receiver<ToEngine>, mut writer: FrameWriter<OwnedWriteHalf>, watch: Watch) {
    let mut pings = tokio::time::interval((watch.silence / 4).min(Duration::from_secs(1)));
    loop {
        let words = tokio::select! {
            words = outbox.recv() => match words {
                Some(words) => words,
                None => return,
            },
            _ = pings.tick() => ToEngine::Ping,
        };
        if writer.send(&words).await.is_err() {
            return;
        }
    }
}

/// Listens until the process ends, or must end.
async fn read(mut reader: FrameReader<BufReader<OwnedReadHalf>>, board: Arc<Board>, fate: Arc<Fate>, watch: Watch) {
    let reason = loop {
        match timeout(watch.silence, reader.next()).await {
            Ok(Ok(Some(FromEngine::Lives(vitals)))) => {
                if u128::from(vitals.busy_ms) > watch.pass.as_millis() {
                    break Some(format!("was at one pass for more than {} s and was ended", watch.pass.as_secs()));
                }
                *board.vitals.lock().unwrap_or_else(PoisonError::into_inner) = *vitals;
            }
            Ok(Ok(Some(FromEngine::Used(job, bytes, device_ns)))) => {
                let asker = board.asking().remove(&job);
                // Who asked may be gone.
                drop(asker.map(|asker| asker.send((*bytes, device_ns))));
            }
            Ok(Ok(Some(_))) => break Some("said what no engine process says now and was ended".to_owned()),
            Ok(Ok(None) | Err(_)) => break None,
            Err(_) => break Some(format!("gave no sign of life for {} s and was ended", watch.silence.as_secs())),
        }
    };
    let how = fate::end(&fate, reason).await;
    board.ended.send_replace(Some(how));
    board.asking().clear();
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::{DeviceArgs, DeviceEnv, MpsTerms, Setup, Watch, in_time};
    use crate::process::mps::tests::daemon;

    /// The variables of an engine process on the second of two cards.
    #[test]
    fn an_engine_sees_its_own_card_alone_and_its_limit_is_that_cards() {
        let folder = tempfile::tempdir().unwrap();
        let daemon = Arc::new(daemon(&folder, ""));
        let terms = MpsTerms { weights: daemon.weights(nodus_protocol::Digest::of(b"model")), daemon, memory_bytes: 3 << 30 };
        let limit = Duration::from_secs(1);
        let setup = Setup {
            model: "model".parse().unwrap(),
            device: DeviceArgs { device: Some("cuda:1".parse().unwrap()), dtype: None, threads: None, trunk_cache: None, memory: None },
            card: Some("GPU-1".into()),
            buffer_bytes_max: 0,
            environment: DeviceEnv::default(),
            mps: Some(terms),
            watch: Watch { start: limit, silence: limit, pass: limit },
        };
        let has = |setup: &Setup, name: &str, value: &str| setup.environment().contains(&(name.to_owned(), value.to_owned()));
        assert!(has(&setup, "CUDA_VISIBLE_DEVICES", "GPU-1") && has(&setup, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=3072M"));
        assert!(has(&setup, "CUDA_MPS_PIPE_DIRECTORY", folder.path().to_str().unwrap()));
        let fused = Setup { mps: None, ..setup };
        assert_eq!(fused.environment(), [("CUDA_VISIBLE_DEVICES".to_owned(), "GPU-1".to_owned())]);
    }

    #[tokio::test]
    async fn waiting_for_another_is_not_the_process_own_time() {
        let limit = Duration::from_millis(200);
        let (teller, turn) = oneshot::channel();
        let waits = tokio::spawn(async move { in_time(std::future::pending::<()>(), Some(turn), limit).await });
        tokio::time::sleep(3 * limit).await;
        assert!(!waits.is_finished(), "ended while it waited for another");
        teller.send(()).unwrap();
        assert!(waits.await.unwrap().is_err(), "its time has begun");
        // One that dies while it waits is noticed at once.
        let (_teller, turn) = oneshot::channel();
        assert_eq!(in_time(async { "died" }, Some(turn), limit).await, Ok("died"));
    }
}
