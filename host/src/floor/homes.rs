//! Guest processes of one engine: each of one tenant, with as many of its jobs as it was made for.
//!
//! Never has two tenants in one process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nodus_protocol::Digest;
use nodus_state::TenantId;

use crate::error::user;
use crate::guest::{Need, Process, Size, Terms};

/// Jobs like its first that a process is made for.
const SEATS: u64 = 16;
/// Processes of one engine that nobody is in: they save the next job of a tenant the start of one, and take memory and time meanwhile.
const IDLE_MAX: usize = 64;

/// Which of the processes that nobody is in are to end.
struct Over {
    idle_max: Duration,
    /// Those that have been idle since then, or for longer, are too many.
    too_many: Option<Instant>,
}

impl Over {
    /// Of processes that have been idle since these times.
    fn new(mut since: Vec<Instant>, idle_max: Duration) -> Self {
        since.sort_unstable_by(|a, b| b.cmp(a));
        Self { idle_max, too_many: since.get(IDLE_MAX).copied() }
    }

    fn has(&self, since: Instant) -> bool {
        since.elapsed() >= self.idle_max || self.too_many.is_some_and(|bound| since <= bound)
    }
}

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
    /// Since when nobody is in it.
    idle_since: Option<Instant>,
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
        let own = self.all().entry(tenant).or_default().clone();
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
        let home = Arc::new(Home { process, left: Mutex::new(Left { need: whole, jobs: 0, idle_since: Some(Instant::now()) }) });
        homes.push(home.clone());
        Home::sit(&home, need).ok_or_else(|| anyhow::anyhow!("a guest process ended at once"))
    }

    /// Ends those that nobody has been in for so long, and of the others those that are more than may be idle, the longest idle first.
    pub(super) async fn rest(&self, idle_max: Duration) {
        let tenants: Vec<Own> = self.all().values().cloned().collect();
        let idle_since =
            |own: &Own| own.try_lock().map(|homes| homes.iter().filter_map(|home| home.left().idle_since).collect()).unwrap_or_default();
        let over = Over::new(tenants.iter().flat_map(|own| -> Vec<Instant> { idle_since(own) }).collect(), idle_max);
        let mut ended = Vec::new();
        for own in &tenants {
            // Where somebody is about to be seated there is nothing idle.
            let Ok(mut homes) = own.try_lock() else { continue };
            let is_over = |home: &Arc<Home>| home.left().idle_since.is_some_and(|since| over.has(since));
            let (gone, kept) = std::mem::take(&mut *homes).into_iter().partition(is_over);
            *homes = kept;
            ended.extend::<Vec<_>>(gone);
        }
        drop(tenants);
        // Only who has a clone can be at one of them, and while the map is locked nobody gets one.
        self.all().retain(|_, own| Arc::strong_count(own) > 1 || own.try_lock().is_ok_and(|homes| !homes.is_empty()));
        for home in ended {
            home.process.end().await;
        }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<TenantId, Own>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all of them. No job is in one.
    pub(super) async fn end(&self) {
        let all = std::mem::take(&mut *self.all());
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
        let mut left = home.left();
        let rest = left.need.less(need).filter(|_| home.process.how_ended().is_none())?;
        left.need = rest;
        left.jobs += 1;
        left.idle_since = None;
        Some(Seat { home: home.clone(), need })
    }

    fn jobs(&self) -> usize {
        self.left().jobs
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut left = self.home.left();
        // Memory comes back; time does not.
        left.need = left.need.with_memory_of(self.need);
        left.jobs -= 1;
        left.idle_since = (left.jobs == 0).then(Instant::now);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{IDLE_MAX, Over};

    #[test]
    fn of_too_many_idle_processes_the_longest_idle_end_and_of_any_those_that_are_so_for_too_long() {
        const HOUR: Duration = Duration::from_secs(3600);
        let now = Instant::now();
        let since = |count: usize| -> Vec<Instant> { (0..count).map(|number| now - Duration::from_millis(number as u64)).collect() };
        let ended = |count: usize, idle_max: Duration| {
            let over = Over::new(since(count), idle_max);
            since(count).into_iter().enumerate().filter(|(_, since)| over.has(*since)).map(|(number, _)| number).collect::<Vec<_>>()
        };
        assert!(ended(IDLE_MAX, HOUR).is_empty());
        assert_eq!(ended(IDLE_MAX + 6, HOUR), (IDLE_MAX..IDLE_MAX + 6).collect::<Vec<_>>());
        assert_eq!(ended(3, Duration::ZERO), [0, 1, 2]);
    }
}
