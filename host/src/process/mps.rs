//! An MPS daemon with folders of its own, the proof that processes are its clients, and how one is ended without harm to the others.
//!
//! Leaves the card's compute mode alone. A program whose daemon is not reachable runs without MPS and says nothing, so that it is asked.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

const CONTROL: &str = "nvidia-cuda-mps-control";
/// How long the daemon may take to list its clients.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the daemon may take for one answer. After a fault on the card it answers nobody until its clients are gone, for minutes, so that
/// they must not wait for it to go.
const ANSWER: Duration = Duration::from_secs(3);
/// How long a client that is told off may take to be gone.
const FAREWELL: Duration = Duration::from_secs(10);

/// A running daemon; ended when dropped.
#[derive(Debug)]
pub(crate) struct Mps {
    folder: PathBuf,
}

impl Mps {
    /// Starts a daemon whose sockets and logs lie in `folder`.
    ///
    /// # Errors
    /// Ours: the system has none, or it does not start.
    pub(crate) fn start(folder: PathBuf) -> anyhow::Result<Self> {
        let daemon = Self { folder };
        let status = daemon.control().arg("-d").stdout(Stdio::null()).status();
        let status = status.with_context(|| format!("starting {CONTROL}, which comes with the driver"))?;
        anyhow::ensure!(status.success(), "{CONTROL} -d ended with {status}");
        Ok(daemon)
    }

    /// One that a process before this one left running, perhaps.
    pub(crate) fn left(folder: PathBuf) -> Self {
        Self { folder }
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
        let asked = Instant::now();
        let find = || self.clients().map(|clients| clients.into_iter().find(|(_, client)| *client == process));
        let Some((server, _)) = find()? else { return Ok(()) };
        self.ask(&format!("terminate_client {server} {process}"))?;
        while find()?.is_some() {
            anyhow::ensure!(asked.elapsed() < FAREWELL, "process {process} is still a client of the MPS daemon after terminate_client");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
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
        let mut child =
            self.control().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().with_context(|| format!("starting {CONTROL}"))?;
        if let Some(mut input) = child.stdin.take() {
            writeln!(input, "{words}").with_context(|| format!("asking {CONTROL}"))?;
        }
        let asked = Instant::now();
        while child.try_wait().with_context(|| format!("asking {CONTROL}"))?.is_none() {
            if asked.elapsed() > ANSWER {
                drop(child.kill());
                drop(child.wait());
                anyhow::bail!("the MPS daemon has not answered `{words}` for {} s", ANSWER.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().with_context(|| format!("asking {CONTROL}"))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn control(&self) -> Command {
        let mut command = Command::new(CONTROL);
        command.envs(self.environment(None));
        command
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        if let Err(error) = self.ask("quit") {
            tracing::warn!(%error, "the MPS daemon may still run");
        }
    }
}

/// The numbers in an answer of the daemon.
fn numbers(answer: &str) -> Vec<u32> {
    answer.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::{Mps, numbers};

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
