//! The demo's service, its host and its tenants: the program's own command line, as each of them uses it.
//!
//! Leaves no process behind.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::steps::{output, run};

/// The binary and its throw-away data folder: the operator.
pub(crate) struct Host {
    pub(crate) binary: PathBuf,
    pub(crate) data: PathBuf,
}

impl Host {
    /// Runs a command on this machine.
    pub(crate) fn run(&self, args: &[&str]) -> anyhow::Result<()> {
        run(self.command().args(args))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command.env("NODUS_DATA_DIR", &self.data);
        command
    }
}

/// A service that listens on a free port; ended when dropped.
pub(crate) struct Service {
    child: Child,
    pub(crate) url: String,
}

impl Service {
    /// Starts it; `sft` is the ready-made component, `log` what it says.
    pub(crate) fn start(host: &Host, sft: &str, log: &Path) -> anyhow::Result<Self> {
        let log = std::fs::File::create(log).with_context(|| format!("making {}", log.display()))?;
        let mut command = host.command();
        command.args(["serve", "--listen", "127.0.0.1:0", "--component", &format!("sft={sft}")]).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().context("starting the service")?;
        let mut lines = BufReader::new(child.stdout.take().context("the service's output")?).lines();
        let url = lines.find_map(|line| Some(line.ok()?.strip_prefix("listening on ")?.to_owned()));
        let service = Self { child, url: url.unwrap_or_default() };
        ensure!(!service.url.is_empty(), "the service ended before it listened; what it said stands in its log");
        Ok(service)
    }

    /// Has it end as an operator does.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        run(Command::new("kill").args(["-TERM", &self.child.id().to_string()]))?;
        let status = self.child.wait().context("waiting for the service")?;
        ensure!(status.success(), "the service ended with {status}");
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }
}

/// Somebody who knows the service by its address and a token.
pub(crate) struct Tenant<'a> {
    host: &'a Host,
    pub(crate) token: String,
}

/// What a submission became: a sweep, or one job.
#[derive(Debug, Deserialize)]
pub(crate) struct Submitted {
    /// The sweep's id.
    pub(crate) cohort: String,
    pub(crate) jobs: Vec<Job>,
}

/// A submitted job.
#[derive(Debug, Deserialize)]
pub(crate) struct Job {
    pub(crate) id: String,
}

impl<'a> Tenant<'a> {
    /// A new tenant of the host; the token is told once.
    pub(crate) fn add(host: &'a Host, name: &str) -> anyhow::Result<Self> {
        let told = output(host.command().args(["tenant", "add", name]))?;
        let token = told.split_whitespace().find(|word| word.starts_with("nodus_")).context("no token in what `tenant add` said")?;
        Ok(Self { host, token: token.to_owned() })
    }

    /// Submits a job or a sweep; the arguments ask for JSON.
    pub(crate) fn submit<'s>(&self, service: &Service, component: &str, args: impl Iterator<Item = &'s str>) -> anyhow::Result<Submitted> {
        let told = output(self.command(service).args(["submit", component]).args(args))?;
        serde_json::from_str(&told).context("reading what `submit` said")
    }

    /// Runs a command against the service.
    pub(crate) fn run(&self, service: &Service, args: &[&str]) -> anyhow::Result<()> {
        run(self.command(service).args(args))
    }

    /// Without the host's data folder: a tenant has none of it.
    fn command(&self, service: &Service) -> Command {
        let mut command = Command::new(&self.host.binary);
        command.env("NODUS_URL", &service.url).env("NODUS_TOKEN", &self.token);
        command
    }
}
