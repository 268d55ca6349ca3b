//! The service, told once, top-down: the folder is opened, ready-made components are registered, the address is bound, requests are answered until
//! the process is asked to end.
//!
//! Never blocks a thread that answers requests: what reads or writes a disk runs elsewhere ([`service::App::blocking`]).

mod adapters;
mod auth;
mod body;
mod checks;
mod config;
mod config_file;
mod document;
mod door;
mod download;
mod failure;
mod fsck;
mod gauges;
mod housekeeping;
mod linger;
mod listen;
mod planner;
mod rates;
mod ready_made;
mod routes;
mod service;
mod slots;
mod streams;
mod submit;
mod upload;
mod words;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use nodus_state::{Access, Depth, State};

use crate::app::Surroundings;
use crate::cli::{ServeArgs, StateMode};
use crate::error::{Ending, user};
use crate::floor::{self, Floor};
use crate::paths::Paths;
use crate::store::Store;
use crate::telemetry;
use crate::text::bytes;

#[cfg(test)]
pub(crate) use gauges::recorder;

/// The service's folder within the data folder.
const FOLDER: &str = crate::store::SERVICE;
/// Serves until the process is asked to end.
///
/// # Errors
/// The user's: an address, a certificate or a component that will not do, or the service runs already. Ours: the machine.
pub fn serve(store: Store, surroundings: &Surroundings, data_dir: &Path, args: &ServeArgs, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let settings = config::settings(surroundings.paths, args)?;
    let bound = listen::bind(surroundings.paths, &settings)?;
    let spans = settings.otlp.as_deref().map(telemetry::export).transpose()?;
    let (store, state) = (Arc::new(store), Arc::new(open_state(surroundings.paths, data_dir, Access::Whole)?));
    let recorder = gauges::recorder()?;
    let offers =
        service::Offers { merged: settings.offers_merged, lanes: settings.lanes, limits: settings.limits, holds: settings.floor.hold };
    let app = service::App::new(store.clone(), state.clone(), settings.sandbox, recorder.handle(), offers)?;
    metrics::set_global_recorder(recorder).context("installing what keeps the numbers")?;
    gauges::describe();
    floor::describe();
    ready_made::register(&app, surroundings.paths, &settings.components)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the runtime")?;
    runtime.spawn(housekeeping::keep(app.clone()));
    runtime.spawn(housekeeping::watch_bars(app.clone()));
    runtime.spawn(housekeeping::clear(app.clone()));
    let floor_threads = floor::threads()?;
    let floor = {
        let _on = floor_threads.enter();
        Floor::of_service((store, state, data_dir), surroundings, &settings.floor, settings.sandbox)?
    };
    if let Some(floor) = &floor {
        // All of the ledger was read and checked for the floor.
        app.follow(floor.follower()?);
    }
    // Scripts wait for this line: all that could still refuse has been opened.
    writeln!(out, "listening on {}", bound.url()).and_then(|()| out.flush()).context("writing to standard output")?;
    runtime.block_on(async {
        let to_end = listen::asked_to_end();
        let answered = listen::answer(app, bound, to_end.clone()).await;
        if let Some(floor) = floor {
            tokio::select! {
                () = floor.close() => {}
                () = listen::asked(to_end, 2) => tracing::warn!("asked to end once more: jobs go on from where they were kept last"),
            }
        }
        answered
    })?;
    // What is still at work then may be cut off at any point.
    floor_threads.shutdown_background();
    runtime.shutdown_background();
    drop(spans);
    Ok(Ending::Done)
}

/// Checks the service's state, or removes what nothing in it refers to.
///
/// # Errors
/// The user's: what does not agree, or the service runs. Ours: the disk.
pub fn state(paths: Paths, data_dir: &Path, mode: &StateMode, out: &mut dyn Write) -> anyhow::Result<()> {
    let text = match mode {
        StateMode::Fsck { deep } => {
            let depth = if *deep { Depth::Contents } else { Depth::Lengths };
            let state = open_state(paths, data_dir, Access::Rows)?;
            let mut faults: Vec<String> = state.fsck(depth)?.iter().map(ToString::to_string).collect();
            faults.extend(fsck::disagreements(&state, paths.create_dir_all(data_dir)?)?);
            if !faults.is_empty() {
                return Err(user(format!("the state does not agree with itself:\n{}", faults.join("\n"))));
            }
            "rows, blobs, receipts and ledger agree".to_owned()
        }
        StateMode::Gc => {
            let collected = open_state(paths, data_dir, Access::Whole)?.gc()?;
            format!("{} blobs of {} removed", collected.blobs, bytes(collected.bytes))
        }
    };
    writeln!(out, "{text}").context("writing to standard output")
}

/// Prints the OpenAPI document.
///
/// # Errors
/// Ours: standard output refuses.
pub fn openapi(out: &mut dyn Write) -> anyhow::Result<()> {
    write!(out, "{}", document::text()?).context("writing to standard output")
}

/// The service's state in a data folder.
///
/// # Errors
/// The user's: the service runs already, or the folder cannot be used. Ours: the state is damaged.
pub fn open_state(paths: Paths, data_dir: &Path, access: Access) -> anyhow::Result<State> {
    let path = data_dir.join(FOLDER);
    let dir = paths.create_dir_all(&path)?;
    State::open(dir, &path, access).map_err(|error| match error {
        nodus_state::StateError::InUse
        | nodus_state::StateError::Older
        | nodus_state::StateError::ReadOnly
        | nodus_state::StateError::Newer { .. } => user(error.to_string()),
        error => anyhow::Error::from(error).context("opening the service's state"),
    })
}
