//! The options of the service's floor: where its jobs run.
//!
//! Parses only.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;

use super::client::RemoteLane;
use super::device::{DeviceChoice, Dtype};
use crate::text::{parse_bytes, parse_seconds};

/// Where and how a service's jobs run. But for device and type none of it changes a result.
#[derive(Clone, Debug, Default, Args)]
pub struct FloorArgs {
    /// A device for jobs: cpu, cuda, cuda:N or auto. May be given many times [default: NODUS_DEVICE, else auto]
    #[arg(long = "device", value_name = "DEVICE")]
    pub devices: Vec<DeviceChoice>,
    /// What frozen weights and activations are computed in on a card [default: the type that each model is stored in, f16 as bf16]
    #[arg(long, value_enum)]
    pub dtype: Option<Dtype>,
    /// CPU threads of each engine, and of each guest process [default: all]
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Memory of each engine for activations of the frozen layers that later epochs use again [default: 256MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub trunk_cache: Option<u64>,
    /// Memory of each device for engines and jobs, such as 8GiB [default: what it has free at the start]
    #[arg(long, value_name = "BYTES", value_parser = parse_memory)]
    pub memory: Option<u64>,
    /// How long a job works between two snapshots: what is done again at most where it is interrupted [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub snapshot_every: Option<Duration>,
    /// Disk for what is kept of running jobs, a quarter of it at most for one tenant's; beyond it a job runs on and is not kept [default: 256GiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub journal_bytes: Option<u64>,
    /// The lanes that tenants may choose: fused, mps, solo [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LANES")]
    pub lanes: Vec<RemoteLane>,
    /// Engines of the lane mps on each device at once; more jobs of that lane wait [default: 48]
    #[arg(long, value_name = "N")]
    pub mps_engines: Option<NonZeroUsize>,
    /// Jobs on each device at once [default: 64]
    #[arg(long, value_name = "N")]
    pub device_jobs: Option<NonZeroUsize>,
    /// How long a tenant waits before others that have more give way, and a job works before it does [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub patience: Option<Duration>,
    /// How long an engine without jobs stays, and a process of a tenant's guests [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub idle: Option<Duration>,
    /// How long one pass may take before its engine counts as one that hangs [default: 900]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub pass_time: Option<Duration>,
    /// Take jobs, and start none
    #[arg(long)]
    pub hold: bool,
}

/// Less than this holds no model and no job.
const MEMORY_BYTES_MIN: u64 = 16 << 20;

/// Memory of a device.
///
/// # Errors
/// What would be right.
pub(crate) fn parse_memory(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes if bytes < MEMORY_BYTES_MIN => Err("that holds no model: expected at least 16MiB, such as 8GiB".to_owned()),
        bytes => Ok(bytes),
    }
}

impl FloorArgs {
    /// These, and where they say nothing, those.
    #[must_use]
    pub fn over(self, other: Self) -> Self {
        fn first<T>(these: Vec<T>, those: Vec<T>) -> Vec<T> {
            if these.is_empty() { those } else { these }
        }
        Self {
            devices: first(self.devices, other.devices),
            dtype: self.dtype.or(other.dtype),
            threads: self.threads.or(other.threads),
            trunk_cache: self.trunk_cache.or(other.trunk_cache),
            memory: self.memory.or(other.memory),
            snapshot_every: self.snapshot_every.or(other.snapshot_every),
            journal_bytes: self.journal_bytes.or(other.journal_bytes),
            lanes: first(self.lanes, other.lanes),
            mps_engines: self.mps_engines.or(other.mps_engines),
            device_jobs: self.device_jobs.or(other.device_jobs),
            patience: self.patience.or(other.patience),
            idle: self.idle.or(other.idle),
            pass_time: self.pass_time.or(other.pass_time),
            hold: self.hold || other.hold,
        }
    }
}
