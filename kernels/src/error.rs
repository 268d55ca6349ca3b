//! What a device fails with.
//!
//! Never says what a tenant did: whose fault it is, the engine knows.

/// A device failed or refused.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is not enough memory.
    #[error("device memory: {needed_bytes} bytes asked for, {free_bytes} free")]
    OutOfMemory {
        /// Asked for.
        needed_bytes: u64,
        /// Free.
        free_bytes: u64,
    },
    /// The device cannot do what is asked.
    #[error("{0}")]
    Unsupported(String),
    /// The device failed; nothing on it can be trusted.
    #[error("the device failed: {0}")]
    Failed(String),
}
