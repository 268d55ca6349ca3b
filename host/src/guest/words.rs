//! What a guest process and its parent say to each other.
//!
//! Plain values. The parent reads the guest's words as a stranger's; the guest takes its parent's as they are.

use std::sync::Arc;

use nodus_formats::TextFiles;
use nodus_protocol::{AdapterWeights, Digest, JobSlot, ModelConfig, TrunkSlot};
use nodus_sandbox::services::{Event, Refusal};
use nodus_sandbox::{JobEnd, Limits};
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use crate::run::tokens::Part;

/// From the parent. A job is called by its slot in the engine.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToGuest {
    /// A component that jobs will name.
    Component(SealedCode),
    /// Run a job.
    Run(JobSlot, Box<Brief>),
    /// Have the job's `should-stop` answer yes.
    Stop(JobSlot),
    /// End the job at once; nobody waits for its end.
    Cancel(JobSlot),
    /// The answer to a question.
    Answer(u64, Result<Answer, Refusal>),
    /// Say `Pong`.
    Ping,
}

/// From the guest process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToParent {
    /// It is locked down, and waits for jobs. What the kernel did not grant.
    Ready(Vec<String>),
    /// Of a job.
    Of(JobSlot, FromJob),
    /// It lives.
    Pong,
}

/// Of a job.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromJob {
    /// Something happened.
    Event(Event),
    /// It needs something; the number returns with the answer.
    Ask(u64, Question),
    /// It ended. The last that is heard of it.
    Ended(Box<JobEnd>),
}

/// Machine code under a seal that was made for this process alone.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SealedCode {
    pub(super) component: Digest,
    pub(super) settings: Digest,
    pub(super) key: [u8; 32],
    pub(super) sealed: ByteBuf,
}

/// What a job is given beside what it asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Brief {
    pub(super) component: Digest,
    pub(super) params: String,
    pub(super) seed: u64,
    pub(super) limits: Limits,
    pub(super) stop_at: Option<u64>,
    pub(super) cohort: Option<u64>,
}

/// What a job may ask: the calls of `nodus_sandbox::services::Services`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Question {
    /// A trunk by the job's name for it. Answers `Trunk`.
    Trunk(String),
    /// What the job's model says about text. Answers `Text`.
    Text,
    /// A data set by the job's name for it. Answers `Rows`.
    Rows(String),
    /// Bytes of a data set from a place on. Answers `Bytes`; none at the end.
    Bytes { rows: u64, offset: u64 },
    /// An adapter that the job saved or was given. Answers `Weights`.
    Load(Digest),
    /// Keep an adapter. Answers `Saved`.
    Save(String, Box<AdapterWeights>),
    /// It is about to learn, at this question, that it is to stop. Answers `Noted`; once in a run.
    Stopping(u64),
}

/// The answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    Trunk(TrunkWords),
    Text(Arc<TextFiles>),
    Rows(RowsWords),
    Bytes(ByteBuf),
    Weights(Arc<AdapterWeights>),
    Saved(Digest),
    Noted,
}

/// A trunk, but for its engine and its tokenizer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TrunkWords {
    pub(super) config: Arc<ModelConfig>,
    pub(super) digest: Digest,
    pub(super) slot: TrunkSlot,
    pub(super) has_text: bool,
}

/// A data set, but for its bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RowsWords {
    /// Tells these rows from all others of the parent.
    pub(super) id: u64,
    pub(super) part: Part,
}
