//! The words of the service's HTTP API: what server and client write and read as JSON, and what the OpenAPI document says of it.
//!
//! Knows no transport and no state; a request with a field that is not here is refused.

mod events;
mod items;
mod jobs;
mod problem;
mod results;
mod usage;

pub use events::{Event, EventKind, MetricPage};
pub use items::{Component, ComponentList, DataSet, DataSetList, JobLedger, Model, ModelList, Upload};
pub use jobs::{
    Artifact, ArtifactList, CancelRequest, Cancellation, Cohort, HeldOut, How, Job, JobPage, JobState, Lane, Member, Priority,
    SubmitRequest, Submitted, SweepAxis,
};
pub use problem::{Code, Problem};
pub use results::{Bytes, Receipt, Signature};
pub use usage::{Quota, SigningKey, TenantUsage, Usage};
