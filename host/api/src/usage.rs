//! What a tenant has, uses and may use.
//!
//! Its own alone.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Bounds; what is left out has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Quota {
    /// Jobs that wait. Refuses the submission.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub queued_jobs: Option<u64>,
    /// Jobs that run at the same time. More wait.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub running_jobs: Option<u64>,
    /// Jobs of high priority that wait or run. Refuses the submission.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub high_jobs: Option<u64>,
    /// Bytes of everything kept, each content counted once. Refuses the upload and the submission; ends a job that leaves more.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub stored_bytes: Option<u64>,
    /// Device memory of jobs that run. A job that needs more alone is refused; others wait.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub device_bytes: Option<u64>,
    /// Time on the device in all, milliseconds. Refuses the submission.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub device_ms: Option<u64>,
    /// Requests a second. Refuses the request with `Retry-After`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub requests_per_second: Option<u64>,
}

/// What is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// Jobs that wait.
    pub queued_jobs: u64,
    /// Jobs that run.
    pub running_jobs: u64,
    /// Jobs of high priority that wait or run.
    pub high_jobs: u64,
    /// Bytes of everything kept, each content counted once, and of what jobs are made of and told.
    pub stored_bytes: u64,
    /// Device memory that the running jobs are planned to hold.
    pub device_bytes: u64,
    /// Time on the device in all, milliseconds.
    pub device_ms: u64,
}

/// A tenant's usage and quota.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TenantUsage {
    /// Its name.
    pub tenant: String,
    /// What it uses.
    pub usage: Usage,
    /// What it may use.
    pub quota: Quota,
}

/// The key that a host signs its receipts with: the public half.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SigningKey {
    /// As receipts name it.
    pub keyid: String,
    /// Ed25519, as PEM (SubjectPublicKeyInfo).
    pub pem: String,
}
