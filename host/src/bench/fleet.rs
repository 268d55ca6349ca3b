//! The processes of one arm: started, made ready, sent off together, and waited for.
//!
//! Measures an arm as a whole; a process measures itself.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use serde::de::DeserializeOwned;

use super::activity::{Activity, Stretch};
use super::arm::{Arm, Company};
use super::variant::Variant;
use super::words::{Done, Order, PeerOrder, Ready};
use super::work::Work;
use crate::cli::{DeviceArgs, DeviceChoice};
use crate::cuda::{ALONE, VISIBLE};
use crate::process::handover::give;
use crate::process::mps::{CONTROL, Mps};
use crate::process::spawn::program;
use crate::process::weights::Keeper;

/// Where and how workers run.
pub(super) struct Yard<'a> {
    pub(super) data_dir: &'a Path,
    /// Where adapters are kept.
    pub(super) keep: &'a Path,
    /// A folder of ours that nobody else looks into.
    pub(super) private: &'a Path,
    pub(super) device: DeviceArgs,
    pub(super) variant: Variant,
    /// The device's [lasting name](crate::cuda::lasting_name) where it is a card: what runs is shown that one alone.
    pub(super) card: Option<String>,
    pub(super) peer: Option<Peer>,
    /// Where the card tells how busy it is.
    pub(super) activity: Option<Activity>,
}

/// PyTorch, and what it is given.
pub(super) struct Peer {
    pub(super) python: PathBuf,
    /// As PyTorch calls it.
    pub(super) device: String,
    pub(super) dtype: String,
    /// The model's folder, where it is no recipe.
    pub(super) folder: Option<PathBuf>,
    pub(super) recipe: Option<serde_json::Value>,
}

/// What an arm took.
pub(super) struct Taken {
    /// Measured steps alone: of processes one after another the sum.
    pub(super) steady_seconds: f64,
    /// From the start of a process to its end: of processes one after another the sum.
    pub(super) cold_seconds: f64,
    pub(super) ready: Vec<Ready>,
    pub(super) done: Vec<Done>,
    /// How busy the card was in the measured steps.
    pub(super) activity: Vec<Stretch>,
}

impl Yard<'_> {
    /// Runs the jobs as an arm does; `note` hears how far it is.
    ///
    /// # Errors
    /// Ours: a process failed.
    pub(super) fn run(&self, arm: Arm, work: &Work, mut note: impl FnMut(&str)) -> anyhow::Result<Taken> {
        self.carry_out(arm, work, arm.processes(work.jobs), &mut note)
    }

    /// Runs the jobs as an arm does with one more in the foreground; in the dedicated arm that one alone.
    ///
    /// # Errors
    /// Ours: a process failed.
    pub(super) fn run_beside(&self, arm: Arm, work: &Work, mut note: impl FnMut(&str)) -> anyhow::Result<Taken> {
        let urgent = work.jobs;
        let mut processes = if arm == Arm::Dedicated { Vec::new() } else { arm.processes(urgent) };
        match (arm.company(), processes.as_mut_slice()) {
            (Company::Alone, [one]) => one.push(urgent),
            _ => processes.push(vec![urgent]),
        }
        note("with a job in the foreground:");
        self.carry_out(arm, work, processes, &mut note)
    }

    fn carry_out(&self, arm: Arm, work: &Work, processes: Vec<Vec<u32>>, note: &mut impl FnMut(&str)) -> anyhow::Result<Taken> {
        let order = |jobs: Vec<u32>| {
            let urgent = jobs.contains(&work.jobs).then_some(work.jobs);
            Order { work: work.clone(), jobs, shares: arm.shares() || arm.keeps(), variant: self.variant, urgent }
        };
        let orders: Vec<Order> = processes.into_iter().map(order).collect();
        match arm.company() {
            Company::Alone => self.one_by_one(arm, &orders, note),
            Company::Together(percentage) => self.together(arm, &orders, percentage, note),
        }
    }

    fn one_by_one(&self, arm: Arm, orders: &[Order], note: &mut impl FnMut(&str)) -> anyhow::Result<Taken> {
        let mut taken = Taken { steady_seconds: 0.0, cold_seconds: 0.0, ready: Vec::new(), done: Vec::new(), activity: Vec::new() };
        for (number, order) in orders.iter().enumerate() {
            note(&format!("{}: process {} of {}", arm.name(), number + 1, orders.len()));
            let began = Instant::now();
            let mut worker = Worker::start(self, arm, order, &[], None)?;
            taken.ready.push(worker.ready()?);
            let (done, activity) = self.watch(|| worker.go().and_then(|()| worker.result()));
            let done = done?;
            worker.end()?;
            taken.activity.extend(activity);
            taken.cold_seconds += began.elapsed().as_secs_f64();
            taken.steady_seconds += done.seconds;
            taken.done.push(done);
        }
        Ok(taken)
    }

    fn together(&self, arm: Arm, orders: &[Order], percentage: Option<u8>, note: &mut impl FnMut(&str)) -> anyhow::Result<Taken> {
        note(&format!("{}: {} processes at once", arm.name(), orders.len()));
        let mps = self.card.clone().map(|card| Mps::start(CONTROL.into(), self.private.to_owned(), card)).transpose()?;
        let is_mixed = orders.iter().any(|order| order.urgent.is_some());
        let environment = |order: &Order| {
            let mut environment = mps.as_ref().map_or_else(Vec::new, |mps| mps.environment(percentage));
            environment.extend(mps.as_ref().filter(|_| is_mixed).map(|_| Mps::priority(order.urgent.is_some())));
            environment
        };
        let began = Instant::now();
        let keeper = (mps.is_some() && arm.shares_weights()).then(Arc::<Keeper>::default);
        let start = |order| Worker::start(self, arm, order, &environment(order), keeper.as_ref());
        let mut workers = orders.iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
        let ready = workers.iter_mut().map(Worker::ready).collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(mps) = &mps {
            let ids: Vec<u32> = workers.iter().map(|worker| worker.child.id()).collect();
            mps.expect_clients(&ids)?;
        }
        let (done, activity) = self.watch(|| {
            workers.iter_mut().try_for_each(Worker::go)?;
            workers.iter_mut().map(Worker::result).collect::<anyhow::Result<Vec<_>>>()
        });
        let done = done?;
        // All went at once, so that the slowest process's time is that of all.
        let steady_seconds = done.iter().map(|done| done.seconds).fold(0.0, f64::max);
        workers.into_iter().try_for_each(Worker::end)?;
        Ok(Taken { steady_seconds, cold_seconds: began.elapsed().as_secs_f64(), ready, done, activity })
    }

    fn watch<T>(&self, work: impl FnOnce() -> T) -> (T, Vec<Stretch>) {
        match &self.activity {
            Some(activity) => activity.during(work),
            None => (work(), Vec::new()),
        }
    }
}

