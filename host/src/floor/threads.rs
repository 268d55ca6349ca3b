//! The threads that the floor works on: their own, and behind those that answer requests.
//!
//! Never decides what runs: where nobody asks anything, the floor has the whole processor. Processes that these threads start stand where they do.

use anyhow::Context as _;
use tokio::runtime::{Builder, Runtime};

/// How far behind, as `nice` counts: a thread that answers a request has ten times the weight of one of these.
const BEHIND: i32 = 10;

/// A runtime of such threads.
///
/// # Errors
/// Ours: the system has no threads left.
pub(crate) fn threads() -> anyhow::Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.enable_all().thread_name("floor").on_thread_start(stand_back);
    builder.build().context("starting the floor's threads")
}

/// On Linux `nice` is of a thread, and inherited by the threads and processes that it starts; elsewhere it is of the whole process, and let be.
fn stand_back() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, BEHIND) {
        tracing::debug!(%error, "a thread of the floor does not stand back");
    }
}
