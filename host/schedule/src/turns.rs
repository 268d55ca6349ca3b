//! Turns: whose patience is over while others have more, and which of their jobs give way.
//!
//! A tenant's wait runs while it wants a seat and has fewer than its share, stands while a job of its is on its way to work, and ends with its turn, or
//! once it has had its share, or wanted nothing, for a patience ([`crate::Waits`]): a moment in a seat ends no wait. Knows seats and how long they were
//! had, not what fits where.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::scene::{Job, JobId, Priority, Scene, State, TenantId};
use crate::waits::Clock;

/// Whoever has waited for so many patiences goes before all others with as many seats, though they were served less.
const PATIENCES: u64 = 4;

/// Who has seats, and who waits for one.
pub(crate) struct Turns<'a> {
    patience_ms: u64,
    waited_ms: BTreeMap<TenantId, u64>,
    virtual_ns: BTreeMap<TenantId, u128>,
    /// Running jobs that nobody told to make room, in the order of the line.
    seated: Vec<&'a Job>,
    /// How many of each tenant's run so, those that were placed now too.
    seats: BTreeMap<TenantId, u64>,
    /// Whose jobs are placed and not at work yet.
    starting: BTreeSet<TenantId>,
    /// Who has one at work.
    at_work: BTreeSet<TenantId>,
    /// [`Turns::ranks`] as it is until the next of them comes or goes.
    ranks: Option<BTreeMap<TenantId, Rank>>,
}

/// How few seats a tenant has, then how many times four patiences it has waited: one that has some may wait for ever for more, and nobody waits for that
/// who has none.
type Rank = (Reverse<u64>, u64);

impl<'a> Turns<'a> {
    pub(crate) fn new(scene: &Scene) -> Self {
        Self {
            patience_ms: scene.rules.patience_ms.max(1),
            waited_ms: scene.tenants.iter().map(|tenant| (tenant.id, tenant.waited_ms)).collect(),
            virtual_ns: scene.tenants.iter().map(|tenant| (tenant.id, tenant.virtual_ns)).collect(),
            seated: Vec::new(),
            seats: BTreeMap::new(),
            starting: BTreeSet::new(),
            at_work: BTreeSet::new(),
            ranks: None,
        }
    }

    /// Takes in a job that runs and stays.
    pub(crate) fn enter(&mut self, job: &'a Job) {
        self.seated.push(job);
        let begun = if ran_ms(job) == 0 { &mut self.starting } else { &mut self.at_work };
        begun.insert(job.tenant);
        self.ranks = None;
        *self.seats.entry(job.tenant).or_default() += 1;
    }

    /// A job is placed; whether that was its tenant's turn, whose next one comes a patience later.
    pub(crate) fn placed(&mut self, of: TenantId) -> bool {
        let is_turn = self.is_due(of, &self.most());
        self.ranks = None;
        self.starting.insert(of);
        *self.seats.entry(of).or_default() += 1;
        if is_turn {
            self.waited_ms.insert(of, 0);
        }
        is_turn
    }

    /// Jobs are told to make room.
    pub(crate) fn leave(&mut self, jobs: &[JobId]) {
        let gone: BTreeSet<JobId> = jobs.iter().copied().collect();
        self.ranks = None;
        for job in self.seated.extract_if(.., |job| gone.contains(&job.id)) {
            self.seats.entry(job.tenant).and_modify(|seats| *seats -= 1);
        }
    }

    fn seats(&self, of: TenantId) -> u64 {
        self.seats.get(&of).copied().unwrap_or(0)
    }

    fn waited_ms(&self, of: TenantId) -> u64 {
        self.waited_ms.get(&of).copied().unwrap_or(0)
    }

    /// Whether a tenant with so many seats has more than its share beside one that waits: the latter has none, or fewer still with one more.
    fn has_more(&self, seats: u64, than: TenantId) -> bool {
        match self.seats(than) {
            0 => seats > 0,
            own => seats > own + 1,
        }
    }

    /// Whether a tenant has waited for its patience while it has no seat, or others have more.
    fn is_due(&self, tenant: TenantId, most: &[(u64, TenantId)]) -> bool {
        self.waited_ms(tenant) >= self.patience_ms && self.is_behind(tenant, most)
    }

    /// Whether a tenant has fewer seats than its share: none, or others have more.
    fn is_behind(&self, tenant: TenantId, most: &[(u64, TenantId)]) -> bool {
        self.seats(tenant) == 0 || most.iter().any(|(seats, of)| *of != tenant && self.has_more(*seats, tenant))
    }

    /// How the waits of tenants go on after all, given whether each wants a seat that it has not.
    pub(crate) fn clocks(&self, wants: impl Iterator<Item = (TenantId, bool)>) -> Vec<(TenantId, Clock)> {
        let most = self.most();
        let clock = |(tenant, wants)| match wants && self.is_behind(tenant, &most) {
            true => Some((tenant, Clock::Runs)),
            // One that has a job at work has what it waited for, whatever else it begins.
            false => (self.starting.contains(&tenant) && !self.at_work.contains(&tenant)).then_some((tenant, Clock::Stands)),
        };
        wants.filter_map(clock).collect()
    }

