//! One MPS daemon for the processes of an arm, its folders private, and the proof that they are its clients.
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

/// A running daemon; ended when dropped.
pub(super) struct Mps {
    folder: PathBuf,
}

impl Mps {
    /// Starts a daemon whose sockets and logs lie in `folder`.
    ///
    /// # Errors
    /// Ours: the system has none, or it does not start.
    pub(super) fn start(folder: PathBuf) -> anyhow::Result<Self> {
        let daemon = Self { folder };
        let status = daemon.control().arg("-d").stdout(Stdio::null()).status();
        let status = status.with_context(|| format!("starting {CONTROL}, which comes with the driver"))?;
        anyhow::ensure!(status.success(), "{CONTROL} -d ended with {status}");
        Ok(daemon)
    }

    /// What a client's environment needs, with this percentage of threads where there is one.
    pub(super) fn environment(&self, percentage: Option<u8>) -> Vec<(&'static str, String)> {
        let folder = self.folder.to_string_lossy().into_owned();
        let mut variables = vec![("CUDA_MPS_PIPE_DIRECTORY", folder.clone()), ("CUDA_MPS_LOG_DIRECTORY", folder)];
        variables.extend(percentage.map(|percentage| ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage.to_string())));
        variables
    }

    /// What tells the driver whether a client goes before others.
    pub(super) fn priority(is_urgent: bool) -> (&'static str, String) {
        ("CUDA_MPS_CLIENT_PRIORITY", u32::from(!is_urgent).to_string())
    }

    /// Waits until all these processes are its clients.
    ///
    /// # Errors
    /// Ours: one is none.
    pub(super) fn expect_clients(&self, processes: &[u32]) -> anyhow::Result<()> {
        let asked = Instant::now();
        loop {
            let servers = self.ask("get_server_list")?;
            let mut clients = String::new();
            for server in servers.split_whitespace().filter(|word| word.parse::<u32>().is_ok()) {
                clients += &self.ask(&format!("get_client_list {server}"))?;
            }
            let clients: Vec<u32> = clients.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            let Some(missing) = processes.iter().find(|process| !clients.contains(process)) else { return Ok(()) };
            anyhow::ensure!(asked.elapsed() < PATIENCE, "process {missing} is no client of the MPS daemon, whose clients are {clients:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn ask(&self, words: &str) -> anyhow::Result<String> {
        let mut child =
            self.control().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().with_context(|| format!("starting {CONTROL}"))?;
        if let Some(input) = &mut child.stdin {
            writeln!(input, "{words}").with_context(|| format!("asking {CONTROL}"))?;
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
