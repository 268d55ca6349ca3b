//! What stands behind the guest's handles: plain values in the job's resource table.
//!
//! Holds no logic; the interface that owns a resource is the one that makes it.
#![expect(unreachable_pub, reason = "the generated bindings re-export these types")]

use std::sync::Arc;

use nodus_protocol::{Batch, Digest};

use crate::bindings::nodus::gpu::data::DatasetInfo;
use crate::charge::Charge;
use crate::services::{Dataset, Source, Trunk};

/// A trunk that the guest opened.
pub struct TrunkHandle(pub(super) Trunk);

/// A data set that the guest opened.
pub struct DatasetHandle {
    pub(super) data: Dataset,
    /// The trunk it was tokenised for.
    pub(super) trunk: Digest,
    pub(super) info: DatasetInfo,
    pub(super) source: Source,
}

/// A batch of the guest.
pub struct BatchHandle {
    pub(super) batch: Batch,
    /// The trunk it was made for.
    pub(super) trunk: Digest,
    /// Where they come from.
    pub(super) source: Source,
    /// Rows of all sequences.
    pub(super) rows: u64,
    /// Rows with a weight above 0.
    pub(super) labelled: u64,
    /// What it holds of `batch-bytes`.
    pub(super) charge: Arc<Charge>,
}

/// An adapter that the guest created or loaded.
pub struct AdapterHandle {
    pub(super) index: u32,
}

/// A `forward-backward` or `evaluate` on its way.
pub struct PendingLoss(pub(super) PendingCall);

/// An `optim-step` or `train-step` on its way.
pub struct PendingStep(pub(super) PendingCall);

/// A call on its way.
#[derive(Clone, Copy)]
pub(super) struct PendingCall {
    pub(super) adapter: u32,
    pub(super) call: u64,
}
