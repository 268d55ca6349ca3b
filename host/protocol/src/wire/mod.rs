//! A client and its engine in two processes: commands and replies as frames on a Unix stream.
//!
//! Neither end of the channel can tell: jobs have a [`crate::Client`], the engine an [`crate::Inbox`], as within one process.

mod connect;
mod grants;
mod seen;
mod serve;

use serde::{Deserialize, Serialize};

use crate::{Command, EngineError, Reply};

pub use connect::connect;
pub use grants::{Breach, Grants};
pub use serve::{WireError, serve};

/// A command on its way; the number returns with its answer.
#[derive(Debug, Serialize, Deserialize)]
struct Call {
    id: u64,
    command: Command,
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
struct Return {
    id: u64,
    reply: Result<Reply, EngineError>,
}
