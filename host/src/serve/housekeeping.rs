//! What the service does for itself from time to time.
//!
//! Never at the expense of a request: on a thread of its own, and rarely.

use std::time::{Duration, Instant};

use super::service::{App, Service};

/// How often it is looked whether a token was revoked or a tenant disabled, which an operator does in another process, and whether a job was deleted.
const LOOK: Duration = Duration::from_secs(1);

/// After how long what failed is tried again.
const AGAIN: Duration = Duration::from_secs(10);

/// How often blobs are looked for that nothing refers to, since a crash left them, and uploads that nobody goes on with.
const COLLECT: Duration = Duration::from_secs(3600);

/// Keeps house until the process ends.
pub(super) async fn keep(app: App) {
    loop {
        tokio::time::sleep(COLLECT).await;
        match app.blocking(|service| Ok(service.state.gc()?)).await {
            Ok(collected) if collected.blobs > 0 => tracing::info!(?collected, "blobs that nothing refers to were removed"),
            Ok(_) => {}
            Err(failure) => tracing::warn!(?failure, "blobs that nothing refers to could not be removed"),
        }
        match app.blocking(|service| Ok(service.state.forget_uploads()?)).await {
            Ok(count) if count > 0 => tracing::info!(count, "uploads that nobody went on with were forgotten"),
            Ok(_) => {}
            Err(failure) => tracing::warn!(?failure, "uploads that nobody went on with could not be forgotten"),
        }
    }
}

/// Deletes what is left of jobs that their owners deleted, until the process ends; also of those of before it was started. The database is left to
/// others for as long as it was held. Contents that were kept and that no row came to refer to go on the way; and
/// where the disk refused what was to be written, it is tried whether it still does.
pub(super) async fn clear(app: App) {
    loop {
        let began = Instant::now();
        let clear = |service: &Service| {
            if service.state.try_again().is_err() {
                // Said already.
                return Ok(None);
            }
            let swept = service.state.sweep();
            let is_more = service.state.delete_piece()?;
            swept?;
            Ok(Some(is_more))
        };
        let pause = match app.blocking(clear).await {
            Ok(Some(true)) => began.elapsed(),
            Ok(Some(false)) => LOOK,
            Ok(None) => AGAIN,
            Err(failure) => {
                tracing::warn!(?failure, "what is left of what was deleted could not be removed; it is tried again");
                AGAIN
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Notices what shuts bearers out, for those who hold a stream open, until the process ends.
pub(super) async fn watch_bars(app: App) {
    loop {
        tokio::time::sleep(LOOK).await;
        match app.blocking(|service| Ok(service.state.bars()?)).await {
            Ok(bars) => {
                app.bars.send_if_modified(|known| std::mem::replace(known, bars.clone()) != bars);
            }
            Err(failure) => tracing::warn!(?failure, "it cannot be seen whether a token was revoked"),
        }
    }
}
