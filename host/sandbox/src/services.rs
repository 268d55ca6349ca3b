//! What the sandbox needs from whoever runs a job: trunks, data, artifacts, and somebody who listens.
//!
//! The sandbox never opens a file or a socket itself; everything a guest can reach comes through here.

use std::sync::Arc;

use async_trait::async_trait;
use nodus_protocol::{AdapterWeights, Client, Digest, LossSums, ModelConfig, Sequence, StepReport, TrunkSlot};
use serde::{Deserialize, Serialize};

use crate::limits::LimitName;

/// Why a service refused. The text, but for `Internal`, is shown to the guest: no path, no address, nothing of another job.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the cases are those of nodus:gpu/types.error")]
pub enum Refusal {
    #[error("{0}")]
    InvalidArgument(String),
    #[error("not found: {0}")]
    NotFound(String),
    #[error("over the limit {limit}: {needed} needed, {allowed} allowed")]
    QuotaExceeded {
        #[serde(with = "crate::limits::name")]
        limit: LimitName,
        needed: u64,
        allowed: u64,
    },
    #[error("{0}")]
    Unsupported(String),
    #[error("{0}")]
    Other(String),
    /// A failure of the host itself. It ends the job as ours, is for the operator's log, and is never shown to the guest.
    #[error("internal error of the host")]
    Internal(String),
}

/// A trunk that a job may use.
#[derive(Clone)]
pub struct Trunk {
    /// What it is.
    pub config: Arc<ModelConfig>,
    /// Digest over configuration and weights.
    pub digest: Digest,
    /// The engine that holds it.
    pub engine: Client,
    /// Where in that engine.
    pub slot: TrunkSlot,
    /// Its tokenizer, if it came with one.
    pub text: Option<Arc<dyn Text>>,
}

/// A trunk's tokenizer and chat template. Errors are texts fit for the guest.
pub trait Text: Send + Sync {
    /// Tokens of a text, without special tokens that the text does not spell out.
    fn encode(&self, text: &str) -> Result<Vec<u32>, Refusal>;
    /// Text of tokens, special tokens included.
    fn decode(&self, tokens: &[u32]) -> Result<String, Refusal>;
    /// A conversation of (role, content) by the chat template.
    fn apply_chat_template(&self, messages: &[(String, String)], add_generation_prompt: bool) -> Result<String, Refusal>;
}

/// A data set, tokenised for one trunk at one maximum length.
#[derive(Clone)]
pub struct Dataset {
    /// Its examples.
    pub examples: Arc<Vec<Arc<Sequence>>>,
    /// How many were cut.
    pub truncated: u64,
    /// Digest as it was put into the store.
    pub digest: Digest,
}

/// How much a log line matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the cases are those of nodus:gpu/job.level")]
pub enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

/// Where a batch's sequences come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Source {
    /// The job's data set `train`.
    Train,
    /// The job's data set `held-out`.
    HeldOut,
    /// The guest itself.
    Own,
}

impl Source {
    /// All of them, the held-out data first.
    pub const ALL: [Self; 3] = [Self::HeldOut, Self::Train, Self::Own];

    /// The data set's name within the job; `own` for the guest's own sequences.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held-out",
            Self::Own => "own",
        }
    }
}

/// What a job tells. Steps and evaluations come from the engine, not from the guest's word.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// An optimiser step was taken.
    Step {
        /// Which of the job's adapters, from 0.
        adapter: u32,
        /// What the engine answered.
        report: StepReport,
        /// The step's learning rate.
        learning_rate: f32,
    },
    /// A batch was evaluated.
    Evaluation {
        /// Which of the job's adapters, from 0.
        adapter: u32,
        /// Its step count at that time.
        step: u64,
        /// What it was evaluated on.
        data: Source,
        /// The loss.
        sums: LossSums,
    },
    /// A long evaluation has come so far; there may be none of these.
    Evaluating {
        /// Sequences done.
        done: u64,
        /// Of how many.
        total: u64,
    },
    /// An adapter was saved.
    Saved {
        /// Which of the job's adapters, from 0.
        adapter: u32,
        /// Its step count at that time.
        step: u64,
        /// Under which name.
        name: String,
        /// The artifact.
        digest: Digest,
    },
    /// The guest reports a number.
    Metric {
        /// Its name.
        name: String,
        /// For which step.
        step: u64,
        /// The number.
        value: f64,
    },
    /// How far the guest is; total 0 means unknown.
    Progress {
        /// Done.
        done: u64,
        /// Of how many.
        total: u64,
    },
    /// A log line, or a line of the guest's standard output (info) or error (warn). Not yet escaped.
    Log {
        /// How much it matters.
        level: Level,
        /// The line.
        message: String,
    },
}

/// Everything a job can reach outside its sandbox. Names are the job's own: `model`, `train`, `held-out`, and the digests it was given.
#[async_trait]
pub trait Services: Send + 'static {
    /// A trunk by the job's name for it.
    async fn open_trunk(&mut self, name: &str) -> Result<Trunk, Refusal>;
    /// A data set by the job's name for it, for a trunk, cut to so many tokens an example.
    async fn open_dataset(&mut self, name: &str, trunk: &Trunk, max_length: usize) -> Result<Dataset, Refusal>;
    /// An adapter that this job saved or was given.
    async fn load_artifact(&mut self, trunk: &Trunk, digest: Digest) -> Result<Arc<AdapterWeights>, Refusal>;
    /// Keeps an adapter under a name (already checked), in place of an earlier one.
    async fn save_artifact(&mut self, trunk: &Trunk, name: &str, weights: &AdapterWeights) -> Result<Digest, Refusal>;
    /// Hears that the job is about to learn, at this question (see [`crate::JobSpec::stop_at`]), that it is to stop; once in a run. The job is
    /// answered when this returns, so that whoever runs it again can have it told at the same question.
    async fn stopping(&mut self, question: u64) -> Result<(), Refusal>;
    /// Hears what the job tells. May wait for a moment where the job tells faster than is written down.
    fn event(&mut self, event: Event);
}
