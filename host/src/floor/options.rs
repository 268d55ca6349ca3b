//! The operator's numbers, and the devices that there are.
//!
//! Holds numbers only; what they are for is said where they are used.

use std::time::Duration;

use anyhow::Context as _;
use nodus_kernels::cuda::can_share;
use nodus_schedule::Rules;

use crate::app::Surroundings;
use crate::cli::{DeviceArgs, DeviceChoice, FloorArgs};
use crate::cuda::{self, DeviceEnv};
use crate::engine::Watch;
use crate::error::user;
use crate::guest::Terms;
use crate::journal::DISK_BYTES_MAX;
use crate::machine::{self, MEMORY_FILE};
use crate::run::choice::{asked, free_card_bytes};

/// Time between two snapshots of a job, where the operator does not say.
pub(crate) const SNAPSHOT_EVERY: Duration = Duration::from_secs(30);

/// A device that jobs run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) device: DeviceChoice,
    /// Of a card: what processes that are to see it alone are told.
    pub(crate) card: Option<String>,
    /// Bytes for engines and jobs.
    pub(crate) memory_bytes: u64,
    /// Whether MPS clients have a model's weights once between them.
    pub(crate) shares_weights: bool,
}

/// How the floor works.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) places: Vec<Place>,
    /// Type, threads and trunk cache of every engine.
    pub(crate) device: DeviceArgs,
    pub(crate) environment: DeviceEnv,
    pub(crate) rules: Rules,
    pub(crate) watch: Watch,
    pub(crate) terms: Terms,
    /// Threads of a guest process.
    pub(crate) guest_threads: usize,
    /// Failures of the host, or of its guest process, that one job may meet while the service runs.
    pub(crate) faults_max: u32,
    /// How long a job waits after its first such failure; twice as long after each further one.
    pub(crate) backoff: Duration,
    /// How long a job works between two snapshots of it: what is done again at most where it is interrupted.
    pub(crate) snapshot_every: Duration,
    /// Bytes of all jobs' journals on the disk.
    pub(crate) journal_bytes_max: u64,
    /// Jobs of one tenant's line that are looked at; the others wait behind them.
    pub(crate) window: usize,
}

impl Options {
    /// What holds without a word.
    ///
    /// # Errors
    /// Ours: the system does not say how many threads it has.
    pub(crate) fn new(places: Vec<Place>, device: DeviceArgs, environment: DeviceEnv, terms: Terms) -> anyhow::Result<Self> {
        let rules = Rules { device_jobs_max: 64, device_mps_max: 48, patience_ms: 60_000, idle_ms_max: 300_000, quantum_ns: 1_000_000_000 };
        let watch = Watch { start: Duration::from_secs(1800), silence: Duration::from_secs(60), pass: Duration::from_secs(900) };
        let guest_threads = machine::threads(device.threads)?;
        let backoff = Duration::from_secs(1);
        Ok(Self {
            places,
            device,
            environment,
            rules,
            watch,
            terms,
            guest_threads,
            faults_max: 5,
            backoff,
            snapshot_every: SNAPSHOT_EVERY,
            journal_bytes_max: DISK_BYTES_MAX,
            window: 64,
        })
    }
}

impl Options {
    /// What the operator says of them.
    pub(crate) fn with(mut self, args: &FloorArgs) -> Self {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.rules.device_jobs_max = args.device_jobs.map_or(self.rules.device_jobs_max, |count| count.get() as u64);
        self.rules.device_mps_max = args.mps_engines.map_or(self.rules.device_mps_max, |count| count.get() as u64);
        self.rules.patience_ms = args.patience.map_or(self.rules.patience_ms, ms);
        self.rules.idle_ms_max = args.idle.map_or(self.rules.idle_ms_max, ms);
        self.watch.pass = args.pass_time.unwrap_or(self.watch.pass);
        self.journal_bytes_max = args.journal_bytes.unwrap_or(self.journal_bytes_max);
        self.snapshot_every = args.snapshot_every.unwrap_or(self.snapshot_every);
        self
    }
}

/// The devices that jobs may run on: those asked for, else the one that a run would take.
///
/// # Errors
/// The operator's: a device is not there, or nothing says how much memory it has.
pub(crate) fn places(surroundings: &Surroundings, devices: &[DeviceChoice], memory: Option<u64>) -> anyhow::Result<Vec<Place>> {
    let devices = if devices.is_empty() { vec![asked(None, surroundings)?] } else { devices.to_vec() };
    devices.into_iter().map(|device| place(surroundings, device, memory)).collect()
}

fn place(surroundings: &Surroundings, device: DeviceChoice, memory: Option<u64>) -> anyhow::Result<Place> {
    let folders = cuda::folders(surroundings.paths, &surroundings.devices);
    let card = match device {
        DeviceChoice::Cpu => None,
        DeviceChoice::Cuda(ordinal) => {
            Some(cuda::card(ordinal, &folders).map_err(|why| user(format!("device cuda:{ordinal} cannot be used: {why}")))?)
        }
        DeviceChoice::Auto => cuda::card(0, &folders).ok(),
    };
    let Some(card) = card else {
        let available = || machine::memory(surroundings.paths).map(|memory| memory.available);
        let memory_bytes = memory.or_else(available);
        let memory_bytes = memory_bytes.ok_or_else(|| user(format!("{MEMORY_FILE} does not tell the machine's memory: give --memory")))?;
        return Ok(Place { device: DeviceChoice::Cpu, card: None, memory_bytes, shares_weights: false });
    };
    let memory_bytes = match memory {
        Some(bytes) => bytes,
        None => free_card_bytes(card.ordinal).context("asking the card for its memory")?,
    };
    let shares_weights = can_share(card.ordinal).context("asking the card whether processes can share memory")?;
    Ok(Place { device: DeviceChoice::Cuda(card.ordinal), card: Some(cuda::lasting_name(&card)), memory_bytes, shares_weights })
}
