//! The options of `run`.
//!
//! Parses only; what a name or a file means is looked up elsewhere.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::SandboxArgs;
use super::device::DeviceArgs;
use crate::limits::Limit;
use crate::name::Name;
use crate::settings::Setting;
use crate::sweep::Sweep;
use crate::text::{parse_bytes, parse_seconds};

/// One run: one job, the members of a sweep, or the jobs of a manifest.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The component, for example sft.wasm
    #[arg(required_unless_present = "manifest", conflicts_with = "manifest")]
    pub component: Option<PathBuf>,
    /// Name of the base model
    #[arg(long, value_name = "NAME", required_unless_present = "manifest", conflicts_with = "manifest")]
    pub model: Option<Name>,
    /// Name of the data set to train on
    #[arg(long, value_name = "NAME", required_unless_present = "manifest", conflicts_with = "manifest")]
    pub data: Option<Name>,
    /// What the job may evaluate on.
    #[command(flatten)]
    pub held_out: HeldOutArgs,
    /// A JSON file with the job's parameters
    #[arg(long, value_name = "FILE", conflicts_with = "manifest")]
    pub params: Option<PathBuf>,
    /// One parameter, over those of the file; the value is JSON, else a string. May be given many times
    #[arg(long = "set", value_name = "KEY=VALUE", conflicts_with = "manifest")]
    pub settings: Vec<Setting>,
    /// A parameter and the values to try; with several, all their combinations. The members run together, each in a folder of its own
    #[arg(long = "sweep", value_name = "KEY=V1,V2", conflicts_with = "manifest")]
    pub sweeps: Vec<Sweep>,
    /// Seed of everything random in the job; all members of a sweep have the same
    #[arg(long, default_value_t = 0, conflicts_with = "manifest")]
    pub seed: u64,
    /// A limit of each job over its default, such as device-bytes=512MiB or wall-ms=60000; receipts record all limits. May be given many
    /// times; a job of a manifest may have its own over these
    #[arg(long = "limit", value_name = "NAME=VALUE")]
    pub limits: Vec<Limit>,
    /// A TOML file that lists jobs to run together, each in a folder of its own
    #[arg(long, value_name = "FILE", conflicts_with_all = ["held_out", "held_out_fraction", "held_out_count"])]
    pub manifest: Option<PathBuf>,
    /// Run jobs together in shared passes, or one after another, each alone; results do not depend on it
    #[arg(long, value_enum, default_value_t = Lane::Fused)]
    pub lane: Lane,
    /// Jobs that run at the same time at most [default: all]
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Which device, and how it is used.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// How the components are kept apart.
    #[command(flatten)]
    pub sandbox: SandboxArgs,
    /// Go on with a run into the same folder that was interrupted (killed, cut off by a second Ctrl-C, failed by the host), from what it kept; all else
    /// must be given as it was. The results are those of a run that nothing interrupted
    #[arg(long)]
    pub resume: bool,
    /// How long a job works between two snapshots: what is done again at most where it is interrupted
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "30")]
    pub snapshot_every: Duration,
    /// Disk for what is kept of the jobs so that they can go on, beside the results: a job that finds no room there goes on, is not kept any more, and
    /// begins anew where it is interrupted
    #[arg(long, value_name = "BYTES", value_parser = parse_journal_bytes, default_value = "64GiB")]
    pub journal_bytes: u64,
    /// A folder for the results; must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Fewer bytes than this keep no job.
const JOURNAL_BYTES_MIN: u64 = 1 << 20;

fn parse_journal_bytes(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes if bytes < JOURNAL_BYTES_MIN => Err("that keeps no job: expected at least 1MiB, such as 64GiB".to_owned()),
        bytes => Ok(bytes),
    }
}

/// How jobs share the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lane {
    /// In one engine, passes shared with the others on the same model.
    Fused,
    /// One after another, each on an engine of its own.
    Solo,
}

impl Lane {
    /// As receipts write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fused => "fused",
            Self::Solo => "solo",
        }
    }
}

/// At most one way to name a held-out part.
#[derive(Clone, Debug, Default, PartialEq, Args)]
#[group(multiple = false)]
pub struct HeldOutArgs {
    /// Name of a second data set to evaluate on
    #[arg(long, value_name = "NAME")]
    pub held_out: Option<Name>,
    /// Hold this part of the data out, above 0 and below 1; which rows does not depend on the seed
    #[arg(long, value_name = "F", value_parser = fraction)]
    pub held_out_fraction: Option<f64>,
    /// Hold so many rows of the data out
    #[arg(long, value_name = "N")]
    pub held_out_count: Option<NonZeroUsize>,
}

pub(super) fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value < 1.0 => Ok(value),
        _ => Err("expected a number above 0 and below 1".to_owned()),
    }
}
