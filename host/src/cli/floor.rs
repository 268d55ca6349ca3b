//! The options of the service's floor: where its jobs run.
//!
//! Parses only.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;

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
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// How long a job works between two snapshots: what is done again at most where it is interrupted [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub snapshot_every: Option<Duration>,
    /// Disk for what is kept of running jobs, a quarter of it at most for one tenant's; beyond it a job runs on and is not kept [default: 256GiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub journal_bytes: Option<u64>,
    /// Take jobs, and start none
    #[arg(long)]
    pub hold: bool,
}