    /// The two that have most seats: one of them is another than whoever asks.
    fn most(&self) -> Vec<(u64, TenantId)> {
        let mut most: Vec<(u64, TenantId)> = Vec::new();
        for (tenant, seats) in &self.seats {
            most.push((*seats, *tenant));
            most.sort_unstable_by_key(|seats| Reverse(*seats));
            most.truncate(2);
        }
        most
    }

    /// Tenants that go before others whatever was used so far and however urgent, the greatest first: those whose turn it is, and those that have
    /// as few seats as one of them. Whoever has fewest seats is first, then whoever has waited longest, roughly.
    pub(crate) fn ranks(&mut self) -> &BTreeMap<TenantId, Rank> {
        let ranks = self.ranks.take().unwrap_or_else(|| self.ranked());
        self.ranks.insert(ranks)
    }

    fn ranked(&self) -> BTreeMap<TenantId, Rank> {
        let most = self.most();
        let due = self.waited_ms.iter().filter(|(tenant, _)| self.is_due(**tenant, &most));
        let rank = |tenant: TenantId, waited_ms: u64| {
            (tenant, (Reverse(self.seats(tenant)), waited_ms / self.patience_ms.saturating_mul(PATIENCES)))
        };
        let due: BTreeMap<TenantId, _> = due.map(|(tenant, waited_ms)| rank(*tenant, *waited_ms)).collect();
        let Some(seats) = due.keys().map(|tenant| self.seats(*tenant)).max() else { return due };
        let beside = self.waited_ms.keys().filter(|tenant| self.seats(**tenant) <= seats).map(|tenant| rank(*tenant, 0));
        beside.chain(due.iter().map(|(tenant, rank)| (*tenant, *rank))).collect()
    }

    /// Jobs of low priority that a job of high priority has make room, the latest first. One that began in its tenant's turn has its patience,
    /// and a tenant that has seats takes none from one that has no more.
    pub(crate) fn lower(&self, than: &Job) -> Vec<JobId> {
        let mut seats = self.seats.clone();
        let mut takes = |job: &&&Job| {
            let Some(theirs) = seats.get_mut(&job.tenant).filter(|_| job.priority == Priority::Low) else { return false };
            let own = self.seats(than.tenant);
            let is_spared = job.tenant != than.tenant && (self.is_new_turn(job) || (own > 0 && *theirs <= own));
            *theirs -= u64::from(!is_spared);
            !is_spared
        };
        let is_high = than.priority == Priority::High;
        self.seated.iter().rev().filter(|job| is_high && takes(job)).map(|job| job.id).collect()
    }

    /// Jobs that give way to this one where its tenant has waited for so long, in the order in which they do: each time one of the tenant that has
    /// most, of several of the one that was served most; of its jobs those of low priority, then the latest begun.
    pub(crate) fn yielding(&self, to: &Job, aged_ms: u64, is_there: impl Fn(JobId) -> bool) -> Vec<JobId> {
        if self.waited_ms(to.tenant).max(aged_ms) < self.patience_ms {
            return Vec::new();
        }
        let mut candidates: BTreeMap<TenantId, Vec<&Job>> = BTreeMap::new();
        for job in self.seated.iter().filter(|job| job.tenant != to.tenant && self.is_old(job) && is_there(job.id)) {
            candidates.entry(job.tenant).or_default().push(job);
        }
        // The last goes first.
        candidates.values_mut().for_each(|jobs| jobs.sort_by_key(|job| (job.priority, Reverse(ran_ms(job)), job.order, job.id)));
        let (mut seats, mut yielding) = (self.seats.clone(), Vec::new());
        while let Some((_, _, tenant)) = candidates
            .iter()
            .filter(|(_, jobs)| !jobs.is_empty())
            .map(|(tenant, _)| (seats.get(tenant).copied().unwrap_or(0), self.virtual_ns.get(tenant).copied().unwrap_or(0), *tenant))
            .filter(|(seats, ..)| self.has_more(*seats, to.tenant))
            .max()
        {
            yielding.extend(candidates.get_mut(&tenant).and_then(Vec::pop).map(|job| job.id));
            seats.entry(tenant).and_modify(|seats| *seats -= 1);
        }
        yielding
    }

    /// How many tenants are left without a seat where these give way, if this one has waited long enough for that: a patience for each of them.
    pub(crate) fn bears(&self, to: &Job, aged_ms: u64, jobs: &[JobId]) -> Option<u64> {
        let mut lost: BTreeMap<TenantId, u64> = BTreeMap::new();
        self.seated.iter().filter(|job| jobs.contains(&job.id)).for_each(|job| *lost.entry(job.tenant).or_default() += 1);
        let emptied = lost.iter().filter(|(tenant, lost)| self.seats(**tenant) <= **lost).count() as u64;
        (self.waited_ms(to.tenant).max(aged_ms) >= self.patience_ms.saturating_mul(emptied.max(1))).then_some(emptied)
    }

    /// Whether a job has the seat that was its tenant's turn, and not for long.
    fn is_new_turn(&self, job: &Job) -> bool {
        matches!(job.state, State::Running { is_turn: true, .. }) && !self.is_old(job)
    }

    /// Whether a job has had a patience of its own.
    fn is_old(&self, job: &Job) -> bool {
        ran_ms(job) >= self.patience_ms
    }
}

fn ran_ms(job: &Job) -> u64 {
    match job.state {
        State::Running { ran_ms, .. } => ran_ms,
        State::Waiting { .. } => 0,
    }
}
