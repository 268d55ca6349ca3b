//! The floor's numbers for the operator's monitoring: what engines have done, why jobs wait, what was run again, how jobs ended.
//!
//! Counts only; nothing is decided by them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use metrics::{counter, describe_counter, describe_gauge, gauge};
use nodus_engine::Counts;
use nodus_schedule::EngineId;
use nodus_state::Outcome;

const PASSES: &str = "nodus_passes_total";
const PASS_JOBS: &str = "nodus_pass_jobs_total";
const PASS_ROWS: &str = "nodus_pass_rows_total";
const ROW_HALVES: &str = "nodus_row_halves_total";
const ENGINE_TIME: &str = "nodus_engine_microseconds_total";
const QUEUE: &str = "nodus_queue";
const AGAIN: &str = "nodus_jobs_again_total";
const ENDED: &str = "nodus_jobs_ended_total";

/// What was counted before.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    engines: Mutex<BTreeMap<EngineId, Counts>>,
    reasons: Mutex<BTreeSet<&'static str>>,
}

/// Says what each number is. Once the recorder is installed.
pub(crate) fn describe() {
    describe_counter!(PASSES, "Passes of all engines");
    describe_counter!(PASS_JOBS, "Commands carried out in passes: by passes, how many jobs share one");
    describe_counter!(PASS_ROWS, "Rows of passes: by passes, how large one is");
    describe_counter!(ROW_HALVES, "Rows times half layers that were computed, and that sharing spared: their ratio is the reuse");
    describe_counter!(ENGINE_TIME, "Time of the engines' threads: below the cuts, above them, in optimiser steps, forming passes");
    describe_gauge!(QUEUE, "Jobs that wait, by reason");
    describe_counter!(AGAIN, "Attempts that ended with the job going back into the queue, by reason");
    describe_counter!(ENDED, "Jobs that ended, by how");
}

impl Numbers {
    /// What each engine that lives has done so far. Those that are gone are forgotten with what they did since they were asked last.
    pub(super) fn engines(&self, now: impl Iterator<Item = (EngineId, Counts)>) {
        let now: BTreeMap<EngineId, Counts> = now.collect();
        let mut before = self.engines.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, counts) in &now {
            let known = before.get(id).copied().unwrap_or_default();
            let add = |name: &'static str, of: fn(&Counts) -> u64| counter!(name).increment(of(counts).saturating_sub(of(&known)));
            add(PASSES, |counts| counts.passes);
            add(PASS_JOBS, |counts| counts.members);
            add(PASS_ROWS, |counts| counts.rows);
            let halves = |what: &'static str, of: fn(&Counts) -> u64| {
                counter!(ROW_HALVES, "what" => what).increment(of(counts).saturating_sub(of(&known)));
            };
            halves("computed", |counts| counts.row_halves);
            halves("spared", |counts| counts.row_halves_spared);
            let time = |what: &'static str, of: fn(&Counts) -> u64| {
                // Of the totals, so that no rest is lost from one time to the next.
                counter!(ENGINE_TIME, "what" => what).increment((of(counts) / 1000).saturating_sub(of(&known) / 1000));
            };
            time("trunk", |counts| counts.trunk_ns);
            time("above", |counts| counts.above_ns);
            time("step", |counts| counts.step_ns);
            time("forming", |counts| counts.forming_ns);
        }
        *before = now;
    }

    /// Why each waiting job waits.
    #[expect(clippy::cast_precision_loss, reason = "gauges are float64")]
    pub(super) fn queue(&self, reasons: impl Iterator<Item = &'static str>) {
        let mut counts: BTreeMap<&'static str, usize> = BTreeMap::new();
        reasons.for_each(|reason| *counts.entry(reason).or_default() += 1);
        let mut known = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend(counts.keys());
        for reason in known.iter() {
            gauge!(QUEUE, "reason" => *reason).set(counts.get(reason).copied().unwrap_or_default() as f64);
        }
    }
}

/// An attempt ended, and its job goes back into the queue.
pub(super) fn again(why: &'static str) {
    counter!(AGAIN, "reason" => why).increment(1);
}

/// A job ended.
pub(super) fn ended(how: Outcome) {
    counter!(ENDED, "outcome" => how.as_str()).increment(1);
}

#[cfg(test)]
mod tests {
    use nodus_engine::Counts;
    use nodus_schedule::EngineId;

    use super::Numbers;

    #[test]
    fn what_engines_did_adds_up_and_reasons_that_went_are_zero() {
        let recorder = crate::serve::recorder().unwrap();
        let text = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            let numbers = Numbers::default();
            let counts =
                |passes: u64| Counts { passes, members: 3 * passes, row_halves_spared: 5, trunk_ns: 1500 * passes, ..Counts::default() };
            numbers.engines([(EngineId(1), counts(2)), (EngineId(2), counts(1))].into_iter());
            numbers.engines([(EngineId(1), counts(3)), (EngineId(2), counts(1))].into_iter());
            // The second is gone, and a third begins anew.
            numbers.engines([(EngineId(1), counts(3)), (EngineId(3), counts(1))].into_iter());
            numbers.queue(["memory", "memory", "seats"].into_iter());
            numbers.queue(["memory"].into_iter());
            super::again("restart");
            super::ended(nodus_state::Outcome::Failed);
        });
        let text = text.render();
        for line in [
            "nodus_passes_total 5",
            "nodus_pass_jobs_total 15",
            "nodus_row_halves_total{what=\"spared\"} 15",
            "nodus_engine_microseconds_total{what=\"trunk\"} 6",
            "nodus_queue{reason=\"memory\"} 1",
            "nodus_queue{reason=\"seats\"} 0",
            "nodus_jobs_again_total{reason=\"restart\"} 1",
            "nodus_jobs_ended_total{outcome=\"failed\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
    }
}
