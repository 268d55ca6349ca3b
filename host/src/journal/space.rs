//! Room for all journals together: on the disk, and in memory for what waits for it.
//!
//! Never lets one tenant's jobs take all of it; what finds no room costs the job's being kept, never the job.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of all journals on the disk, where the operator does not say.
pub(crate) const DISK_BYTES_MAX: u64 = 256 << 30;
/// The part of it that one tenant's jobs may have.
const OF_ONE: u64 = 4;
/// Bytes of replies of all jobs that wait in memory for a disk that is full.
const WAITING_BYTES_MAX: u64 = 256 << 20;
/// Snapshots that are in memory on their way to the disk at once; more jobs wait with theirs.
const SNAPSHOTS_AT_ONCE: usize = 4;

/// The room.
pub(crate) struct Space {
    disk_bytes_max: u64,
    /// Of each job with a journal: whose it is, and bytes.
    held: Mutex<BTreeMap<String, (Option<u128>, u64)>>,
    waiting: Mutex<u64>,
    snapshots: Arc<Semaphore>,
}

/// One job's part of it.
#[derive(Clone)]
pub(crate) struct Account {
    space: Arc<Space>,
    job: String,
    tenant: u128,
}

impl Space {
    pub(crate) fn new(disk_bytes_max: u64) -> Self {
        let snapshots = Arc::new(Semaphore::new(SNAPSHOTS_AT_ONCE));
        Self { disk_bytes_max, held: Mutex::default(), waiting: Mutex::default(), snapshots }
    }

    /// A journal of somebody's was found on the disk.
    pub(super) fn found(&self, job: &str, bytes: u64) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(job.to_owned(), (None, bytes));
    }

    /// A journal is gone.
    pub(super) fn gone(&self, job: &str) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(job);
    }

    pub(super) fn account(self: &Arc<Self>, job: &str, tenant: u128) -> Account {
        Account { space: self.clone(), job: job.to_owned(), tenant }
    }
}

impl Account {
    /// The job's journal is to have so many bytes on the disk; whether there is room for them. Less than it had is always right.
    pub(super) fn hold(&self, bytes: u64) -> bool {
        let mut held = self.space.held.lock().unwrap_or_else(PoisonError::into_inner);
        let before = held.get(&self.job).map_or(0, |(_, bytes)| *bytes);
        let others = |is_counted: &dyn Fn(&Option<u128>) -> bool| -> u64 {
            held.iter().filter(|(job, (of, _))| **job != self.job && is_counted(of)).map(|(_, (_, bytes))| *bytes).sum()
        };
        let (all, own) = (others(&|_| true), others(&|of| *of == Some(self.tenant)));
        let most = self.space.disk_bytes_max;
        let has_room = bytes <= before || (all.saturating_add(bytes) <= most && own.saturating_add(bytes) <= most / OF_ONE);
        if has_room {
            held.insert(self.job.clone(), (Some(self.tenant), bytes));
        }
        has_room
    }

    /// So many bytes more are to wait in memory; whether there is room for them.
    pub(super) fn wait(&self, bytes: u64) -> bool {
        let mut waiting = self.space.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let has_room = *waiting + bytes <= WAITING_BYTES_MAX;
        *waiting += if has_room { bytes } else { 0 };
        has_room
    }

    /// So many of them wait no longer.
    pub(super) fn waited(&self, bytes: u64) {
        *self.space.waiting.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
    }

    /// Room in memory for a snapshot on its way to the disk.
    pub(super) async fn snapshot(&self) -> Option<OwnedSemaphorePermit> {
        self.space.snapshots.clone().acquire_owned().await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Space, WAITING_BYTES_MAX};

    #[test]
    fn a_tenant_has_a_quarter_and_all_have_the_whole() {
        let space = Arc::new(Space::new(400));
        let of = |job: &str, tenant| space.account(job, tenant);
        assert!(of("a", 1).hold(60) && of("b", 1).hold(40) && !of("b", 1).hold(41));
        assert!(of("a", 1).hold(50) && of("b", 1).hold(50), "what one gives back another has");
        space.found("left", 250);
        assert!(of("c", 2).hold(50) && !of("c", 2).hold(51), "what is left of before counts too");
        space.gone("left");
        assert!(of("c", 2).hold(100) && !of("c", 2).hold(101) && of("c", 2).hold(1));
    }

    #[test]
    fn what_waits_in_memory_is_bounded_over_all_jobs() {
        let space = Arc::new(Space::new(400));
        let (a, b) = (space.account("a", 1), space.account("b", 2));
        assert!(a.wait(WAITING_BYTES_MAX - 10) && b.wait(10) && !b.wait(1));
        a.waited(5);
        assert!(b.wait(5));
    }
}
