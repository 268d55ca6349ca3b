//! Who waits for a cohort's events, and how they are woken.
//!
//! Wakes nobody for another cohort's events: ten thousand idle streams cost nothing while one job tells.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use nodus_state::CohortId;
use tokio::sync::watch;

/// All that wait.
#[derive(Default)]
pub(super) struct Streams(Mutex<HashMap<CohortId, watch::Sender<()>>>);

/// One that waits.
pub(super) struct Subscription {
    streams: Arc<Streams>,
    cohort: CohortId,
    changed: watch::Receiver<()>,
}

impl Streams {
    /// Something changed in a cohort.
    pub(super) fn wake(&self, cohort: CohortId) {
        if let Some(sender) = self.lock().get(&cohort) {
            sender.send_replace(());
        }
    }

    /// How many cohorts somebody waits for.
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Waits for a cohort's changes from now on.
    pub(super) fn subscribe(self: &Arc<Self>, cohort: CohortId) -> Subscription {
        let changed = self.lock().entry(cohort).or_insert_with(|| watch::Sender::new(())).subscribe();
        Subscription { streams: self.clone(), cohort, changed }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<CohortId, watch::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscription {
    /// What changes after this is heard of by [`Subscription::changed`].
    pub(super) fn look(&mut self) {
        self.changed.mark_unchanged();
    }

    /// Resolves once something changed since the last look.
    pub(super) async fn changed(&mut self) {
        if self.changed.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut waiting = self.streams.lock();
        if waiting.get(&self.cohort).is_some_and(|sender| sender.receiver_count() <= 1) {
            waiting.remove(&self.cohort);
        }
    }
}
