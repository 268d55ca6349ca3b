//! What is submitted: what the members of a sweep have in common, once, and what each has of its own.
//!
//! Never kept in another form: a job's [`JobSpec`] is put together from both whenever somebody asks for it.

use std::collections::BTreeMap;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::Result;
use crate::spec::{Common, JobSpec};

/// What one member has of its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Member {
    /// Its name; empty where it is alone.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The swept parameters, as they were asked for.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub varied: Map<String, Value>,
    /// Swept parameters that the job sees otherwise than they were asked for.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub parameters: Map<String, Value>,
    /// Limits that are other than those in common.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, u64>,
    /// The adapter that it starts from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_adapter: Option<Digest>,
}

/// The members of a sweep, or one job.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// In common.
    pub common: Common,
    /// In order.
    pub members: Vec<Member>,
}

impl Common {
    /// The whole of a job.
    #[must_use]
    pub fn with(mut self, member: Member) -> JobSpec {
        let Member { name, varied, parameters, limits, init_adapter } = member;
        self.parameters.extend(varied.clone().into_iter().chain(parameters));
        self.parameters.sort_keys();
        self.limits.extend(limits);
        JobSpec { name, varied, common: self, init_adapter }
    }
}

impl Member {
    /// A limit of its own, or the one in common; 0 where there is none of that name.
    pub(crate) fn limit(&self, common: &Common, name: &str) -> u64 {
        self.limits.get(name).or_else(|| common.limits.get(name)).copied().unwrap_or(0)
    }
}

impl From<JobSpec> for Submission {
    /// One job.
    fn from(spec: JobSpec) -> Self {
        let JobSpec { name, varied, mut common, init_adapter } = spec;
        common.parameters.retain(|key, value| varied.get(key) != Some(value));
        Self { common, members: vec![Member { name, varied, init_adapter, ..Member::default() }] }
    }
}

/// A job as its rows have it.
pub(crate) fn whole(common: Option<&str>, own: &str) -> Result<JobSpec> {
    Ok(match common {
        Some(common) => serde_json::from_str::<Common>(common)?.with(serde_json::from_str(own)?),
        None => serde_json::from_str(own)?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Member, Submission, whole};
    use crate::spec::JobSpec;

    fn object(value: &Value) -> serde_json::Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn a_job_is_put_together_as_it_was_whether_it_was_kept_whole_or_in_two_parts() {
        let digest = "sha256:".to_owned() + &"7".repeat(64);
        let named = json!({ "name": "n", "digest": digest });
        let whole_text = json!({
            "name": "lr=1", "varied": {"lr": 1}, "component": named, "model": named, "data": named, "held_out": {"count": 5},
            "parameters": {"a": {"b": 1}, "lr": 1, "rank": 8}, "seed": u64::MAX, "limits": {"wall-ms": 7}, "lane": "solo",
            "priority": "high", "init_adapter": digest
        })
        .to_string();
        let job: JobSpec = whole(None, &whole_text).unwrap();
        let Submission { common, mut members } = Submission::from(job.clone());
        let texts = (serde_json::to_string(&common).unwrap(), serde_json::to_string(&members[0]).unwrap());
        assert!(!texts.1.contains("rank") && texts.1.contains("lr"), "{texts:?}");
        assert_eq!(serde_json::to_string(&whole(Some(&texts.0), &texts.1).unwrap()).unwrap(), whole_text, "to the byte: keys in order too");
        let other = Member {
            varied: object(&json!({ "lr": "x" })),
            parameters: object(&json!({ "lr": "y" })),
            limits: [("wall-ms".to_owned(), 8)].into(),
            ..members.remove(0)
        };
        let expected = JobSpec {
            varied: object(&json!({ "lr": "x" })),
            common: crate::Common {
                parameters: object(&json!({"a": {"b": 1}, "lr": "y", "rank": 8})),
                limits: [("wall-ms".to_owned(), 8)].into(),
                ..job.common.clone()
            },
            ..job
        };
        assert_eq!(common.with(other), expected);
    }
}
