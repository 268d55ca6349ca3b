//! Why a call was refused, or why a job gives up.
//!
//! Never holds more than what its owner may read.

use std::fmt;

use crate::bindings::types;

/// What the functions of this crate answer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refusal by the host, or the job's own reason to fail. The text of each is fit for the job's owner.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// An argument is out of its range; the text names it, its value and what would be right.
    InvalidArgument(String),
    /// Nothing of this name or digest belongs to this job.
    NotFound(String),
    /// One of the job's limits is reached; the call had no effect.
    QuotaExceeded {
        /// The limit's name, as in [`Job::limits`](crate::Job::limits).
        limit: String,
        /// What the call would have needed, in the limit's unit.
        needed: u64,
        /// What the job may use in all, in the limit's unit.
        allowed: u64,
    },
    /// Loss or gradient became infinite or NaN; the text says at which step and in what. The adapter is unusable.
    NonFinite(String),
    /// Understood, but not possible here; the text says why.
    Unsupported(String),
    /// The job was asked to stop; work in flight was given up.
    Cancelled,
    /// The device failed.
    DeviceLost,
    /// Any other refusal by the host.
    Other(String),
    /// The job's own reason, see [`Error::user`].
    User(String),
}

impl Error {
    /// The job's own reason to fail: what is wrong, where, and what would be right.
    pub fn user(message: impl Into<String>) -> Self {
        Self::User(message.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument(text) | Self::NonFinite(text) | Self::Other(text) | Self::User(text) => f.write_str(text),
            Self::NotFound(text) => write!(f, "not found: {text}"),
            Self::QuotaExceeded { limit, needed, allowed } => {
                write!(f, "over the limit {limit}: {needed} needed, {allowed} allowed")
            }
            Self::Unsupported(text) => write!(f, "not supported: {text}"),
            Self::Cancelled => f.write_str("the job was asked to stop; work in flight was given up"),
            Self::DeviceLost => f.write_str("the device failed"),
        }
    }
}

impl std::error::Error for Error {}

impl From<types::Error> for Error {
    fn from(error: types::Error) -> Self {
        match error {
            types::Error::InvalidArgument(text) => Self::InvalidArgument(text),
            types::Error::NotFound(text) => Self::NotFound(text),
            types::Error::QuotaExceeded(types::Quota { limit, needed, allowed }) => Self::QuotaExceeded { limit, needed, allowed },
            types::Error::NonFinite(text) => Self::NonFinite(text),
            types::Error::Unsupported(text) => Self::Unsupported(text),
            types::Error::Cancelled => Self::Cancelled,
            types::Error::DeviceLost => Self::DeviceLost,
            types::Error::Other(text) => Self::Other(text),
        }
    }
}

impl From<String> for Error {
    fn from(message: String) -> Self {
        Self::User(message)
    }
}

impl From<&str> for Error {
    fn from(message: &str) -> Self {
        Self::User(message.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_keep_their_kind_and_their_words() {
        let quota = types::Quota { limit: "batch-tokens".into(), needed: 900, allowed: 512 };
        let error = Error::from(types::Error::QuotaExceeded(quota));
        assert_eq!(error.to_string(), "over the limit batch-tokens: 900 needed, 512 allowed");
        assert_eq!(Error::from(types::Error::Cancelled), Error::Cancelled);
        assert_eq!(Error::from(types::Error::NonFinite("loss is NaN at step 3".into())).to_string(), "loss is NaN at step 3");
        assert_eq!(Error::user("x"), Error::from("x"));
    }
}
