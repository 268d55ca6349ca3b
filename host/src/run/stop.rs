//! Ctrl-C: the first asks the job to stop, the second ends it.
//!
//! Decides nothing about what is kept.

use nodus_sandbox::StopFlag;

use super::recorder::Listener;

/// Resolves at the second Ctrl-C; sets the flag at the first and says so.
pub(super) async fn second_interrupt(stop: StopFlag, listener: Listener) {
    if tokio::signal::ctrl_c().await.is_err() {
        // Without a handler Ctrl-C ends the process as it always does.
        return std::future::pending().await;
    }
    stop.request();
    listener.note("stopping: the job finishes its step and saves; Ctrl-C again ends it at once");
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}
