//! Jobs: how they are submitted, what becomes of them, and who may see them.
//!
//! Every transition is one transaction that checks the state it leaves.
//!
//! ```text
//! queued ──claim──> running ──finish──> succeeded | stopped | failed | cancelled | broken
//!   │  ^               │  reclaim: running, under a new attempt
//!   │  └───requeue─────┘
//!   └──cancel──> cancelled                  whatever ended ──delete──> leaving, seen by nobody ──> gone
//! ```

mod delete;
mod ended;
mod owner;
mod queue;
mod submit;
mod transition;

pub use ended::Ended;
pub use owner::{Cancelled, Filter, Job, Page};
pub use queue::{Queued, Running, Work};
pub use submit::{Key, Submitted};
pub use transition::{Claim, Finish};

pub(crate) use owner::cohort_number;
pub(crate) use transition::holder;
