//! What the floor knows of the moment: engines, jobs that run, and for how long others wait.
//!
//! Bookkeeping only; all of it may be lost, since it follows from the state and from what is seen.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nodus_protocol::{Digest, JobSlot};
use nodus_schedule::{DeviceId, EngineId, Job, Keep, Lane, NewEngine, Shares, TrunkId, Waits};
use nodus_state::{Change, CohortId, JobId, TenantId};
use tokio::sync::watch;

use super::engines::Engine;
use super::stint::Stint;
use super::suspects::Suspects;

/// What is wished of a job that runs; a later one outweighs an earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Wish {
    GoOn,
    /// To end soon, and well.
    Stop,
    /// To make room, and be run again.
    Pause,
    /// To be cut off.
    Cancel,
}

/// A job that was placed.
#[derive(Clone)]
pub(super) struct Run {
    pub(super) tenant: TenantId,
    pub(super) cohort: CohortId,
    /// As the schedule sees it.
    pub(super) numbers: Job,
    pub(super) engine: EngineId,
    pub(super) slot: JobSlot,
    /// Whether it runs alone because it is suspected, and not because its owner wants it.
    pub(super) is_tried: bool,
    /// Time in passes that was counted so far.
    pub(super) counted_ns: u64,
    /// How long it has its seat, and whether that was its tenant's turn.
    pub(super) stint: Stint,
    wish: Arc<watch::Sender<Wish>>,
}

impl Run {
    pub(super) fn new(
        (tenant, cohort): (TenantId, CohortId),
        (numbers, is_tried): (Job, bool),
        (engine, slot): (EngineId, JobSlot),
        stint: Stint,
    ) -> Self {
        Self { tenant, cohort, numbers, engine, slot, is_tried, counted_ns: 0, stint, wish: Arc::new(watch::Sender::new(Wish::GoOn)) }
    }

    pub(super) fn wishes(&self) -> watch::Receiver<Wish> {
        self.wish.subscribe()
    }

    /// Wishes for this, where nothing stronger is wished for.
    pub(super) fn wish(&self, wish: Wish) {
        self.wish.send_if_modified(|so_far| {
            let is_stronger = wish > *so_far;
            *so_far = wish.max(*so_far);
            is_stronger
        });
    }

    pub(super) fn pause(&self) {
        self.wish(Wish::Pause);
    }

    pub(super) fn is_pausing(&self) -> bool {
        *self.wish.borrow() >= Wish::Pause
    }
}

/// What may not be tried again before a time, and why.
#[derive(Clone, Debug)]
pub(super) struct Backoff {
    /// Failures so far.
    pub(super) count: u32,
    /// How often the disk took no writes, which is none.
    refused: u32,
    pub(super) until: Instant,
    pub(super) why: String,
}

/// Engines that are alike, so that the death of one says something of the next: those of single jobs are alike for that job alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) device: DeviceId,
    pub(super) trunk: TrunkId,
    pub(super) lane: Lane,
    pub(super) job: Option<nodus_schedule::JobId>,
}

impl Kind {
    /// Of an engine that is started for this job first.
    pub(super) fn of(NewEngine { device, trunk, lane }: NewEngine, job: nodus_schedule::JobId) -> Self {
        Self { device, trunk, lane, job: (lane != Lane::Fused).then_some(job) }
    }
}

/// All of it.
#[derive(Default)]
pub(super) struct Board {
    pub(super) is_closing: bool,
    pub(super) engines: BTreeMap<EngineId, Engine>,
    pub(super) running: BTreeMap<JobId, Run>,
    pub(super) shares: Shares,
    /// Since when the patience of a job runs.
    pub(super) aging: BTreeMap<JobId, Instant>,
    /// For how long tenants have waited for their turns, up to a moment.
    pub(super) waits: Waits,
    waits_until: Option<Instant>,
    /// Devices that are kept for jobs that wait, since when, and whose those are.
    pub(super) kept: BTreeMap<(DeviceId, nodus_schedule::JobId), (Instant, TenantId)>,
    /// Jobs that gave way to others, and when last.
    pub(super) gave_way: BTreeMap<JobId, Instant>,
    /// Those that left their seats without having been at work there.
    pub(super) unserved: BTreeMap<JobId, (TenantId, Stint)>,
    /// Jobs that the host failed.
    pub(super) jobs_later: BTreeMap<JobId, Backoff>,
    /// Jobs that were at work in engines that died.
    pub(super) suspects: Suspects,
    /// Engines that could not be started, or died.
    pub(super) engines_later: BTreeMap<Kind, Backoff>,
    /// What decides the bits of results on a device and a trunk, as far as an engine has told.
    pub(super) classes: BTreeMap<(DeviceId, TrunkId), Digest>,
    /// The same of where waiting jobs began.
    pub(super) began: BTreeMap<JobId, Digest>,
    /// What the owners of waiting jobs were told.
    pub(super) said: BTreeMap<JobId, String>,
    /// Jobs whose owners asked them to stop.
    pub(super) to_stop: Vec<JobId>,
    trunks: Vec<Digest>,
    cohorts: BTreeMap<CohortId, u64>,
    cohorts_made: u64,
    engines_made: u64,
    slots_made: u32,
}

