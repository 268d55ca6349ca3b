//! What the service remembers: tenants and their tokens, blobs, jobs, events, usage. One SQLite database and a folder of blobs.
//!
//! Knows no HTTP, no async runtime, no wasm and no device; every call blocks until what it wrote is on the disk. Nothing here shows one tenant what
//! another one has: a function that serves a tenant takes its id, and what belongs to somebody else is `NotFound` like what is not there.
//!
//! For who runs the jobs: [`State::queued`], [`State::running`], [`State::claim`], [`State::work`], [`State::append`], [`State::told`], [`State::note_stop`], [`State::requeue`],
//! [`State::finish`]. A [`Claim`] carries the attempt it was made for; once the job is taken from its holder, whatever it still writes is refused.

mod access;
mod blobs;
mod change;
mod database;
mod error;
mod events;
mod excuses;
mod fsck;
mod gc;
mod ids;
mod items;
mod jobs;
mod migrate;
mod partial;
mod place;
mod quota;
mod replay;
mod room;
mod spec;
mod state;
mod submission;
mod tenants;
mod tokens;
mod told;
mod usage;
mod words;

pub use access::Access;
pub use blobs::{Kept, Staged, blob_path};
pub use change::{Change, Kinds, What};
pub use error::{Result, StateError};
pub use events::{Event, NewEvent, Stream};
pub use fsck::{Depth, Fault};
pub use gc::Collected;
pub use ids::{CohortId, JobId, TenantId};
pub use items::{FileRef, Item, NewItem, Owner, Reference};
pub use jobs::{Cancelled, Claim, Ended, Filter, Finish, Job, Key, Page, Queued, Running, Submitted, Work};
pub use place::Whole;
pub use quota::Quota;
pub use spec::{Common, HeldOut, JobSpec, Named};
pub use state::State;
pub use submission::{Member, Submission};
pub use tenants::Tenant;
pub use tokens::{Bars, Bearer, Token};
pub use usage::Usage;
pub use words::{EventKind, ItemKind, JobState, Lane, Outcome, Priority, Role, Stop};
