//! Room for all journals together: on the disk, and in memory for what waits for it.
//!
//! Never lets one tenant's jobs take all of it; what finds no room costs the job's being kept, never the job.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of all journals of the service on the disk, where the operator does not say.
pub(crate) const DISK_BYTES_MAX: u64 = 256 << 30;
/// The part of it that one tenant's jobs may have.
const PART_OF_ONE: u64 = 4;
/// Bytes of replies of all jobs that wait in memory for a disk that is full.
const WAITING_BYTES_MAX: u64 = 256 << 20;
/// Snapshots that are in memory on their way to the disk at once; more jobs wait with theirs.
const SNAPSHOTS_AT_ONCE: usize = 4;

/// The room.
pub(crate) struct Space {
    disk_bytes_max: u64,
    /// Of these, bytes that one tenant's jobs may have.
    of_one_max: u64,
    held: Mutex<Held>,
    waiting: Mutex<u64>,
    snapshots: Arc<Semaphore>,
}

/// What journals take of the disk.
#[derive(Default)]
struct Held {
    /// Of each job with a journal: whose it is, where that is known, and bytes.
    jobs: BTreeMap<String, (Option<u128>, u64)>,
    all: u64,
    tenants: BTreeMap<u128, u64>,
}

impl Held {
    fn of(&self, tenant: u128) -> u64 {
        self.tenants.get(&tenant).copied().unwrap_or(0)
    }

    /// Forgets a job; whose it was, and its bytes.
    fn remove(&mut self, job: &str) -> (Option<u128>, u64) {
        let (tenant, bytes) = self.jobs.remove(job).unwrap_or_default();
        self.all -= bytes;
        if let Some(tenant) = tenant {
            match self.of(tenant) - bytes {
                0 => self.tenants.remove(&tenant),
                rest => self.tenants.insert(tenant, rest),
            };
        }
        (tenant, bytes)
    }

    fn insert(&mut self, job: &str, tenant: Option<u128>, bytes: u64) {
        self.all += bytes;
        if let Some(tenant) = tenant {
            *self.tenants.entry(tenant).or_default() += bytes;
        }
        self.jobs.insert(job.to_owned(), (tenant, bytes));
    }
}

/// One job's part of it.
#[derive(Clone)]
pub(crate) struct Account {
    space: Arc<Space>,
    job: String,
    tenant: u128,
}

impl Space {
    /// Of many tenants.
    pub(crate) fn new(disk_bytes_max: u64) -> Self {
        Self::with(disk_bytes_max, disk_bytes_max / PART_OF_ONE)
    }

    /// Of one, which has all of it.
    pub(crate) fn of_one(disk_bytes_max: u64) -> Self {
        Self::with(disk_bytes_max, disk_bytes_max)
    }

    fn with(disk_bytes_max: u64, of_one_max: u64) -> Self {
        let snapshots = Arc::new(Semaphore::new(SNAPSHOTS_AT_ONCE));
        Self { disk_bytes_max, of_one_max, held: Mutex::default(), waiting: Mutex::default(), snapshots }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A journal of somebody's was found on the disk.
    pub(super) fn found(&self, job: &str, bytes: u64) {
        let mut held = self.held();
        held.remove(job);
        held.insert(job, None, bytes);
    }

    /// Bytes that a job's journal is counted with.
    #[cfg(test)]
    pub(super) fn held_by(&self, job: &str) -> u64 {
        self.held().jobs.get(job).map_or(0, |(_, bytes)| *bytes)
    }

    /// A journal is gone.
    pub(super) fn gone(&self, job: &str) {
        self.held().remove(job);
    }

    pub(super) fn account(self: &Arc<Self>, job: &str, tenant: u128) -> Account {
        Account { space: self.clone(), job: job.to_owned(), tenant }
    }
}

impl Account {
    /// The job's journal is to have so many bytes on the disk; whether there is room for them. Less than it had is always right.
    pub(super) fn hold(&self, bytes: u64) -> bool {
        let mut held = self.space.held();
        let (_, before) = held.remove(&self.job);
        let own = held.of(self.tenant);
        let has_room = bytes <= before
            || (held.all.saturating_add(bytes) <= self.space.disk_bytes_max && own.saturating_add(bytes) <= self.space.of_one_max);
        held.insert(&self.job, Some(self.tenant), if has_room { bytes } else { before });
        has_room
    }

    /// Why it was refused.
    pub(super) fn no_room(&self) -> &'static str {
        if self.space.of_one_max < self.space.disk_bytes_max {
            "journals have taken all the room that they may (`--journal-bytes`), in all or of its tenant"
        } else {
            "the run's journals have taken all the room that they may (`--journal-bytes`)"
        }
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

    /// The same where it is there at once.
    pub(super) fn snapshot_now(&self) -> Option<OwnedSemaphorePermit> {
        self.space.snapshots.clone().try_acquire_owned().ok()
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
    fn a_run_has_all_of_its_own_and_is_told_which_option_it_is() {
        let run = Arc::new(Space::of_one(400)).account("a", 0);
        assert!(run.hold(400) && !run.hold(401));
        assert!(run.no_room().starts_with("the run's journals") && run.no_room().contains("--journal-bytes"));
        assert!(Arc::new(Space::new(400)).account("a", 1).no_room().contains("of its tenant"));
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
