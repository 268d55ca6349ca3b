//! What a job is made of, as it was submitted.
//!
//! Complete: nothing of it is looked up by name again, so that whatever is renamed or removed later changes no job.

use std::collections::BTreeMap;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::words::{Lane, Priority};

/// Something by the name its owner used, and what that was at submission.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// As it was called.
    pub name: String,
    /// What it was.
    pub digest: Digest,
}

/// What a job may evaluate on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldOut {
    /// Nothing.
    #[default]
    Nothing,
    /// So many rows of its data.
    Count(u64),
    /// This part of its data, above 0 and below 1.
    Fraction(f64),
    /// A second data set.
    Data(Named),
}

/// What the members of a sweep have in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Common {
    /// What runs.
    pub component: Named,
    /// The frozen model.
    pub model: Named,
    /// What they train on.
    pub data: Named,
    /// What they may evaluate on.
    pub held_out: HeldOut,
    /// The parameters that are not swept, keys sorted at every depth; of one job all of them.
    pub parameters: Map<String, Value>,
    /// Of everything random in them.
    pub seed: u64,
    /// All limits, by name.
    pub limits: BTreeMap<String, u64>,
    /// How they share the device.
    pub lane: Lane,
    /// Who goes first.
    pub priority: Priority,
}

/// What a job is made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Its name among the members of its sweep; empty where it is alone.
    pub name: String,
    /// The swept parameters.
    pub varied: Map<String, Value>,
    /// What it would have in common with others, with what it has of its own in it.
    #[serde(flatten)]
    pub common: Common,
    /// The adapter that it starts from.
    pub init_adapter: Option<Digest>,
}
