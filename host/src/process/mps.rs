//! An MPS daemon with folders of its own, the proof that processes are its clients, and how one is ended without harm to the others.
//!
//! Leaves the card's compute mode alone. A program whose daemon is not reachable runs without MPS and says nothing, so that it is asked.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nodus_protocol::Digest;

use super::weights::Keeper;
use crate::cuda::VISIBLE;
use crate::text::one_line;

/// The driver's program that starts a daemon, and speaks to one.
pub(crate) const CONTROL: &str = "nvidia-cuda-mps-control";
/// How long the daemon may take to list its clients.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the daemon may take for one answer. After a fault on the card it answers nobody until its clients are gone, for minutes, so that
/// they must not wait for it to go.
const ANSWER: Duration = Duration::from_secs(3);
/// How long the daemon may take to get a client's work off the card.
const FAREWELL: Duration = Duration::from_secs(10);

/// A running daemon; ended when dropped.
#[derive(Debug)]
pub(crate) struct Mps {
    control: PathBuf,
    folder: PathBuf,
    /// The card that it serves, where it was started by this process.
    card: Option<String>,
    /// Weights that its clients share, by their models.
    weights: Mutex<BTreeMap<Digest, Arc<Keeper>>>,
}

/// There is no daemon any more.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the MPS daemon is gone: {0}")]
pub(crate) struct Gone(String);

impl Mps {
    /// Starts a daemon of one card, by the driver's program, with its sockets and logs in `folder`. Its clients, which must be shown that card alone too,
    /// have no part in the others, neither in their memory nor in their faults.
    ///
    /// # Errors
    /// Ours: the system has none, or it does not start.
    pub(crate) fn start(control: PathBuf, folder: PathBuf, card: String) -> anyhow::Result<Self> {
        let daemon = Self { control, folder, card: Some(card), weights: Mutex::default() };
        let status = daemon.control().arg("-d").stdout(Stdio::null()).status();
        let status = status.with_context(|| format!("starting {CONTROL}, which comes with the driver"))?;
        anyhow::ensure!(status.success(), "{CONTROL} -d ended with {status}");
        Ok(daemon)
    }

    /// One that a process before this one left running, perhaps.
    pub(crate) fn left(control: PathBuf, folder: PathBuf) -> Self {
        Self { control, folder, card: None, weights: Mutex::default() }
    }

    /// Whom clients with this model have its weights from: they stand once on the card for all of them.
    pub(crate) fn weights(&self, model: Digest) -> Arc<Keeper> {
        self.weights.lock().unwrap_or_else(PoisonError::into_inner).entry(model).or_default().clone()
    }

    /// Whether there is none any more, as its control program says. One that is silent for a while lives: after a fault on the card it is.
    pub(crate) fn is_gone(&self) -> bool {
        self.ask("get_server_list").is_err_and(|error| error.is::<Gone>())
    }

