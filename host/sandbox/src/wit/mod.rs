//! The host's side of `nodus:gpu`, one file an interface.
//!
//! Every argument comes from a stranger. What the guest did wrong is an answer; only what has no answer ends the job.

mod convert;
mod data;
pub(crate) mod handles;
mod job;
mod training;
mod trunk;

use nodus_protocol::{Digest, EngineError, ErrorKind};

use crate::bindings::nodus::gpu::types::{self, Error, Quota};
use crate::failure::Stop;
use crate::services::Refusal;
use crate::state::State;

/// What a host function may end with beside its result.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The guest's to handle.
    Guest(Error),
    /// The job's end.
    Stop(wasmtime::Error),
}

impl Fault {
    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::Guest(Error::InvalidArgument(text.into()))
    }

    pub(crate) fn quota(limit: &str, needed: u64, allowed: u64) -> Self {
        Self::Guest(Error::QuotaExceeded(Quota { limit: limit.to_owned(), needed, allowed }))
    }

    /// Our own mistake.
    pub(crate) fn internal(text: String) -> Self {
        Self::Stop(Stop::Internal(text).into())
    }

    /// The same where the function has no error to answer.
    pub(crate) fn into_stop(self) -> wasmtime::Error {
        match self {
            Self::Stop(error) => error,
            Self::Guest(Error::QuotaExceeded(quota)) if quota.limit == "handles" => Stop::Handles.into(),
            Self::Guest(error) => Stop::Internal(format!("an error where none can be answered: {error}")).into(),
        }
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        Self::Guest(match refusal {
            Refusal::InvalidArgument(text) => Error::InvalidArgument(text),
            Refusal::NotFound(text) => Error::NotFound(text),
            Refusal::QuotaExceeded { limit, needed, allowed } => return Self::quota(limit, needed, allowed),
            Refusal::Unsupported(text) => Error::Unsupported(text),
            Refusal::Other(text) => Error::Other(text),
            Refusal::Internal(text) => return Self::internal(text),
        })
    }
}

impl From<EngineError> for Fault {
    fn from(error: EngineError) -> Self {
        Self::Guest(match error.kind {
            ErrorKind::InvalidArgument => Error::InvalidArgument(error.message),
            ErrorKind::NonFinite => Error::NonFinite(error.message),
            ErrorKind::Unsupported => Error::Unsupported(error.message),
            ErrorKind::DeviceLost => Error::DeviceLost,
            ErrorKind::ActivationBytes { needed, allowed } => return Self::quota("activation-bytes", needed, allowed),
            // Adapters are counted here and were within the job's limit, so this is the device's shortage.
            ErrorKind::QuotaExceeded => Error::Other(error.message),
            // Slots are ours, so a slot that is not there is our mistake too.
            ErrorKind::NotFound | ErrorKind::Internal => return Self::internal(error.message),
        })
    }
}

impl From<wasmtime::component::ResourceTableError> for Fault {
    fn from(error: wasmtime::component::ResourceTableError) -> Self {
        Self::Stop(error.into())
    }
}

impl types::Host for State {
    fn convert_error(&mut self, fault: Fault) -> wasmtime::Result<Error> {
        match fault {
            Fault::Guest(error) => Ok(error),
            Fault::Stop(error) => Err(error),
        }
    }
}

fn parse_digest(text: &str) -> Result<Digest, Fault> {
    text.parse().map_err(|error: nodus_protocol::DigestParseError| Fault::invalid(error.to_string()))
}
