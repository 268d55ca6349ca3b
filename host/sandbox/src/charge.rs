//! What a batch holds of the job's `batch-bytes`, for as long as its handle or a call with it is there.
//!
//! Never given back at a moment that the engine chooses: calls are let go where the guest's program says (see `adapters`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes of all batches of a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Charges(Arc<AtomicU64>);

/// The bytes of one batch; given back when dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    bytes: u64,
    all: Charges,
}

impl Charges {
    /// Bytes of all batches and of one more.
    pub(crate) fn with(&self, bytes: u64) -> u64 {
        self.0.load(Ordering::Relaxed).saturating_add(bytes)
    }

    /// Charges a batch.
    pub(crate) fn charge(&self, bytes: u64) -> Arc<Charge> {
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Arc::new(Charge { bytes, all: self.clone() })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
