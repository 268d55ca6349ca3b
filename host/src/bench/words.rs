//! What a measurement and its worker processes say to each other: one JSON value a line.
//!
//! Order, ready, a line to go, result.

use std::collections::BTreeMap;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use super::work::Work;
use crate::run::sharing::Sharing;

/// What one process is to run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) work: Work,
    /// Those of its jobs that run here, all at once.
    pub(super) jobs: Vec<u32>,
    /// Whether members of a sweep share the trunk's activations.
    pub(super) shares: bool,
    /// CUDA graphs.
    pub(super) graphs: bool,
}

/// What it says before the clock starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    /// What decides the bits of its results.
    pub(super) class: BTreeMap<String, String>,
    /// As people call the device.
    pub(super) device: String,
}

/// What it measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// From the line to go to the last answer.
    pub(super) seconds: f64,
    pub(super) jobs: Vec<JobDone>,
    /// What the engine did since then.
    pub(super) sharing: Sharing,
}

/// What one job answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct JobDone {
    pub(super) job: u32,
    /// The loss of every step, those of warm-up too: the float32 in hexadecimal.
    pub(super) loss_bits: Vec<String>,
    /// The same of gradient norms.
    pub(super) grad_norm_bits: Vec<String>,
    /// Of the adapter's PEFT weights file after the last step.
    pub(super) adapter: Digest,
    pub(super) adapter_bytes: u64,
    /// Milliseconds of each measured step, from asking to answer.
    pub(super) step_ms: Vec<f64>,
}

impl JobDone {
    /// Whether both are bit-equal.
    pub(super) fn equals(&self, other: &Self) -> bool {
        let bits = |job: &Self| (job.job, job.loss_bits.clone(), job.grad_norm_bits.clone(), job.adapter, job.adapter_bytes);
        bits(self) == bits(other)
    }
}
