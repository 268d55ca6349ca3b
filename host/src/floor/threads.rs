//! The threads that the floor works on: their own, and behind those that answer requests.
//!
//! Never decides what runs: where nobody asks anything, the floor has the whole processor. Processes that these threads start stand where they do.

use anyhow::Context as _;
use tokio::runtime::{Builder, Runtime};

use crate::process::rank::Rank;

/// A runtime of such threads.
///
/// # Errors
/// Ours: the system has no threads left.
pub(crate) fn threads() -> anyhow::Result<Runtime> {
    let rank = Rank::behind();
    let mut builder = Builder::new_multi_thread();
    builder.enable_all().thread_name("floor").on_thread_start(move || rank.take());
    builder.build().context("starting the floor's threads")
}
