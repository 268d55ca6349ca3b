//! What can go wrong with a trunk, and how a device's failures read to a job.
//!
//! Never names a file, a tenant or another job.

use nodus_kernels::DeviceError;
use nodus_protocol::{EngineError, ErrorKind};

/// A trunk could not be taken.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TrunkError {
    /// The sizes contradict each other.
    #[error("config: {0}")]
    Config(String),
    /// A tensor that the architecture needs is not there.
    #[error("tensor `{tensor}` is missing, expected one of shape {expected:?}")]
    Missing {
        /// Its name in transformers.
        tensor: String,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("tensor `{tensor}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Its name in transformers.
        tensor: String,
        /// The shape it should have.
        expected: Vec<usize>,
        /// The shape it has.
        found: Vec<usize>,
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A device's failure as the job that met it is told.
pub(crate) fn to_job(error: &DeviceError) -> EngineError {
    let kind = match error {
        DeviceError::OutOfMemory { .. } => ErrorKind::QuotaExceeded,
        DeviceError::Unsupported(_) => ErrorKind::Unsupported,
        DeviceError::Failed(_) => ErrorKind::DeviceLost,
    };
    EngineError::new(kind, error.to_string())
}
