//! What an engine holds of a job, as plain values: enough to go on in another engine of the same device class, bit for bit.
//!
//! Never a part of it: an adapter without its moments, its counts or what it accumulated would go on as something else.

use serde::{Deserialize, Serialize};

use crate::{EngineError, LoraConfig, LossSums};

/// Everything of one job.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JobState {
    /// Its adapters, in the order of their indices.
    pub adapters: Vec<AdapterState>,
}

/// Everything of one adapter. Weights, moments and gradient are float32 in one layout: module by module in the order of
/// [`LoraConfig::modules`], A then B.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterState {
    /// Its number within the job.
    pub index: u32,
    /// Its shape.
    pub config: LoraConfig,
    /// The job's seed, from which dropout draws.
    pub seed: u64,
    /// Optimiser steps taken.
    pub steps: u64,
    /// Forward-backwards done; dropout draws by it.
    pub count: u64,
    /// Sums since the last step.
    pub sums: LossSums,
    /// Why no command on it succeeds any more.
    pub poison: Option<EngineError>,
    /// The weights.
    pub params: Vec<f32>,
    /// The optimiser's first and second moments; none before the first step, when they are zero.
    pub moments: Option<[Vec<f32>; 2]>,
    /// What was accumulated since the last step; none where that is nothing.
    pub grads: Option<Vec<f32>>,
}