/// One process.
struct Worker {
    child: Child,
    input: UnixStream,
    output: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a process with its order.
    fn start(
        yard: &Yard<'_>,
        arm: Arm,
        order: &Order,
        environment: &[(&str, String)],
        weights: Option<&Arc<Keeper>>,
    ) -> anyhow::Result<Self> {
        let (mut command, order) = match (arm.peer(), &yard.peer) {
            (None, _) => (Self::ours(yard, arm, weights.is_some())?, serde_json::to_string(order)?),
            (Some(mode), Some(peer)) => (peer.command(), serde_json::to_string(&peer.order(order, mode))?),
            (Some(_), None) => anyhow::bail!("an arm of PyTorch without a Python"),
        };
        command.envs(yard.card.iter().map(|card| (VISIBLE, card))).envs(environment.iter().map(|(name, value)| (name, value)));
        let (input, theirs) = UnixStream::pair().context("making a socket")?;
        if let Some(keeper) = weights {
            let (link, _) = keeper.link().context("making a socket for a worker's weights")?;
            give(&input, &[link.as_fd()]).context("handing a socket to a worker process")?;
        }
        let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::piped()).spawn();
        let mut child = child.with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
        let output = child.stdout.take().context("a worker's output")?;
        let mut worker = Self { child, input, output: BufReader::new(output) };
        worker.say(&order)?;
        Ok(worker)
    }

    /// This program, to work with the device's options.
    fn ours(yard: &Yard<'_>, arm: Arm, is_linked: bool) -> anyhow::Result<Command> {
        let mut command = Command::new(program().context("finding this program")?);
        command.arg("--data-dir").arg(yard.data_dir).args(["bench", "worker", "--keep"]).arg(yard.keep);
        command.args(is_linked.then_some("--linked"));
        let DeviceArgs { device, dtype, threads, trunk_cache, memory } = yard.device;
        let device = if yard.card.is_some() { Some(DeviceChoice::Cuda(ALONE)) } else { device };
        // Without a word the engine keeps what fits; an arm that keeps nothing says so.
        let cache = if arm.keeps() { trunk_cache } else { Some(0) };
        let options = [
            ("--device", device.map(|device| device.to_string())),
            ("--dtype", dtype.map(|dtype| dtype.to_string())),
            ("--threads", threads.map(|threads| threads.to_string())),
            ("--trunk-cache", cache.map(|bytes| bytes.to_string())),
            ("--memory", memory.map(|bytes| bytes.to_string())),
        ];
        for (name, value) in options.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            command.args([name, &value]);
        }
        Ok(command)
    }

    fn say(&mut self, line: &str) -> anyhow::Result<()> {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush()).context("telling a worker process")
    }

    fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).context("listening to a worker process")?;
        anyhow::ensure!(read > 0, "a worker process ended early; what it said stands above");
        serde_json::from_str(&line).context("a worker process said something else than was expected")
    }

    fn ready(&mut self) -> anyhow::Result<Ready> {
        self.hear()
    }

    fn go(&mut self) -> anyhow::Result<()> {
        self.say("go")
    }

    fn result(&mut self) -> anyhow::Result<Done> {
        self.hear()
    }

    fn end(mut self) -> anyhow::Result<()> {
        let status = self.child.wait().context("waiting for a worker process")?;
        anyhow::ensure!(status.success(), "a worker process ended with {status}");
        Ok(())
    }
}

impl Peer {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.arg("-c").arg(include_str!("peer.py"));
        command
    }

    fn order<'a>(&'a self, order: &'a Order, mode: &'a str) -> PeerOrder<'a> {
        let Self { device, dtype, folder, recipe, .. } = self;
        PeerOrder { work: &order.work, jobs: &order.jobs, mode, device, dtype, folder: folder.as_deref(), recipe: recipe.as_ref() }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After a failure of another; one that ended is not touched.
        if matches!(self.child.try_wait(), Ok(None)) {
            drop(self.child.kill());
            drop(self.child.wait());
        }
    }
}