    /// What a client's environment needs, with this percentage of threads where there is one.
    pub(crate) fn environment(&self, percentage: Option<u8>) -> Vec<(&'static str, String)> {
        let folder = self.folder.to_string_lossy().into_owned();
        let mut variables = vec![("CUDA_MPS_PIPE_DIRECTORY", folder.clone()), ("CUDA_MPS_LOG_DIRECTORY", folder)];
        variables.extend(percentage.map(|percentage| ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage.to_string())));
        variables
    }

    /// What tells the driver whether a client goes before others.
    pub(crate) fn priority(is_urgent: bool) -> (&'static str, String) {
        ("CUDA_MPS_CLIENT_PRIORITY", u32::from(!is_urgent).to_string())
    }

    /// What bounds a client's memory on a card: whatever it allocates beyond it is refused, the driver's own needs included.
    pub(crate) fn memory_limit(ordinal: usize, bytes: u64) -> (&'static str, String) {
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("{ordinal}={}M", bytes.div_ceil(1 << 20)))
    }

    /// Waits until all these processes are its clients.
    ///
    /// # Errors
    /// Ours: one is none.
    pub(crate) fn expect_clients(&self, processes: &[u32]) -> anyhow::Result<()> {
        let asked = Instant::now();
        loop {
            let clients: Vec<u32> = self.clients()?.into_iter().map(|(_, client)| client).collect();
            let Some(missing) = processes.iter().find(|process| !clients.contains(process)) else { return Ok(()) };
            anyhow::ensure!(asked.elapsed() < PATIENCE, "process {missing} is no client of the MPS daemon, whose clients are {clients:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Takes a client's work off the card, so that the process can be ended without harm to the other clients; a process that is none is let be.
    ///
    /// # Errors
    /// Ours: the daemon is not asked, or the client does not go.
    pub(crate) fn terminate(&self, process: u32) -> anyhow::Result<()> {
        let found = match self.clients().map(|clients| clients.into_iter().find(|(_, client)| *client == process)) {
            // A client of a daemon that is gone is nobody's client.
            Err(error) if error.is::<Gone>() => None,
            found => found?,
        };
        let Some((server, _)) = found else { return Ok(()) };
        // Answered once its work is off the card; it stays a client until it ends.
        self.ask_for(&format!("terminate_client {server} {process}"), FAREWELL).map(drop)
    }

    /// Servers and their clients, by their processes.
    fn clients(&self) -> anyhow::Result<Vec<(u32, u32)>> {
        let mut clients = Vec::new();
        for server in numbers(&self.ask("get_server_list")?) {
            let own = self.ask(&format!("get_client_list {server}"))?;
            clients.extend(numbers(&own).into_iter().map(|client| (server, client)));
        }
        Ok(clients)
    }

    fn ask(&self, words: &str) -> anyhow::Result<String> {
        self.ask_for(words, ANSWER)
    }

    fn ask_for(&self, words: &str, patience: Duration) -> anyhow::Result<String> {
        let mut command = self.control();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("starting {CONTROL}"))?;
        if let Some(mut input) = child.stdin.take() {
            // One that finds no daemon ends before it reads; how is seen below.
            drop(writeln!(input, "{words}"));
        }
        let asked = Instant::now();
        while child.try_wait().with_context(|| format!("asking {CONTROL}"))?.is_none() {
            if asked.elapsed() > patience {
                drop(child.kill());
                drop(child.wait());
                anyhow::bail!("the MPS daemon has not answered `{words}` for {} s", patience.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().with_context(|| format!("asking {CONTROL}"))?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        // One that was killed says nothing of the daemon.
        anyhow::ensure!(output.status.code().is_some(), "{CONTROL} ended with {} before it answered `{words}`", output.status);
        if !output.status.success() {
            return Err(Gone(format!("asked `{words}`, {CONTROL} ended with {}: {}", output.status, one_line(&said, 200))).into());
        }
        Ok(said)
    }

    fn control(&self) -> Command {
        let mut command = Command::new(&self.control);
        command.envs(self.environment(None)).envs(self.card.iter().map(|card| (VISIBLE, card)));
        command
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        if let Err(error) = self.ask("quit")
            && !error.is::<Gone>()
        {
            tracing::warn!(%error, "the MPS daemon may still run");
        }
    }
}

/// The numbers in an answer of the daemon.
fn numbers(answer: &str) -> Vec<u32> {
    answer.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::{Path, PathBuf};

    use super::{Gone, Mps, numbers};

    /// A program that acts as the driver's does: a daemon is a file in its folder, with the cards that it is shown, and every answer is made by `answer` first.
    pub(crate) fn control(folder: &Path, answer: &str) -> PathBuf {
        let program = folder.join("control");
        let text = format!(
            "#!/bin/sh\nif [ \"$1\" = -d ]; then echo \"$CUDA_VISIBLE_DEVICES\" > \"$CUDA_MPS_PIPE_DIRECTORY/alive\"; exit; fi\n\
             [ -e \"$CUDA_MPS_PIPE_DIRECTORY/alive\" ] || {{ echo 'Cannot find MPS control daemon process'; exit 1; }}\n\
             read words\n{answer}\n[ \"$words\" = quit ] && rm \"$CUDA_MPS_PIPE_DIRECTORY/alive\"\necho\n"
        );
        let dir = cap_std::fs::Dir::open_ambient_dir(folder, cap_std::ambient_authority()).unwrap();
        dir.write("control", text).unwrap();
        dir.set_permissions("control", cap_std::fs::PermissionsExt::from_mode(0o700)).unwrap();
        program
    }

    /// A daemon of such a program.
    pub(crate) fn daemon(folder: &tempfile::TempDir, answer: &str) -> Mps {
        let control = control(folder.path(), answer);
        Mps::start(control, folder.path().to_owned(), "GPU-0".to_owned()).unwrap()
    }

    #[test]
    fn a_daemon_that_is_gone_is_told_from_one_that_is_silent() {
        let folder = tempfile::tempdir().unwrap();
        let alive = daemon(&folder, "");
        assert!(!alive.is_gone() && alive.clients().unwrap().is_empty());
        let dir = cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        dir.remove_file("alive").unwrap();
        assert!(alive.is_gone());
        let error = alive.ask("get_server_list").unwrap_err();
        assert!(error.is::<Gone>() && error.to_string().contains("Cannot find"), "{error}");
        assert!(alive.terminate(1).is_ok(), "nobody is the client of a daemon that is gone");
        let folder = tempfile::tempdir().unwrap();
        let silent = daemon(&folder, "[ \"$words\" = quit ] || exec sleep 10");
        assert!(!silent.is_gone());
    }

    #[test]
    fn a_limit_is_in_whole_mebibytes_and_never_less_than_was_asked_for() {
        assert_eq!(Mps::memory_limit(1, (3 << 30) + 1), ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "1=3073M".to_owned()));
    }

    #[test]
    fn only_numbers_count_in_an_answer() {
        assert_eq!(numbers("Server 17 is\n24 25\nnone"), [17, 24, 25]);
        assert!(numbers("").is_empty());
    }
}
