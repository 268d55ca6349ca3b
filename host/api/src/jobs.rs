//! Jobs: how they are asked for, and what is said of them.
//!
//! A sweep is one request and one cohort; a single job is a cohort of one.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Declares a word that is one of a few, with its text; a `tt`, since utoipa does not see through a `literal`.
macro_rules! words {
    ($($(#[$doc:meta])+ $name:ident { $($(#[$variant_doc:meta])+ $variant:ident = $text:tt,)+ })+) => {$(
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        pub enum $name { $($(#[$variant_doc])+ #[serde(rename = $text)] $variant,)+ }

        impl $name {
            /// Every one of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Its text.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    )+};
}
pub(crate) use words;

words! {
    /// Where a job is in its life.
    JobState {
        /// It waits.
        Queued = "queued",
        /// It runs.
        Running = "running",
        /// It did what it was to do.
        Succeeded = "succeeded",
        /// It was asked to stop, ended well, and has a receipt.
        Stopped = "stopped",
        /// Its own fault; `message` says which.
        Failed = "failed",
        /// It was cut off, or never started.
        Cancelled = "cancelled",
        /// The service's fault.
        Broken = "broken",
    }

    /// How a job shares the device. Results do not depend on it.
    Lane {
        /// Passes shared with other jobs on the same model.
        Fused = "fused",
        /// An engine process of its own beside others.
        Mps = "mps",
        /// Nobody else on the device.
        Solo = "solo",
    }

    /// Who goes first.
    Priority {
        /// Before all of low priority.
        High = "high",
        /// After all of high priority.
        Low = "low",
    }

    /// How a job is cancelled.
    How {
        /// Asked to end well: what it trained is kept, with a receipt.
        Stop = "stop",
        /// Cut off: nothing is kept but its records.
        Cancel = "cancel",
    }
}

impl JobState {
    /// Whether nothing more will happen to the job.
    #[must_use]
    pub fn is_ended(self) -> bool {
        !matches!(self, Self::Queued | Self::Running)
    }
}

/// What a job may evaluate on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HeldOut {
    /// So many rows of its data, 1 or more.
    Count(u64),
    /// This part of its data, above 0 and below 1.
    Fraction(f64),
    /// A second data set, by its name.
    Data(String),
}

/// A parameter and the values to try.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SweepAxis {
    /// Which parameter.
    pub key: String,
    /// All different.
    pub values: Vec<Value>,
}

/// A job, or a sweep of jobs, to be run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SubmitRequest {
    /// A component's id, or the name of a ready-made one.
    pub component: String,
    /// A model's name.
    pub model: String,
    /// A data set's name.
    pub data: String,
    /// What the job may evaluate on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<HeldOut>,
    /// The job's parameters.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub parameters: Map<String, Value>,
    /// Parameters to vary: every combination is a member, and all run together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sweep: Vec<SweepAxis>,
    /// Of everything random in the job; all members have the same.
    #[serde(default)]
    pub seed: u64,
    /// Limits other than the defaults, by name: lower ones, and higher ones as far as the service's operator allows.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, u64>,
    /// How it shares the device.
    #[serde(default = "fused")]
    pub lane: Lane,
    /// Who goes first.
    #[serde(default = "low")]
    pub priority: Priority,
}

fn fused() -> Lane {
    Lane::Fused
}

fn low() -> Priority {
    Priority::Low
}

/// A job by its id and name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    /// The job's id.
    pub id: String,
    /// The swept parameters as a name, such as `learning_rate=0.0001`; empty for a single job.
    pub name: String,
}

/// What a submission came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Submitted {
    /// The cohort's id.
    pub cohort: String,
    /// Its jobs, in the sweep's order.
    pub jobs: Vec<Member>,
}

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Its id.
    pub id: String,
    /// Its cohort's id.
    pub cohort: String,
    /// Which of the cohort's members, from 0.
    pub member: u64,
    /// The swept parameters as a name; empty for a single job.
    pub name: String,
    /// Where it is in its life.
    pub state: JobState,
    /// While it waits: how many of your jobs go before it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ahead: Option<u64>,
    /// While it waits: why.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// Where it runs, or ran last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub placed: Option<String>,
    /// What was asked of it: to stop, or to be cut off.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stop: Option<How>,
    /// How it ended, where it did not end well.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub message: Option<String>,
    /// How often it was started; above 1 it was resumed, with the same bits.
    pub attempts: u64,
    /// The component, as it was asked for.
    pub component: String,
    /// Its digest.
    pub component_id: String,
    /// The model.
    pub model: String,
    /// The data set.
    pub data: String,
    /// What it may evaluate on.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub held_out: Option<HeldOut>,
    /// Its parameters, the swept ones among them.
    #[schema(value_type = Object)]
    pub parameters: Map<String, Value>,
    /// Of everything random in it.
    pub seed: u64,
    /// All limits, by name. Its device memory is planned.
    pub limits: BTreeMap<String, u64>,
    /// How it shares the device.
    pub lane: Lane,
    /// Who goes first.
    pub priority: Priority,
    /// Whether it has a receipt, and so artifacts.
    pub receipt: bool,
    /// Its last step, while it trains: `{"step", "loss", ...}`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<Object>)]
    pub last_step: Option<Value>,
    /// Its last evaluation: `{"step", "loss", "data", ...}`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<Object>)]
    pub last_evaluation: Option<Value>,
    /// How far it says it is: `{"done", "total"}`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schema(value_type = Option<Object>)]
    pub progress: Option<Value>,
    /// Time on the device, milliseconds.
    pub device_ms: u64,
    /// When it was submitted, Unix milliseconds.
    pub submitted_ms: u64,
    /// When it was started first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub started_ms: Option<u64>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ended_ms: Option<u64>,
}

/// Jobs, the newest first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobPage {
    /// Of this page.
    pub jobs: Vec<Job>,
    /// `before` of the next page; none where this is the last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<String>,
}

/// The members of a sweep, or one job alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Cohort {
    /// Its id.
    pub id: String,
    /// Its members, in order: those of this page.
    pub jobs: Vec<Job>,
    /// `after` of the next page; none where this is the last.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<u64>,
}

/// How a job is to be cancelled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CancelRequest {
    /// How.
    #[serde(default = "stop")]
    pub how: How,
}

fn stop() -> How {
    How::Stop
}

/// What cancelling came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cancellation {
    /// Whether it is over already: it had not been started.
    pub ended: bool,
}

/// A file that was kept of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Artifact {
    /// Its path in the results, such as `adapter/adapter_model.safetensors`.
    pub path: String,
    /// `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// Its length.
    pub bytes: u64,
}

/// Files of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ArtifactList {
    /// By path.
    pub artifacts: Vec<Artifact>,
}

#[cfg(test)]
mod tests {
    use super::{CancelRequest, How, Lane, SubmitRequest};

    #[test]
    fn what_is_left_out_has_its_default_and_what_is_unknown_is_refused() {
        let least = r#"{"component": "sft", "model": "m", "data": "d"}"#;
        let request: SubmitRequest = serde_json::from_str(least).unwrap();
        assert_eq!((request.seed, request.lane, request.sweep.len()), (0, Lane::Fused, 0));
        assert_eq!(serde_json::from_str::<CancelRequest>("{}").unwrap().how, How::Stop);
        for unknown in [r#"{"component": "sft", "model": "m", "data": "d", "hold_out": 1}"#, r#"{"component": "sft", "model": "m"}"#] {
            assert!(serde_json::from_str::<SubmitRequest>(unknown).is_err(), "{unknown}");
        }
    }
}
