//! Who is told when something changed.
//!
//! Told after the commit, on the thread that wrote; a listener must be quick and must not write.

use crate::ids::{CohortId, JobId, TenantId};
use crate::words::EventKind;

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
    /// There are new events of these kinds.
    Events(Kinds),
    /// A job's owner asks it to stop.
    Stop,
    /// A job was deleted.
    Deleted,
}

/// Some kinds of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Kinds(u32);

impl Kinds {
    /// Every kind, those of later versions too.
    pub const ALL: Self = Self(u32::MAX);

    /// Whether both name some kind.
    #[must_use]
    pub fn meet(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl FromIterator<EventKind> for Kinds {
    fn from_iter<T: IntoIterator<Item = EventKind>>(kinds: T) -> Self {
        Self(kinds.into_iter().fold(0, |kinds, kind| kinds | 1 << kind as u32))
    }
}

pub(crate) type Listener = Box<dyn Fn(&Change) + Send + Sync>;
