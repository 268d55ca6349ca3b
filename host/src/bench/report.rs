//! The rows of a measurement, with everything that a reader needs to judge one, and the file that keeps them.
//!
//! A row whose check failed has no ratio; rows of different device classes are never held against each other.

use std::collections::BTreeMap;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use super::activity::{Stretch, mean};
use super::arm::Arm;
use super::fleet::Taken;
use super::words::JobDone;
use super::work::{Kind, Work};
use crate::run::sharing::{Reuse, Sharing};

/// The layout of the file; another one gets another name.
pub(super) const FORMAT: &str = "nodus-bench-1";

/// Everything that was measured in one call.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) format: String,
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
    pub(super) graphs: bool,
}

/// One arm.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    pub(super) jobs: Vec<JobDone>,
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
    fn bits(jobs: &[JobDone], solo: &[JobDone], same_class: bool) -> Self {
        let equal = |one: &JobDone| find(jobs, one.job).is_some_and(|other| one.equals(other));
        let different = solo.iter().filter(|job| !equal(job)).map(|job| job.job).collect();
        Self { different, same_class, tolerance: None, difference: None }
    }

    fn closeness(jobs: &[JobDone], solo: &[JobDone], tolerance: f64) -> Self {
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

/// What rows are made with.
pub(super) struct Ledger<'a> {
    pub(super) work: &'a Work,
    pub(super) setting: &'a Setting,
    pub(super) on_card: bool,
    /// How far losses of PyTorch may be from ours.
    pub(super) tolerance: f64,
    pub(super) rows: Vec<Row>,
}

impl Ledger<'_> {
    /// Enters what an arm took, checked against the first row, which is the dedicated arm's.
    pub(super) fn enter(&mut self, arm: Arm, taken: Taken) {
        let mut jobs: Vec<JobDone> = taken.done.iter().flat_map(|done| done.jobs.clone()).collect();
        jobs.sort_by_key(|job| job.job);
        let dedicated = self.rows.first();
        let solo = dedicated.map_or(&jobs, |row| &row.jobs);
        let check = match arm.peer() {
            None => Check::bits(&jobs, solo, taken.ready.iter().all(|ready| ready.class == self.setting.device_class)),
            Some(_) => Check::closeness(&jobs, solo, self.tolerance),
        };
        let mut sharing = Sharing::default();
        taken.done.iter().for_each(|done| sharing.merge(&done.sharing));
        let rate = |units: u64, seconds: f64| if seconds > 0.0 { units as f64 / seconds } else { 0.0 };
        let (units, all) = (self.setting.units, self.setting.units + self.setting.warmup_units);
        let (steady_rate, cold_rate) = (rate(units, taken.steady_seconds), rate(all, taken.cold_seconds));
        let against = |rate: f64, other: Option<f64>| other.filter(|other| check.passed() && *other > 0.0).map(|other| rate / other);
        let stock = self.rows.iter().find(|row| row.arm == Arm::StockMps && row.check.passed()).map(|row| row.steady_rate);
        let processes = arm.processes(self.work.jobs).len();
        let row = Row {
            arm,
            meaning: arm.meaning(self.on_card).to_owned(),
            processes,
            at_once: if matches!(arm, Arm::StockMps | Arm::Mps100) { processes } else { 1 },
            occupied_gpus: u32::from(self.on_card),
            comparator: Arm::Dedicated,
            audit: "not audited".to_owned(),
            steady_seconds: taken.steady_seconds,
            cold_seconds: taken.cold_seconds,
            units_per_price: steady_rate * 3600.0 / self.setting.price_per_hour,
            ratio: against(steady_rate, Some(dedicated.map_or(steady_rate, |row| row.steady_rate))),
            cold_ratio: against(cold_rate, Some(dedicated.map_or(cold_rate, |row| row.cold_rate))),
            ratio_to_stock_mps: against(steady_rate, stock),
            steady_rate,
            cold_rate,
            sm_activity: mean(&taken.activity),
            activity: taken.activity,
            step_ms: Percentiles::of(jobs.iter().flat_map(|job| job.step_ms.clone()).collect()),
            bound: bound(arm, self.work, &sharing),
            sharing,
            check,
            jobs,
        };
        self.rows.push(row);
    }
}

/// (T + P) / (T/(N E) + P) of a sweep, T and P being those of a batch in this arm; E counts where activations are kept. On a card the
/// engine's clock sees launches only, so that there is none.
fn bound(arm: Arm, work: &Work, sharing: &Sharing) -> Option<Reuse> {
    if !arm.shares() || work.kind == Kind::Tenants || sharing.trunk_seconds <= 0.0 {
        return None;
    }
    let epochs = if arm.keeps() { work.epochs } else { 1 };
    let uses = f64::from(work.jobs) * f64::from(epochs);
    let all = f64::from(work.jobs) * f64::from(work.steps());
    let (trunk, own) = (sharing.trunk_seconds * uses / all, (sharing.above_seconds + sharing.optimiser_seconds) / all);
    Some(Reuse { trunk_seconds_per_batch: trunk, own_seconds_per_batch: own, uses, bound: (trunk + own) / (trunk / uses + own) })
}

