//! What jobs tell while they run.
//!
//! The bodies are those of the result files: a step is a line of `losses.jsonl`, an evaluation one of `held_out.jsonl`, a metric one of `metrics.jsonl`.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::jobs::words;

words! {
    /// What an event tells.
    EventKind {
        /// The job's state changed: `{"state", ...}`.
        State = "state",
        /// An optimiser step: `{"step", "loss", "loss_bits", "grad_norm", "learning_rate", "tokens"}`.
        Step = "step",
        /// An evaluation: `{"step", "loss", "loss_bits", "tokens", "sequences", "data"}`.
        Evaluation = "evaluation",
        /// A metric of the component's own: `{"name", "step", "value"}`.
        Metric = "metric",
        /// How far the component says it is: `{"done", "total"}`.
        Progress = "progress",
        /// A line of the component's log: `{"level", "message"}`.
        Log = "log",
        /// An adapter was saved: `{"name", "step", "digest"}`.
        Artifact = "artifact",
    }
}

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Within its cohort, from 1; the id of the server-sent event.
    pub position: u64,
    /// Of which job.
    pub job: String,
    /// When, Unix milliseconds.
    pub ms: u64,
    /// What it tells.
    pub kind: EventKind,
    /// What it says.
    #[schema(value_type = Object)]
    pub body: Value,
}

/// Steps, evaluations and metrics of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MetricPage {
    /// In the order they were told.
    pub events: Vec<Event>,
    /// `after` of the next page; none where this is all there is yet.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<u64>,
}
