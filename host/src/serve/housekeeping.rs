//! What the service does for itself from time to time.
//!
//! Never at the expense of a request: on a thread of its own, and rarely.

use std::time::Duration;

use super::service::App;

/// How often blobs that nothing refers to are removed.
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
    }
}
