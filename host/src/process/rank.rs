//! Where a thread stands for the processor, as `nice` counts: behind those that answer requests.
//!
//! Never goes ahead of where it stood.

/// How far behind: a thread that answers a request has ten times the weight of one that stands there.
const BEHIND: i32 = 10;
/// The last place there is.
const LEAST: i32 = 19;

/// A place behind the service's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rank(i32);

impl Rank {
    /// Behind this thread, wherever the service itself stands.
    pub(crate) fn behind() -> Self {
        #[cfg(target_os = "linux")]
        let own = rustix::process::getpriority_process(None).unwrap_or_default();
        #[cfg(not(target_os = "linux"))]
        let own = 0;
        Self((own + BEHIND).min(LEAST))
    }

    /// Has this thread stand there. On Linux a place is a thread's, and inherited by the threads and processes that it starts; elsewhere it is the whole
    /// process's, and let be.
    pub(crate) fn take(self) {
        #[cfg(target_os = "linux")]
        if let Err(error) = rustix::process::setpriority_process(None, self.0) {
            tracing::warn!(%error, "what works does not stand back behind what answers requests");
        }
        #[cfg(not(target_os = "linux"))]
        let _ = self.0;
    }
}
