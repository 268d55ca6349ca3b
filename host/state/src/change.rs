//! Who is told when something changed.
//!
//! Told after the commit, on the thread that wrote; a listener must be quick and must not write.

use crate::ids::{CohortId, JobId, TenantId};

/// Something changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Whose.
    pub tenant: TenantId,
    /// Of which cohort.
    pub cohort: CohortId,
    /// Of which job; none where it is all of the cohort.
    pub job: Option<JobId>,
    /// What.
    pub what: What,
}

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Jobs were submitted.
    Submitted,
    /// A job's state changed; there are new events too.
    State,
    /// There are new events.
    Events,
    /// A job's owner asks it to stop.
    Stop,
    /// A job was deleted.
    Deleted,
}

pub(crate) type Listener = Box<dyn Fn(&Change) + Send + Sync>;
