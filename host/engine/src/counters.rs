//! What an engine has done, readable from other threads.
//!
//! Never steers anything.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts since the engine began.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) passes: AtomicU64,
    pub(crate) rows: AtomicU64,
    pub(crate) row_halves: AtomicU64,
    pub(crate) row_halves_spared: AtomicU64,
    pub(crate) allocated_bytes: AtomicU64,
}

/// The counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Passes run.
    pub passes: u64,
    /// Rows asked for, in all batches of all passes.
    pub rows: u64,
    /// Rows computed, times the half layers through which each went.
    pub row_halves: u64,
    /// Those that sharing inside cohorts spared.
    pub row_halves_spared: u64,
    /// Bytes of all live buffers on the device (not trunk weights).
    pub allocated_bytes: u64,
}

impl Counters {
    pub(crate) fn read(&self) -> Counts {
        Counts {
            passes: self.passes.load(Relaxed),
            rows: self.rows.load(Relaxed),
            row_halves: self.row_halves.load(Relaxed),
            row_halves_spared: self.row_halves_spared.load(Relaxed),
            allocated_bytes: self.allocated_bytes.load(Relaxed),
        }
    }
}
