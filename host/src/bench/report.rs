//! The rows of a measurement, with everything that a reader needs to judge one, and the file that keeps them.
//!
//! A row whose check failed has no ratio; rows of different device classes are never held against each other.

use std::collections::BTreeMap;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use super::activity::Stretch;
use super::arm::Arm;
use super::floor::Floor;
use super::variant::Variant;
use super::words::JobDone;
use super::work::Work;
use crate::run::sharing::{Reuse, Sharing};

/// The layout of the file; another one gets another name.
pub(super) const FORMAT: &str = "nodus-bench-2";

/// What a file holds: one measurement, or several put side by side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) format: String,
    pub(super) measurements: Vec<Measurement>,
}

impl Report {
    pub(super) fn of(measurements: Vec<Measurement>) -> Self {
        Self { format: FORMAT.to_owned(), measurements }
    }
}

/// Everything that was measured in one call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Measurement {
    /// Version of this program.
    pub(super) version: String,
    /// The command that made it.
    pub(super) command: String,
    pub(super) unix_ms: u64,
    pub(super) work: Work,
    /// What all rows have in common.
    pub(super) setting: Setting,
    pub(super) rows: Vec<Row>,
}

/// What every arm was given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Setting {
    /// The jobs, in words.
    pub(super) title: String,
    pub(super) model_digest: Digest,
    /// Of each job's data; members of a sweep have one.
    pub(super) data_digests: Vec<Digest>,
    /// Jobs by the sweep that they belong to; strangers are cohorts of one.
    pub(super) cohorts: Vec<Vec<u32>>,
    pub(super) learning_rates: Vec<f32>,
    pub(super) ranks: Vec<u32>,
    pub(super) adapter_seeds: Vec<u64>,
    /// One unit of work.
    pub(super) unit: String,
    /// Units of all jobs in their measured steps.
    pub(super) units: u64,
    /// Those before the clock starts, which count where set-up counts.
    pub(super) warmup_units: u64,
    pub(super) price_per_hour: f64,
    pub(super) host: String,
    pub(super) device: String,
    pub(super) device_class: BTreeMap<String, String>,
    /// What the arms have of the engine's means.
    pub(super) variant: Variant,
}

/// One arm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) arm: Arm,
    /// What it is, in words.
    pub(super) meaning: String,
    /// Processes, and how many at once.
    pub(super) processes: usize,
    pub(super) at_once: usize,
    pub(super) occupied_gpus: u32,
    /// The arm that it is checked and held against.
    pub(super) comparator: Arm,
    pub(super) check: Check,
    pub(super) audit: String,
    /// Set-up and warm-up steps left out.
    pub(super) steady_seconds: f64,
    /// From the start of a process to its end.
    pub(super) cold_seconds: f64,
    /// Units a second.
    pub(super) steady_rate: f64,
    pub(super) cold_rate: f64,
    /// Units for one unit of price.
    pub(super) units_per_price: f64,
    /// Of steady rates; none where the check failed.
    pub(super) ratio: Option<f64>,
    pub(super) cold_ratio: Option<f64>,
    pub(super) ratio_to_stock_mps: Option<f64>,
    /// Mean part of the card's multiprocessors that were at work; none where nothing tells.
    pub(super) sm_activity: Option<f64>,
    /// The same, stretch by stretch, one after another.
    pub(super) activity: Vec<Stretch>,
    pub(super) step_ms: Percentiles,
    pub(super) sharing: Sharing,
    /// What reuse can bring at most, by what was measured in this arm.
    pub(super) bound: Option<Reuse>,
    /// The least that the arm's steps can take on this device; none where its rate is not known, and of PyTorch.
    pub(super) floor: Option<Floor>,
    /// What became of one more job, of high priority, beside these.
    pub(super) foreground: Option<Foreground>,
    pub(super) jobs: Vec<JobDone>,
}

/// A job in the foreground: its steps alone, and beside the jobs of an arm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Foreground {
    pub(super) alone_ms: Percentiles,
    pub(super) beside_ms: Percentiles,
}

impl Foreground {
    /// How much longer its median step takes.
    pub(super) fn slowdown(&self) -> f64 {
        self.beside_ms.p50 / self.alone_ms.p50
    }
}

impl Row {
    /// Milliseconds in which every job took one step.
    pub(super) fn round_ms(&self) -> f64 {
        let steps = self.jobs.iter().map(|job| job.step_ms.len()).max().unwrap_or(0).max(1);
        self.steady_seconds * 1e3 / steps as f64
    }
}

/// Whether every job answered the same bits as in the dedicated arm; of PyTorch losses within a tolerance are asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Check {
    /// Jobs that did not, in order.
    pub(super) different: Vec<u32>,
    /// Whether it ran on the class of the dedicated arm; not asked of PyTorch.
    pub(super) same_class: bool,
    /// How far a loss may be from ours, where bits are not asked for.
    pub(super) tolerance: Option<f64>,
    /// The largest difference of a loss.
    pub(super) difference: Option<f64>,
}

impl Check {
    pub(super) fn bits(jobs: &[JobDone], solo: &[JobDone], same_class: bool) -> Self {
        let equal = |one: &JobDone| find(jobs, one.job).is_some_and(|other| one.equals(other));
        let different = solo.iter().filter(|job| !equal(job)).map(|job| job.job).collect();
        Self { different, same_class, tolerance: None, difference: None }
    }

    pub(super) fn closeness(jobs: &[JobDone], solo: &[JobDone], tolerance: f64) -> Self {
        let distance = |one: &JobDone| find(jobs, one.job).map_or(f64::INFINITY, |other| one.distance(other));
        let distances: Vec<(u32, f64)> = solo.iter().map(|job| (job.job, distance(job))).collect();
        let different = distances.iter().filter(|(_, distance)| *distance > tolerance).map(|(job, _)| *job).collect();
        let difference = distances.iter().map(|(_, distance)| *distance).fold(0.0, f64::max);
        Self { different, same_class: true, tolerance: Some(tolerance), difference: Some(difference) }
    }

    pub(super) fn passed(&self) -> bool {
        self.different.is_empty() && self.same_class
    }
}

/// Of the steps of all jobs, from asking to answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p95: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Percentiles {
    pub(super) fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        let rank = |part: usize| samples.get((samples.len() * part).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
        Self { p50: rank(50), p95: rank(95), p99: rank(99), max: samples.last().copied().unwrap_or_default() }
    }
}

/// A job by its number.
pub(super) fn find(jobs: &[JobDone], number: u32) -> Option<&JobDone> {
    jobs.iter().find(|job| job.job == number)
}

#[cfg(test)]
mod tests {
    use super::Percentiles;

    #[test]
    fn percentiles_are_ranks() {
        let found = Percentiles::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((found.p50, found.p95, found.p99, found.max), (100.0, 190.0, 198.0, 200.0));
        assert_eq!(Percentiles::of(vec![3.0]), Percentiles { p50: 3.0, p95: 3.0, p99: 3.0, max: 3.0 });
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    }
}
