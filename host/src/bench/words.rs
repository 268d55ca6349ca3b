//! What a measurement and its worker processes say to each other: one JSON value a line.
//!
//! Order, ready, a line to go, result.

use std::collections::BTreeMap;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use super::variant::Variant;
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
    pub(super) variant: Variant,
    /// A job whose passes go before those of others.
    pub(super) urgent: Option<u32>,
}

/// What a PyTorch process is to run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PeerOrder<'a> {
    pub(super) work: &'a Work,
    pub(super) jobs: &'a [u32],
    /// `eager`, `graph` or `compile`.
    pub(super) mode: &'a str,
    /// As PyTorch calls it.
    pub(super) device: &'a str,
    /// `f32` or `bf16`.
    pub(super) dtype: &'a str,
    /// A Hugging Face folder, or none where the weights follow from a recipe.
    pub(super) folder: Option<&'a std::path::Path>,
    pub(super) recipe: Option<&'a serde_json::Value>,
}

/// What it says before the clock starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    /// What decides the bits of its results.
    pub(super) class: BTreeMap<String, String>,
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
    /// The largest difference of a loss; infinite where one has other steps, or a loss that is not finite.
    pub(super) fn distance(&self, other: &Self) -> f64 {
        if self.loss_bits.len() != other.loss_bits.len() {
            return f64::INFINITY;
        }
        let value = |bits: &String| u32::from_str_radix(bits, 16).map_or(f64::INFINITY, |bits| f64::from(f32::from_bits(bits)));
        let pairs = self.loss_bits.iter().zip(&other.loss_bits);
        let distances = pairs.map(|(one, other)| (value(one) - value(other)).abs());
        distances.fold(0.0, |most, distance| if distance.is_finite() { f64::max(most, distance) } else { f64::INFINITY })
    }

    /// Whether both are bit-equal.
    pub(super) fn equals(&self, other: &Self) -> bool {
        let bits = |job: &Self| (job.job, job.loss_bits.clone(), job.grad_norm_bits.clone(), job.adapter, job.adapter_bytes);
        bits(self) == bits(other)
    }
}
