//! Guest processes of one engine: each of one tenant, with as many of its jobs as it was made for.
//!
//! Never has two tenants in one process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use nodus_protocol::Digest;
use nodus_state::TenantId;

use crate::error::user;
use crate::guest::{Need, Process, Size, Terms};

/// Jobs like its first that a process is made for.
const SEATS: u64 = 16;

/// The processes.
pub(super) struct Homes {
    settings: Digest,
    threads: usize,
    terms: Terms,
    /// One lock a tenant: the members of a cohort wait for one process rather than start one each.
    of: Mutex<BTreeMap<TenantId, Own>>,
}

/// A tenant's.
type Own = Arc<tokio::sync::Mutex<Vec<Arc<Home>>>>;

/// A process, and what it has left to give.
pub(super) struct Home {
    pub(super) process: Process,
    left: Mutex<Left>,
}

struct Left {
    need: Need,
    jobs: usize,
}

/// A job's place in a process; left when it is dropped.
pub(super) struct Seat {
    pub(super) home: Arc<Home>,
    need: Need,
}

impl Homes {
    pub(super) fn new(settings: Digest, threads: usize, terms: Terms) -> Self {
        Self { settings, threads, terms, of: Mutex::default() }
    }

    /// A seat in a process of the tenant's.
    ///
    /// # Errors
    /// Ours: none can be started. The operator's: the kernel locks it down less than was demanded.
    pub(super) async fn seat(&self, tenant: TenantId, need: Need) -> anyhow::Result<Seat> {
        let own = self.of.lock().unwrap_or_else(PoisonError::into_inner).entry(tenant).or_default().clone();
        let mut homes = own.lock().await;
        if let Some(seat) = homes.iter().find_map(|home| Home::sit(home, need)) {
            return Ok(seat);
        }
        // Those that this job is too much for and nobody is in: a tenant has no more processes than its jobs need.
        let (used, idle) = std::mem::take(&mut *homes).into_iter().partition(|home| home.jobs() > 0);
        *homes = used;
        for home in idle {
            home.process.end().await;
        }
        let whole = need.times(SEATS);
        let process = Process::start(self.settings, Size::of(self.threads, self.terms.silence, whole)).await?;
        if !process.missing().is_empty() && self.terms.require_os_sandbox {
            let missing = process.missing().join("; ");
            return Err(user(format!("the kernel does not lock guests down wholly, as was demanded: {missing}")));
        }
        let home = Arc::new(Home { process, left: Mutex::new(Left { need: whole, jobs: 0 }) });
        homes.push(home.clone());
        Home::sit(&home, need).ok_or_else(|| anyhow::anyhow!("a guest process ended at once"))
    }

    /// Ends all of them. No job is in one.
    pub(super) async fn end(&self) {
        let all = std::mem::take(&mut *self.of.lock().unwrap_or_else(PoisonError::into_inner));
        for homes in all.into_values() {
            for home in homes.lock().await.drain(..) {
                home.process.end().await;
            }
        }
    }
}

impl Home {
    /// Takes a seat, where it has one left.
    fn sit(home: &Arc<Self>, need: Need) -> Option<Seat> {
        let mut left = home.left.lock().unwrap_or_else(PoisonError::into_inner);
        let rest = left.need.less(need).filter(|_| home.process.how_ended().is_none())?;
        left.need = rest;
        left.jobs += 1;
        Some(Seat { home: home.clone(), need })
    }

    fn jobs(&self) -> usize {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).jobs
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut left = self.home.left.lock().unwrap_or_else(PoisonError::into_inner);
        // Memory comes back; time does not.
        left.need = left.need.with_memory_of(self.need);
        left.jobs -= 1;
    }
}