impl Board {
    /// A job is to stop.
    pub(super) fn heard(&mut self, change: &Change) {
        self.to_stop.extend(change.job);
    }

    /// A number for a trunk.
    pub(super) fn trunk(&mut self, digest: Digest) -> TrunkId {
        let known = self.trunks.iter().position(|known| *known == digest);
        let place = known.unwrap_or_else(|| {
            self.trunks.push(digest);
            self.trunks.len() - 1
        });
        TrunkId(u32::try_from(place).unwrap_or(u32::MAX))
    }

    /// A number that the members of a cohort share and nobody else has.
    pub(super) fn cohort(&mut self, cohort: CohortId) -> u64 {
        *self.cohorts.entry(cohort).or_insert_with(|| {
            self.cohorts_made += 1;
            self.cohorts_made
        })
    }

    pub(super) fn next_engine(&mut self) -> EngineId {
        self.engines_made += 1;
        EngineId(self.engines_made)
    }

    /// A number that no job of the floor had before.
    pub(super) fn next_slot(&mut self) -> JobSlot {
        self.slots_made += 1;
        JobSlot(self.slots_made)
    }

    /// A job leaves the engine that it was placed in.
    pub(super) fn leave(&mut self, job: JobId) -> Option<Run> {
        let run = self.running.remove(&job)?;
        if !self.running.values().any(|other| other.cohort == run.cohort) {
            self.cohorts.remove(&run.cohort);
        }
        if !self.running.values().any(|other| other.engine == run.engine)
            && let Some(engine) = self.engines.get_mut(&run.engine)
        {
            engine.idle_since = Some(Instant::now());
        }
        if !run.stint.has_arrived() {
            self.unserved.insert(job, (run.tenant, run.stint));
        }
        Some(run)
    }

    /// A job that was in a seat and never at work there waits again: it and its tenant have what they gave up for that.
    pub(super) fn give_back(&mut self, job: JobId, (tenant, stint): (TenantId, Stint)) {
        if let Some(waited_ms) = stint.turn_ms {
            self.waits.give_back(super::scene::tenant_of(tenant), waited_ms);
        }
        if let Some(since) = stint.gave_way {
            self.gave_way.entry(job).or_insert(since);
        }
    }

    /// Counts for how long tenants have waited, up to now.
    pub(super) fn wait(&mut self, patience: Duration) {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let until = self.waits_until.get_or_insert_with(Instant::now);
        let passed = Duration::from_millis(ms(until.elapsed()));
        *until += passed;
        self.waits.pass(ms(passed), ms(patience));
    }

    /// From now on these devices are kept, and no others.
    pub(super) fn keep(&mut self, keep: &[Keep], owner: impl Fn(nodus_schedule::JobId) -> Option<TenantId>) {
        let since = |keep: &Keep| {
            let kept = (keep.device, keep.job);
            let now = || owner(keep.job).map(|of| (Instant::now(), of));
            Some((kept, self.kept.get(&kept).copied().or_else(now)?))
        };
        self.kept = keep.iter().filter_map(since).collect();
    }

    /// Whoever had others make room for a job that is not there any more has had its turn: it waits anew before they do so again.
    pub(super) fn forsake(&mut self, is_there: impl Fn(nodus_schedule::JobId) -> bool) {
        for (_, (_, of)) in self.kept.extract_if(.., |(_, job), _| !is_there(*job)) {
            self.waits.end(super::scene::tenant_of(of));
        }
    }

    /// Counts time in passes of a job that runs, given what it has in all.
    pub(super) fn count(&mut self, slot: JobSlot, device_ns: u64) {
        let Some(run) = self.running.values_mut().find(|run| run.slot == slot) else { return };
        let more = device_ns.saturating_sub(run.counted_ns);
        run.counted_ns += more;
        let tenant = super::scene::tenant_of(run.tenant);
        self.shares.charge(tenant, more);
    }
}

impl Backoff {
    /// One failure more.
    pub(super) fn after(before: Option<&Self>, first: Duration, why: String) -> Self {
        let count = before.map_or(1, |before| before.count + 1);
        Self { count, refused: before.map_or(0, |before| before.refused), until: doubled(first, count), why }
    }