fn find(jobs: &[JobDone], number: u32) -> Option<&JobDone> {
    jobs.iter().find(|job| job.job == number)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nodus_protocol::{Digest, LayerSelection};

    use super::super::words::{Done, Ready};
    use super::*;

    #[test]
    fn percentiles_are_ranks() {
        let found = Percentiles::of((1..=200).rev().map(f64::from).collect());
        assert_eq!((found.p50, found.p95, found.p99, found.max), (100.0, 190.0, 198.0, 200.0));
        assert_eq!(Percentiles::of(vec![3.0]), Percentiles { p50: 3.0, p95: 3.0, p99: 3.0, max: 3.0 });
        assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    }

    fn work() -> Work {
        let layers = LayerSelection::Last(1);
        let model = "m".to_owned();
        Work {
            kind: Kind::Sweep,
            model,
            layers,
            jobs: 2,
            sequences: 1,
            length: 8,
            labelled: 8,
            batches: 5,
            epochs: 1,
            warmup: 0,
            rank: 4,
            seed: 0,
        }
    }

    fn setting(work: &Work) -> Setting {
        Setting {
            title: work.title(),
            model_digest: Digest::of(b"m"),
            data_digests: Vec::new(),
            cohorts: Vec::new(),
            learning_rates: Vec::new(),
            ranks: Vec::new(),
            adapter_seeds: Vec::new(),
            unit: String::new(),
            units: work.positions(),
            warmup_units: 0,
            price_per_hour: 1.0,
            host: "host".into(),
            device: "cpu".into(),
            device_class: BTreeMap::new(),
            graphs: true,
        }
    }

    fn taken(seconds: f64, losses: [&str; 2], class: &[(&str, &str)]) -> Taken {
        let job = |(job, loss): (u32, &str)| JobDone {
            job,
            loss_bits: vec![loss.to_owned()],
            grad_norm_bits: vec!["00000000".to_owned()],
            adapter: Digest::of(b"a"),
            adapter_bytes: 1,
            step_ms: vec![1.0],
        };
        let jobs = (0..).zip(losses).map(job).collect();
        let sharing = Sharing { trunk_seconds: 0.5, above_seconds: 1.0, ..Sharing::default() };
        let class = class.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let ready = vec![Ready { class, device: "cpu".into() }];
        Taken {
            steady_seconds: seconds,
            cold_seconds: 2.0 * seconds,
            ready,
            done: vec![Done { seconds, jobs, sharing }],
            activity: Vec::new(),
        }
    }

    #[test]
    fn a_row_whose_bits_differ_or_of_another_class_has_no_ratio() {
        let work = work();
        let setting = setting(&work);
        let mut ledger = Ledger { work: &work, setting: &setting, on_card: false, tolerance: 1e-3, rows: Vec::new() };
        ledger.enter(Arm::Dedicated, taken(4.0, ["3f800000", "3f800001"], &[]));
        ledger.enter(Arm::StockMps, taken(2.0, ["3f800000", "3f800001"], &[]));
        ledger.enter(Arm::Packed, taken(1.0, ["3f800000", "3f800002"], &[]));
        ledger.enter(Arm::Fused, taken(1.0, ["3f800000", "3f800001"], &[]));
        ledger.enter(Arm::FusedCache, taken(1.0, ["3f800000", "3f800001"], &[("cpu", "another")]));
        let ratios: Vec<_> = ledger.rows.iter().map(|row| (row.ratio, row.ratio_to_stock_mps)).collect();
        assert_eq!(ratios, [(Some(1.0), None), (Some(2.0), None), (None, None), (Some(4.0), Some(2.0)), (None, None)]);
        // A PyTorch's losses may differ by so much: 3f800002 is 2.4e-7 above 1, 3f900000 an eighth.
        ledger.enter(Arm::TorchEager, taken(8.0, ["3f800000", "3f800002"], &[("torch", "2")]));
        ledger.enter(Arm::TorchEager, taken(8.0, ["3f800000", "3f900000"], &[("torch", "2")]));
        ledger.enter(Arm::TorchEager, taken(8.0, ["3f800000", "7fc00000"], &[("torch", "2")]));
        let peers: Vec<_> = ledger.rows.iter().skip(5).map(|row| (row.ratio, row.check.different.as_slice())).collect();
        assert_eq!(peers, [(Some(0.5), &[][..]), (None, &[1]), (None, &[1])]);
        assert_eq!(ledger.rows[2].check.different, [1]);
        assert!(ledger.rows[4].check.different.is_empty() && !ledger.rows[4].check.same_class);
    }

    #[test]
    fn the_bound_is_that_of_the_formula() {
        // Ten batches of all; the trunk took 0.5 s for five.
        let sharing = Sharing { trunk_seconds: 0.5, above_seconds: 1.0, ..Sharing::default() };
        let reuse = bound(Arm::Fused, &work(), &sharing).unwrap();
        assert!((reuse.trunk_seconds_per_batch - 0.1).abs() < 1e-9 && (reuse.own_seconds_per_batch - 0.1).abs() < 1e-9);
        assert!((reuse.bound - 0.2 / 0.15).abs() < 1e-9);
        assert!(bound(Arm::Packed, &work(), &sharing).is_none());
    }
}
