//! Enters what an arm took as a row: checked against the dedicated arm's, with its ratios, its bound and its floor.
//!
//! Gives no ratio where the check failed.

use nodus_protocol::ModelConfig;

use super::activity::mean;
use super::arm::Arm;
use super::fleet::Taken;
use super::floor::Floor;
use super::report::{Check, Foreground, Percentiles, Row, Setting, find};
use super::words::JobDone;
use super::work::{Kind, Work};
use crate::run::sharing::{Reuse, Sharing};

/// What rows are made with.
pub(super) struct Ledger<'a> {
    pub(super) work: &'a Work,
    pub(super) setting: &'a Setting,
    pub(super) on_card: bool,
    /// How far losses of PyTorch may be from ours.
    pub(super) tolerance: f64,
    pub(super) model: &'a ModelConfig,
    /// Multiplications and additions a second that the device's matrix units reach, where that is known.
    pub(super) peak: Option<f64>,
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
            floor: self.floor(arm),
            foreground: None,
            sharing,
            check,
            jobs,
        };
        self.rows.push(row);
    }

    /// Enters what the last arm's jobs and one in the foreground did together; `alone` is that one by itself. All bits must be what they were.
    pub(super) fn enter_foreground(&mut self, alone: &Taken, beside: &Taken) {
        let jobs = |taken: &Taken| taken.done.iter().flat_map(|done| done.jobs.clone()).collect::<Vec<JobDone>>();
        let (alone, beside) = (jobs(alone), jobs(beside));
        let Some(row) = self.rows.last_mut() else { return };
        let expected: Vec<JobDone> = row.jobs.iter().chain(&alone).cloned().collect();
        row.check.different.extend(Check::bits(&beside, &expected, true).different);
        if !row.check.passed() {
            (row.ratio, row.cold_ratio, row.ratio_to_stock_mps) = (None, None, None);
            return;
        }
        let steps = |jobs: &[JobDone]| Percentiles::of(find(jobs, self.work.jobs).map_or_else(Vec::new, |job| job.step_ms.clone()));
        row.foreground = Some(Foreground { alone_ms: steps(&alone), beside_ms: steps(&beside) });
    }

    fn floor(&self, arm: Arm) -> Option<Floor> {
        let peak = self.peak.filter(|_| arm.peer().is_none())?;
        Some(Floor::of(self.model, self.work, arm, peak))
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nodus_protocol::{Digest, LayerSelection};

    use super::super::variant::Variant;
    use super::super::words::{Done, Ready};
    use super::*;

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
            variant: Variant::Base,
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
        let ready = vec![Ready { class }];
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
        let (model, peak, rows) = (&super::super::floor::shape(), Some(1e12), Vec::new());
        let mut ledger = Ledger { work: &work, setting: &setting, on_card: false, tolerance: 1e-3, model, peak, rows };
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