    /// The disk took no writes once more.
    pub(super) fn refused(before: Option<&Self>, first: Duration, why: String) -> Self {
        let refused = before.map_or(1, |before| before.refused + 1);
        Self { count: before.map_or(0, |before| before.count), refused, until: doubled(first, refused), why }
    }

    /// How long it still holds; none where it does not.
    pub(super) fn left(&self) -> Option<Duration> {
        self.until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
    }
}

/// When what failed for the so-manieth time, from 1, is tried again.
fn doubled(first: Duration, count: u32) -> Instant {
    const DOUBLINGS_MAX: u32 = 6;
    Instant::now() + first * 2_u32.pow((count - 1).min(DOUBLINGS_MAX))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use nodus_protocol::JobSlot;
    use nodus_schedule::{Clock, DeviceId, EngineId, Job, Keep, Lane, Priority, State as Progress, TrunkId};
    use nodus_state::{Access, JobId, Quota, State, TenantId};

    use super::super::scene::tenant_of;
    use super::super::stint::Stint;
    use super::{Backoff, Board, Run};

    fn tenant() -> TenantId {
        let folder = tempfile::tempdir().unwrap();
        let dir = cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        State::open(dir, folder.path(), Access::Whole).unwrap().add_tenant("acme", Quota::DEFAULT).unwrap().id
    }

    #[test]
    fn who_withdraws_a_job_that_room_was_made_for_has_had_its_turn() {
        let (tenant, job, mut board) = (tenant(), nodus_schedule::JobId(1), Board::default());
        let keep = [Keep { device: DeviceId(0), job }];
        board.waits.heed(&[(tenant_of(tenant), Clock::Runs)]);
        board.waits.pass(70, 60);
        board.keep(&keep, |_| Some(tenant));
        board.forsake(|_| true);
        assert_eq!((board.waits.of(tenant_of(tenant)), board.kept.len()), (70, 1));
        board.forsake(|known| known != job);
        assert_eq!((board.waits.of(tenant_of(tenant)), board.kept.len()), (0, 0));
    }

    #[test]
    fn a_turn_that_came_to_nothing_is_no_turn() {
        let tenant = tenant();
        let (id, of) = ("01890000-0000-7000-8000-000000000001", tenant_of(tenant));
        let (job, cohort): (JobId, _) = (id.parse().unwrap(), id.parse().unwrap());
        let numbers = Job {
            id: nodus_schedule::JobId(job.as_u128()),
            tenant: of,
            order: 1,
            cohort: None,
            trunk: TrunkId(0),
            lane: Lane::Fused,
            priority: Priority::Low,
            adapter_bytes: 1,
            activation_bytes: 1,
            state: Progress::Waiting { aged_ms: 0 },
        };
        let mut board = Board::default();
        board.waits.heed(&[(of, Clock::Runs)]);
        board.waits.pass(70, 60);
        board.gave_way.insert(job, Instant::now());
        for (was_at_work, waited_ms) in [(false, 70), (true, 0)] {
            let (turn_ms, gave_way) = (board.waits.end(of), board.gave_way.remove(&job));
            let mut stint = Stint::new(Some(turn_ms), gave_way);
            assert_eq!((turn_ms, stint.is_turn(), gave_way.is_some(), board.waits.of(of)), (70, true, true, 0));
            if was_at_work {
                stint.arrive();
            }
            board.running.insert(job, Run::new((tenant, cohort), (numbers, false), (EngineId(1), JobSlot(1)), stint));
            board.leave(job);
            for (job, stint) in std::mem::take(&mut board.unserved) {
                board.give_back(job, stint);
            }
            assert_eq!((board.waits.of(of), board.gave_way.contains_key(&job)), (waited_ms, !was_at_work));
        }
    }

    #[test]
    fn a_disk_that_takes_no_writes_is_no_failure() {
        let failed = Backoff::after(None, Duration::from_secs(1), "why".into());
        let mut last = failed;
        for _ in 0..200 {
            last = Backoff::refused(Some(&last), Duration::from_secs(1), "disk".into());
        }
        assert!(last.left().unwrap() > Duration::from_secs(60));
        assert_eq!((last.count, Backoff::after(Some(&last), Duration::from_secs(1), "why".into()).count), (1, 2));
    }

    #[test]
    fn each_failure_doubles_the_wait_up_to_a_minute_or_so() {
        let first = Backoff::after(None, Duration::from_secs(1), "why".into());
        assert!(first.left().unwrap() <= Duration::from_secs(1));
        let mut last = first;
        for _ in 0..20 {
            last = Backoff::after(Some(&last), Duration::from_secs(1), "why".into());
        }
        let left = last.left().unwrap();
        assert!(left > Duration::from_secs(60) && left <= Duration::from_secs(64), "{left:?}");
    }
}
