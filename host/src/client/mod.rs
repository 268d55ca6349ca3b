//! The verbs that talk to a service, named in one place.
//!
//! Knows the service by its API alone: nothing here reads a data folder.

mod audit;
mod bars;
mod fetch;
mod files;
mod http;
mod jobs;
mod landing;
mod lines;
mod profile;
mod sse;
mod stored;
mod submit;
mod table;
mod upload;
mod watch;

use std::io::Write;

use anyhow::Context as _;

use crate::app::Surroundings;
use crate::cli::{ClientMode, ListArgs, RemoteArgs};
use crate::error::Ending;

pub(crate) use audit::audit;
pub use profile::ServiceEnv;

/// Does what the command line says; results go to `out`.
///
/// # Errors
/// The user's: what the service refuses, or a watched job that did not end well. Ours: the service failed or cannot be reached.
pub fn run(surroundings: &Surroundings, mode: &ClientMode, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    let connect = |remote| http::Remote::new(&profile::profile(surroundings, remote)?);
    let form = |remote: &RemoteArgs| watch::Form::new(remote.json, surroundings.is_terminal);
    let paths = surroundings.paths;
    let done = runtime.block_on(async {
        match mode {
            ClientMode::Submit(args) => submit::submit(&connect(&args.remote)?, (paths, form(&args.remote)), args, out).await,
            ClientMode::Jobs(args) => jobs::list(&connect(&args.remote)?, args, out).await,
            ClientMode::Watch(args) => watch::watch(&connect(&args.remote)?, &args.id, form(&args.remote), out).await,
            ClientMode::Logs(args) => jobs::logs(&connect(&args.remote)?, args, out).await,
            ClientMode::Metrics(args) => jobs::metrics(&connect(&args.remote)?, args, out).await,
            ClientMode::Cancel(args) => jobs::cancel(&connect(&args.remote)?, args, out).await,
            ClientMode::Fetch(args) => fetch::fetch(&connect(&args.remote)?, paths, args, out).await,
            ClientMode::Upload(args) => stored::upload(&connect(&args.remote)?, paths, args, out).await,
            ClientMode::Uploads(ListArgs { remote }) => stored::uploads(&connect(remote)?, remote.json, out).await,
            ClientMode::Models(ListArgs { remote }) => stored::models(&connect(remote)?, remote.json, out).await,
            ClientMode::Usage(ListArgs { remote }) => stored::usage(&connect(remote)?, remote.json, out).await,
            ClientMode::Rm(args) => stored::rm(&connect(&args.remote)?, args, out).await,
        }
    });
    done.map_err(http::at_last).map(|()| Ending::Done)
}
