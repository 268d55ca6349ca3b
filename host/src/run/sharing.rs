//! What the engines of a run did, what sharing spared, and how much it can spare at most.
//!
//! Figures only: no result depends on them.

use nodus_engine::Counts;
use serde::{Deserialize, Serialize};

/// Counts of all engines of a run. Times are the engine's own thread's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Sharing {
    /// Passes run.
    pub(crate) passes: u64,
    /// Batches carried out in them.
    pub(crate) batches: u64,
    /// Rows of all these batches.
    pub(crate) rows: u64,
    /// Rows computed, times the half layers through which each went.
    pub(crate) row_halves: u64,
    /// Those that were not computed, since another member or an earlier pass had.
    pub(crate) row_halves_shared: u64,
    /// Sequences whose activations the trunk cache had, at their cut.
    pub(crate) trunk_cache_hits: u64,
    /// Those that it had not.
    pub(crate) trunk_cache_misses: u64,
    /// Below all cuts.
    pub(crate) trunk_seconds: f64,
    /// From the lowest cut up and back.
    pub(crate) above_seconds: f64,
    /// In optimiser steps.
    pub(crate) optimiser_seconds: f64,
    /// Choosing commands and planning passes.
    pub(crate) forming_seconds: f64,
}

/// How much the reuse of trunk activations can speed a run up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Reuse {
    /// T: seconds below the cut for one batch, were it computed each time.
    pub(crate) trunk_seconds_per_batch: f64,
    /// P: seconds above the cut and in the optimiser for one batch.
    pub(crate) own_seconds_per_batch: f64,
    /// N*E: how often each computed sequence was used.
    pub(crate) uses: f64,
    /// (T + P) / (T/(N*E) + P).
    pub(crate) bound: f64,
}

#[expect(clippy::cast_precision_loss, reason = "figures to be read")]
impl Sharing {
    /// What one engine did.
    pub(crate) fn of(counts: &Counts) -> Self {
        let seconds = |ns: u64| ns as f64 / 1e9;
        Self {
            passes: counts.passes,
            batches: counts.members,
            rows: counts.rows,
            row_halves: counts.row_halves,
            row_halves_shared: counts.row_halves_spared,
            trunk_cache_hits: counts.trunk_cache.hits,
            trunk_cache_misses: counts.trunk_cache.misses,
            trunk_seconds: seconds(counts.trunk_ns),
            above_seconds: seconds(counts.above_ns),
            optimiser_seconds: seconds(counts.step_ns),
            forming_seconds: seconds(counts.forming_ns),
        }
    }

    /// What was done after `before`, of the same engine.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            passes: self.passes - before.passes,
            batches: self.batches - before.batches,
            rows: self.rows - before.rows,
            row_halves: self.row_halves - before.row_halves,
            row_halves_shared: self.row_halves_shared - before.row_halves_shared,
            trunk_cache_hits: self.trunk_cache_hits - before.trunk_cache_hits,
            trunk_cache_misses: self.trunk_cache_misses - before.trunk_cache_misses,
            trunk_seconds: self.trunk_seconds - before.trunk_seconds,
            above_seconds: self.above_seconds - before.above_seconds,
            optimiser_seconds: self.optimiser_seconds - before.optimiser_seconds,
            forming_seconds: self.forming_seconds - before.forming_seconds,
        }
    }

    /// Adds what others did.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.passes += other.passes;
        self.batches += other.batches;
        self.rows += other.rows;
        self.row_halves += other.row_halves;
        self.row_halves_shared += other.row_halves_shared;
        self.trunk_cache_hits += other.trunk_cache_hits;
        self.trunk_cache_misses += other.trunk_cache_misses;
        self.trunk_seconds += other.trunk_seconds;
        self.above_seconds += other.above_seconds;
        self.optimiser_seconds += other.optimiser_seconds;
        self.forming_seconds += other.forming_seconds;
    }

    /// Adds what one engine did.
    pub(crate) fn add(&mut self, counts: &Counts) {
        self.merge(&Self::of(counts));
    }

    /// The bound by what was measured in a sweep, `sequences` being those of all batches of all members. None where nothing ran, and
    /// where members shared rows without a trunk cache, since nothing counts then what was computed.
    pub(crate) fn reuse(&self, sequences: u64) -> Option<Reuse> {
        if self.batches == 0 || sequences == 0 {
            return None;
        }
        let uses = match (self.trunk_cache_misses, self.row_halves_shared) {
            (0, 0) => 1.0,
            (0, _) => return None,
            (computed, _) => (sequences as f64 / computed as f64).max(1.0),
        };
        let trunk = self.trunk_seconds * uses / self.batches as f64;
        let own = (self.above_seconds + self.optimiser_seconds) / self.batches as f64;
        let bound = if trunk + own > 0.0 { (trunk + own) / (trunk / uses + own) } else { 1.0 };
        Some(Reuse { trunk_seconds_per_batch: trunk, own_seconds_per_batch: own, uses, bound })
    }

    /// Lines for people; `reuse` is a sweep's.
    pub(crate) fn lines(&self, reuse: Option<Reuse>) -> Vec<String> {
        if self.batches == 0 {
            return Vec::new();
        }
        let all = self.row_halves + self.row_halves_shared;
        let part = if all == 0 { 0.0 } else { 100.0 * self.row_halves_shared as f64 / all as f64 };
        let mut lines = vec![format!(
            "{} batches in {} passes; {part:.1} % of the work was shared; trunk cache: {} hits, {} misses",
            self.batches, self.passes, self.trunk_cache_hits, self.trunk_cache_misses
        )];
        lines.extend(reuse.map(|reuse| {
            format!(
                "a batch: T {:.2} ms below the cut, P {:.2} ms above; N*E {:.1}; bound (T + P) / (T/(N*E) + P) = {:.2}",
                reuse.trunk_seconds_per_batch * 1e3,
                reuse.own_seconds_per_batch * 1e3,
                reuse.uses,
                reuse.bound
            )
        }));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::Sharing;

    #[test]
    fn the_bound_is_that_of_the_formula() {
        // 16 members, 3 epochs of 10 batches of 2 sequences: T is 30 ms, P 5 ms.
        let sharing = Sharing {
            batches: 480,
            trunk_cache_misses: 20,
            trunk_seconds: 0.3,
            above_seconds: 2.2,
            optimiser_seconds: 0.2,
            ..Sharing::default()
        };
        let reuse = sharing.reuse(960).unwrap();
        assert!((reuse.uses - 48.0).abs() < 1e-9);
        assert!((reuse.trunk_seconds_per_batch - 0.03).abs() < 1e-9 && (reuse.own_seconds_per_batch - 0.005).abs() < 1e-9);
        assert!((reuse.bound - 0.035 / (0.03 / 48.0 + 0.005)).abs() < 1e-9);
        let lines = sharing.lines(Some(reuse));
        assert!(lines[1].contains("= 6.22"), "{lines:?}");
    }

    #[test]
    fn without_a_cache_each_use_is_a_computation_or_not_known() {
        let sharing = Sharing { batches: 10, trunk_seconds: 1.0, above_seconds: 1.0, ..Sharing::default() };
        assert!((sharing.reuse(20).unwrap().bound - 1.0).abs() < 1e-9);
        assert!(Sharing::default().reuse(0).is_none());
        assert!(Sharing { row_halves_shared: 5, ..sharing }.reuse(20).is_none());
    }
}
