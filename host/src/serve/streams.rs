//! Who waits for a cohort's events, and how they are woken.
//!
//! Wakes nobody for another cohort's events, nor for kinds that a stream leaves out: ten thousand idle streams cost nothing while one job tells.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use nodus_state::{CohortId, Kinds};
use tokio::sync::watch;

/// All that wait.
#[derive(Default)]
pub(super) struct Streams(Mutex<HashMap<CohortId, Waiting>>);

/// Those that wait for a cohort, by the kinds that they read.
type Waiting = HashMap<Kinds, watch::Sender<()>>;

/// One that waits.
pub(super) struct Subscription {
    streams: Arc<Streams>,
    cohort: CohortId,
    kinds: Kinds,
    changed: watch::Receiver<()>,
}

impl Streams {
    /// Something of these kinds changed in a cohort.
    pub(super) fn wake(&self, cohort: CohortId, kinds: Kinds) {
        for (read, sender) in self.lock().get(&cohort).into_iter().flatten() {
            if read.meet(kinds) {
                sender.send_replace(());
            }
        }
    }

    /// How many cohorts somebody waits for.
    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Waits for a cohort's changes of these kinds from now on.
    pub(super) fn subscribe(self: &Arc<Self>, cohort: CohortId, kinds: Kinds) -> Subscription {
        let changed = self.lock().entry(cohort).or_default().entry(kinds).or_insert_with(|| watch::Sender::new(())).subscribe();
        Subscription { streams: self.clone(), cohort, kinds, changed }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<CohortId, Waiting>> {
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
        let mut streams = self.streams.lock();
        let Some(waiting) = streams.get_mut(&self.cohort) else { return };
        if waiting.get(&self.kinds).is_some_and(|sender| sender.receiver_count() <= 1) {
            waiting.remove(&self.kinds);
        }
        if waiting.is_empty() {
            streams.remove(&self.cohort);
        }
    }
}

#[cfg(test)]
mod tests {
    use nodus_state::EventKind;

    use super::*;

    #[test]
    fn only_who_reads_a_kind_of_a_cohort_is_woken_by_it() {
        let streams = Arc::new(Streams::default());
        let [cohort, other] = [1, 2].map(|n| format!("00000000-0000-7000-8000-00000000000{n}").parse().unwrap());
        let logs = Kinds::from_iter([EventKind::Log]);
        let mut waiting = [(cohort, logs), (cohort, Kinds::ALL), (other, logs)].map(|(cohort, kinds)| streams.subscribe(cohort, kinds));
        let mut woken = |kind| {
            streams.wake(cohort, kind);
            waiting.each_mut().map(|waiting| {
                let has_changed = waiting.changed.has_changed().unwrap();
                waiting.look();
                has_changed
            })
        };
        assert_eq!(woken(Kinds::from_iter([EventKind::Step])), [false, true, false]);
        assert_eq!(woken(logs), [true, true, false]);
        assert_eq!(woken(Kinds::ALL), [true, true, false]);
        drop(waiting);
        assert_eq!(streams.len(), 0);
    }
}
