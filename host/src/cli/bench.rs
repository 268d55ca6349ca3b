//! The options of `bench`.
//!
//! Parses only; what an arm does is told elsewhere.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use nodus_protocol::LayerSelection;

use super::device::DeviceArgs;
use crate::bench::arm::Arm;
use crate::bench::variant::Variant;
use crate::name::Name;

/// Measurements.
#[derive(Debug, Subcommand)]
pub enum BenchMode {
    /// Jobs of one learning-rate sweep: same model, same data, the frozen trunk below the adapters computed once where it is shared
    Sweep(BenchArgs),
    /// Unrelated tenants on one model: every job has its own data, seed and rank
    Tenants(BenchArgs),
    /// Jobs of a sweep or of tenants by PyTorch and PEFT beside ours, their losses held against ours within a tolerance
    Peer {
        /// A Python with torch, transformers and peft
        #[arg(long, default_value = "python3", value_name = "PATH")]
        python: PathBuf,
        /// Jobs of unrelated tenants in place of members of a sweep
        #[arg(long)]
        tenants: bool,
        /// How far a loss may be from ours [default: 1e-3 in f32, 5e-2 in bf16]
        #[arg(long)]
        tolerance: Option<f64>,
        /// The measurement.
        #[command(flatten)]
        args: BenchArgs,
    },
    /// Hold two reports against each other, row by row; exit code 2 where B is slower
    Compare {
        /// The report to start from: a report.json
        a: PathBuf,
        /// The report to judge: a report.json
        b: PathBuf,
        /// Per cent that a row may be slower
        #[arg(long, default_value_t = 5.0, value_parser = percentage)]
        tolerance: f64,
    },
    /// Run every job of a measurement again, alone, in a process of its own, and hold it against the receipts of all arms
    Audit {
        /// A folder that `bench sweep` or `bench tenants` wrote
        folder: PathBuf,
        /// Which device, and how it is used; as in the measurement
        #[command(flatten)]
        device: DeviceArgs,
    },
    /// Put several measurements into one report, with the tables that they have something for
    Merge {
        /// Reports, each a report.json
        #[arg(required = true)]
        reports: Vec<PathBuf>,
        /// A folder for report.json and report.html; must not exist or be empty
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Run some jobs of a measurement; started by this program itself
    #[command(hide = true)]
    Worker {
        /// What decides where it computes.
        #[command(flatten)]
        device: DeviceArgs,
        /// Where adapters are kept by digest
        #[arg(long)]
        keep: PathBuf,
        /// Standard input is a socket, over which another comes first: whom the weights are shared with
        #[arg(long)]
        linked: bool,
    },
}

/// One measurement.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Name of the model; `model import --random llama-1.1b` makes one of a known shape
    #[arg(long, value_name = "NAME")]
    pub model: Name,
    /// Layers that carry adapters: all, or last:K for the top K
    #[arg(long, default_value = "last:1", value_name = "LAYERS")]
    pub layers: Layers,
    /// Jobs
    #[arg(long, default_value = "16", value_name = "N")]
    pub jobs: NonZeroUsize,
    /// Sequences of a batch and tokens of a sequence
    #[arg(long, default_value = "4x512", value_name = "SxT")]
    pub shape: BatchShape,
    /// Part of the positions that carry a label, above 0 and at most 1
    #[arg(long, default_value_t = 1.0, value_parser = part)]
    pub labelled: f64,
    /// Batches of an epoch
    #[arg(long, default_value = "16", value_name = "N")]
    pub batches: NonZeroUsize,
    /// Epochs over the same batches
    #[arg(long, default_value = "1", value_name = "N")]
    pub epochs: NonZeroUsize,
    /// Steps before the clock starts, on other data; an even number, since each batch is taken twice so that a cache's way is warm too
    #[arg(long, default_value_t = 4, value_parser = even)]
    pub warmup: u32,
    /// Rank of the adapters; jobs of `tenants` have a quarter of it, half of it and so on in turn
    #[arg(long, default_value = "8", value_name = "R")]
    pub rank: NonZeroUsize,
    /// Of data and adapters
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Arms to run, of all [default: all that this device has]. The dedicated arm always runs: the others are checked against it
    #[arg(long, value_delimiter = ',', value_enum)]
    pub arms: Vec<Arm>,
    /// How every arm's launches reach the card: at their best, or with one of their means taken away, to see what it brings
    #[arg(long, value_enum, default_value_t = Variant::Base)]
    pub variant: Variant,
    /// Run every arm of ours whose jobs are at work at once a second time, with one more job of high priority, and tell how its steps fare
    #[arg(long)]
    pub foreground: bool,
    /// TFLOP/s that the device's matrix products reach, for the floor under each time [default: what is known of the device, else no floor]
    #[arg(long, value_name = "TFLOPS", value_parser = above_zero)]
    pub peak: Option<f64>,
    /// Price of the device for an hour, in whatever currency
    #[arg(long, default_value_t = 1.0)]
    pub price: f64,
    /// What the report calls this machine
    #[arg(long, default_value = "host", value_name = "LABEL")]
    pub label: Name,
    /// Which device, and how it is used.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// A folder for report.json, report.html and adapters/; must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Layers with adapters.
#[derive(Clone, Debug, PartialEq)]
pub struct Layers(pub LayerSelection);

/// The shape of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of each.
    pub length: usize,
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            LayerSelection::Last(last) => write!(f, "last:{last}"),
            _ => f.write_str("all"),
        }
    }
}

impl fmt::Display for BatchShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.sequences, self.length)
    }
}

impl FromStr for Layers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let layers = match text {
            "all" => Some(LayerSelection::All),
            _ => text.strip_prefix("last:").and_then(|number| number.parse().ok()).filter(|last| *last > 0).map(LayerSelection::Last),
        };
        layers.map(Self).ok_or_else(|| "expected all or last:K, for example last:1".to_owned())
    }
}

impl FromStr for BatchShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|number| *number > 0);
        let shape = text.split_once('x').and_then(|(s, t)| Some(Self { sequences: number(s)?, length: number(t)? }));
        shape.ok_or_else(|| "expected sequences x tokens, for example 4x512".to_owned())
    }
}

fn part(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err("expected a number above 0 and at most 1".to_owned()),
    }
}

fn percentage(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..100.0).contains(&value) => Ok(value),
        _ => Err("expected per cent, from 0 to below 100".to_owned()),
    }
}

fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err("expected a number above 0".to_owned()),
    }
}

fn even(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(value) if value.is_multiple_of(2) => Ok(value),
        _ => Err("expected an even number, 0 or more".to_owned()),
    }
}
