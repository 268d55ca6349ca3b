//! The threads that the floor works on: their own, and behind those that answer requests.
//!
//! Never decides what runs: where nobody asks anything, the floor has the whole processor. Processes that these threads start stand where they do.

use anyhow::Context as _;
use tokio::runtime::{Builder, Runtime};

/// How far behind, as `nice` counts: a thread that answers a request has ten times the weight of one of these.
const BEHIND: i32 = 10;
/// The last place there is.
const LEAST: i32 = 19;

/// A runtime of such threads.
///
/// # Errors
/// Ours: the system has no threads left.
pub(crate) fn threads() -> anyhow::Result<Runtime> {
    let behind = behind();
    let mut builder = Builder::new_multi_thread();
    builder.enable_all().thread_name("floor").on_thread_start(move || stand_back(behind));
    builder.build().context("starting the floor's threads")
}

/// Behind this thread, wherever the service itself stands.
fn behind() -> i32 {
    #[cfg(target_os = "linux")]
    let own = rustix::process::getpriority_process(None).unwrap_or_default();
    #[cfg(not(target_os = "linux"))]
    let own = 0;
    (own + BEHIND).min(LEAST)
}

/// On Linux `nice` is of a thread, and inherited by the threads and processes that it starts; elsewhere it is of the whole process, and let be.
fn stand_back(behind: i32) {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, behind) {
        tracing::warn!(%error, "a thread of the floor does not stand back behind those that answer requests");
    }
    #[cfg(not(target_os = "linux"))]
    let _ = behind;
}
