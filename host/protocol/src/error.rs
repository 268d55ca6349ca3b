//! Why the engine refused or failed a command.

use serde::{Deserialize, Serialize};

/// Whose fault, and what kind. The cases are those of `nodus:gpu/types.error` that an engine can meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The caller's argument is out of its range.
    InvalidArgument,
    /// No such slot. A client that keeps its own slots never sees it.
    NotFound,
    /// Not enough device memory for this job.
    QuotaExceeded,
    /// A batch needs more activations than are reserved for its job. It had no effect.
    ActivationBytes {
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that are reserved.
        allowed: u64,
    },
    /// Loss or gradient of the adapter became infinite or NaN; the adapter is poisoned.
    NonFinite,
    /// Understood, but not possible here.
    Unsupported,
    /// The device failed, or the engine is gone.
    DeviceLost,
    /// A defect of the host.
    Internal,
}

/// A refusal or failure. The message is fit for the job's owner: no path, no address, nothing of another job.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct EngineError {
    /// What kind.
    pub kind: ErrorKind,
    /// What is wrong, where, and what would be right.
    pub message: String,
}

impl EngineError {
    /// An error of this kind.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// The caller's argument is out of its range.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// The engine is gone.
    #[must_use]
    pub fn gone() -> Self {
        Self::new(ErrorKind::DeviceLost, "the engine stopped")
    }
}
