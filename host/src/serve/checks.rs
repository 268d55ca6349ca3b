//! Whose upload or submission is looked at next: tenants take turns, each with one at a time where others wait.
//!
//! Knows neither. Who waits is a future and holds no thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodus_state::TenantId;
use tokio::sync::oneshot;

/// Places to look at something in, and who waits for one.
pub(super) struct Checks(Mutex<Inner>);

struct Inner {
    free: usize,
    of_one_max: usize,
    /// Who has them.
    at_work: Vec<TenantId>,
    /// Who waits, the longest first; of one tenant too.
    waiting: VecDeque<(TenantId, oneshot::Sender<Turn>)>,
}

/// A place; given back when it is dropped.
pub(super) struct Turn {
    checks: Arc<Checks>,
    of: TenantId,
}

impl Checks {
    /// So many places.
    pub(super) fn new(places: usize) -> Arc<Self> {
        Self::bounded(places, places)
    }

    /// So many places, of which one tenant has at most these, though nobody else waits.
    pub(super) fn bounded(places: usize, of_one_max: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Inner { free: places, of_one_max, at_work: Vec::new(), waiting: VecDeque::new() })))
    }

    /// A place, once it is the tenant's turn.
    pub(super) async fn take(self: &Arc<Self>, of: TenantId) -> Option<Turn> {
        let (tell, told) = oneshot::channel();
        self.inner().waiting.push_back((of, tell));
        self.give();
        told.await.ok()
    }

    /// How many wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.inner().waiting.len()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives free places to who waits.
    fn give(self: &Arc<Self>) {
        loop {
            let Some((of, tell)) = self.inner().next() else { return };
            // Whoever is gone by now gives it back at once; not under the lock.
            drop(tell.send(Turn { checks: self.clone(), of }));
        }
    }
}

impl Inner {
    /// Whose turn it is: of those that wait the first with fewest places, so that one tenant has two only where nobody else waits.
    fn next(&mut self) -> Option<(TenantId, oneshot::Sender<Turn>)> {
        self.waiting.retain(|(_, tell)| !tell.is_closed());
        if self.free == 0 {
            return None;
        }
        let has = |of: &TenantId| self.at_work.iter().filter(|other| *other == of).count();
        let counted = self.waiting.iter().enumerate().map(|(at, (of, _))| (has(of), at));
        let (_, at) = counted.filter(|(has, _)| *has < self.of_one_max).min()?;
        let next = self.waiting.remove(at)?;
        self.free -= 1;
        self.at_work.push(next.0);
        Some(next)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        {
            let mut inner = self.checks.inner();
            inner.free += 1;
            if let Some(at) = inner.at_work.iter().position(|of| *of == self.of) {
                let of = inner.at_work.remove(at);
                // Its others go behind those of tenants that waited meanwhile.
                let (own, mut others): (VecDeque<_>, VecDeque<_>) =
                    std::mem::take(&mut inner.waiting).into_iter().partition(|(other, _)| *other == of);
                others.extend(own);
                inner.waiting = others;
            }
        }
        self.checks.give();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use nodus_state::{Access, Quota, State, TenantId};
    use tokio::sync::mpsc::unbounded_channel;

    use super::Checks;

    fn tenants() -> [TenantId; 3] {
        let folder = tempfile::tempdir().unwrap();
        let dir = cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        let state = State::open(dir, folder.path(), Access::Whole).unwrap();
        ["a", "b", "c"].map(|name| state.add_tenant(name, Quota::DEFAULT).unwrap().id)
    }

    /// The order in which those get a place that ask in this order, each giving it back once the next is asked for.
    async fn order(checks: &Arc<Checks>, asked: &[TenantId]) -> Vec<TenantId> {
        let (tell, mut told) = unbounded_channel();
        for of in asked.iter().copied() {
            let (checks, tell) = (checks.clone(), tell.clone());
            tokio::spawn(async move { tell.send((of, checks.take(of).await.unwrap())) });
            tokio::task::yield_now().await;
        }
        let (mut order, mut held) = (Vec::new(), std::collections::VecDeque::new());
        for _ in asked {
            let (of, turn) = loop {
                match tokio::time::timeout(Duration::from_millis(20), told.recv()).await {
                    Ok(next) => break next.unwrap(),
                    // Nobody else may have one: the first ends.
                    Err(_) => drop(held.pop_front()),
                }
            };
            order.push(of);
            held.push_back(turn);
        }
        order
    }

    #[tokio::test]
    async fn tenants_take_turns_however_many_one_has_waiting() {
        let [a, b, c] = tenants();
        assert_eq!(order(&Checks::new(1), &[a, a, a, a, b, b, c]).await, [a, b, c, a, b, a, a]);
        // Both places are the first's until another asks, which then waits for one to end and for no more.
        assert_eq!(order(&Checks::new(2), &[a, a, a, a, a, a, b]).await, [a, a, b, a, a, a, a]);
        // One place is all that it may have: the other is whose who comes.
        assert_eq!(order(&Checks::bounded(2, 1), &[a, a, a, b]).await, [a, b, a, a]);
    }

    #[tokio::test]
    async fn who_is_gone_has_no_turn_and_a_place_that_was_for_it_is_the_nexts() {
        let [a, b, _] = tenants();
        let checks = Checks::new(1);
        let first = checks.take(a).await.unwrap();
        let gone = tokio::spawn({
            let checks = checks.clone();
            async move { checks.take(b).await.is_some() }
        });
        tokio::task::yield_now().await;
        gone.abort();
        assert!(gone.await.is_err());
        drop(first);
        let second = tokio::time::timeout(Duration::from_secs(5), checks.take(a)).await.unwrap().unwrap();
        assert_eq!(checks.inner().free, 0);
        drop(second);
        let inner = checks.inner();
        assert_eq!((inner.free, inner.at_work.len(), inner.waiting.len()), (1, 0, 0));
    }
}
