//! What an engine has done, readable from other threads.
//!
//! Never steers anything; what is reserved for jobs lives here because others read it, and [`crate::jobs`] decides by it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nodus_protocol::JobSlot;
use serde::{Deserialize, Serialize};

use crate::cache::CacheCounts;
use crate::jobs::Jobs;

/// Counts since the engine began.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) passes: AtomicU64,
    pub(crate) members: AtomicU64,
    pub(crate) rows: AtomicU64,
    pub(crate) row_halves: AtomicU64,
    pub(crate) row_halves_spared: AtomicU64,
    pub(crate) allocated_bytes: AtomicU64,
    pub(crate) trunk_ns: AtomicU64,
    pub(crate) above_ns: AtomicU64,
    pub(crate) step_ns: AtomicU64,
    pub(crate) forming_ns: AtomicU64,
    /// Since when the thread carries something out, in milliseconds of its clock and one more; 0 while it waits.
    pub(crate) busy_since_ms: AtomicU64,
    device_ns: Mutex<BTreeMap<JobSlot, u64>>,
    cache: Mutex<CacheCounts>,
    jobs: Mutex<Jobs>,
}

/// The counts at one moment. Times are those of the engine's thread, which is the device's where the device computes on it; an engine
/// without a thread has no clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Passes run.
    pub passes: u64,
    /// Commands carried out in passes.
    pub members: u64,
    /// Rows asked for, in all batches of all passes.
    pub rows: u64,
    /// Rows computed, times the half layers through which each went.
    pub row_halves: u64,
    /// Those that sharing inside cohorts and the trunk cache spared.
    pub row_halves_spared: u64,
    /// Bytes of all live buffers on the device (not trunk weights), the trunk cache among them.
    pub allocated_bytes: u64,
    /// Time in passes below every member's cut: embedding, layers, cached rows coming in or put by.
    pub trunk_ns: u64,
    /// Time in passes from the lowest cut up, and back.
    pub above_ns: u64,
    /// Time in optimiser steps.
    pub step_ns: u64,
    /// Time spent choosing commands and planning passes.
    pub forming_ns: u64,
    /// The trunk cache's.
    pub trunk_cache: CacheCounts,
}

impl Counters {
    pub(crate) fn read(&self) -> Counts {
        Counts {
            passes: self.passes.load(Relaxed),
            members: self.members.load(Relaxed),
            rows: self.rows.load(Relaxed),
            row_halves: self.row_halves.load(Relaxed),
            row_halves_spared: self.row_halves_spared.load(Relaxed),
            allocated_bytes: self.allocated_bytes.load(Relaxed),
            trunk_ns: self.trunk_ns.load(Relaxed),
            above_ns: self.above_ns.load(Relaxed),
            step_ns: self.step_ns.load(Relaxed),
            forming_ns: self.forming_ns.load(Relaxed),
            trunk_cache: *self.cache.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// A pass was run: each member's job and rows, the work done and spared, the time below the cuts and above.
    pub(crate) fn count_pass(&self, members: &[(JobSlot, u64)], work: (u64, u64), (trunk_ns, above_ns): (u64, u64)) {
        let rows = members.iter().map(|(_, rows)| rows).sum::<u64>();
        self.passes.fetch_add(1, Relaxed);
        self.members.fetch_add(members.len() as u64, Relaxed);
        self.rows.fetch_add(rows, Relaxed);
        let mut device_ns = self.device_ns.lock().unwrap_or_else(PoisonError::into_inner);
        for (job, own) in members {
            let part = u128::from(trunk_ns + above_ns) * u128::from(*own) / u128::from(rows.max(1));
            *device_ns.entry(*job).or_default() += u64::try_from(part).unwrap_or(u64::MAX);
        }
        self.row_halves.fetch_add(work.0, Relaxed);
        self.row_halves_spared.fetch_add(work.1, Relaxed);
        self.trunk_ns.fetch_add(trunk_ns, Relaxed);
        self.above_ns.fetch_add(above_ns, Relaxed);
    }

    pub(crate) fn set_cache(&self, counts: CacheCounts) {
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = counts;
    }

    /// Time in passes of each job, a pass's by its part of the rows.
    pub(crate) fn device_ns(&self) -> MutexGuard<'_, BTreeMap<JobSlot, u64>> {
        self.device_ns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
