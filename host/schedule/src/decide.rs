//! The decision: who goes first, and where to.
//!
//! A tenant that has waited for its patience while others have more; high priority before low; then jobs that others were placed before for too
//! long, one of each tenant at most; then the tenant that was served least; then the order of that tenant's line. Whoever fits is placed, so that
//! nobody waits while there is room; a device is kept free only for a job whose patience is over, or for which others made room: that one comes
//! before all of these.

mod clear;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::plan::{Keep, NewEngine, Placement, Plan, Seat, Wait};
use crate::reason::Reason;
use crate::room::{Full, Load, Needs, Room, alone};
use crate::scene::{Device, DeviceId, Job, JobId, Lane, Rules, Scene, State, Tenant, TenantId, TrunkId};
use crate::turns::Turns;

/// Decides what is to be done now.
#[must_use]
pub fn decide(scene: &Scene) -> Plan {
    let mut desk = Desk::new(scene);
    desk.stop_unneeded();
    desk.keep_promises(&scene.kept);
    while let Some(unit) = desk.next() {
        desk.seat(unit);
    }
    desk.plan()
}

/// Jobs that are placed together where they fit: one, or the waiting members of a cohort.
type Unit<'a> = Vec<&'a Job>;

/// A tenant's line.
struct Line<'a> {
    tenant: &'a Tenant,
    running: u64,
    bytes: u64,
    units: Vec<Unit<'a>>,
    /// Whether its first job that waits for a device was told so already.
    has_head: bool,
}

struct Desk<'a> {
    rules: Rules,
    rooms: BTreeMap<DeviceId, Room>,
    needs: BTreeMap<TrunkId, Needs>,
    lines: BTreeMap<TenantId, Line<'a>>,
    turns: Turns<'a>,
    /// Of each tenant the first job that waits for a device, by its place in the plan.
    heads: Vec<usize>,
    plan: Plan,
}

impl<'a> Desk<'a> {
    fn new(scene: &'a Scene) -> Self {
        let rooms =
            scene.devices.iter().map(|device| (device.id, Room::new(device, (scene.rules.device_jobs_max, scene.rules.device_mps_max))));
        let mut desk = Self {
            rules: scene.rules,
            rooms: rooms.collect(),
            needs: scene.trunks.iter().map(|trunk| (trunk.id, Needs::of(trunk))).collect(),
            lines: scene.tenants.iter().map(|tenant| (tenant.id, Line::new(tenant))).collect(),
            turns: Turns::new(scene),
            heads: Vec::new(),
            plan: Plan::default(),
        };
        for bar in &scene.bars {
            desk.rooms.get_mut(&bar.device).into_iter().for_each(|room| room.bar(*bar));
        }
        for foreign in &scene.foreign {
            desk.rooms.get_mut(&foreign.device).into_iter().for_each(|room| room.exclude(foreign.job));
        }
        for engine in &scene.engines {
            let load = Load::of(engine, desk.needs.get(&engine.trunk).copied().unwrap_or_default());
            let unknown = || Room::new(&Device { id: engine.device, memory_bytes: 0, shares_weights: false }, (0, 0));
            desk.rooms.entry(engine.device).or_insert_with(unknown).add(Seat::Engine(engine.id), load);
        }
        let mut jobs: Vec<&Job> = scene.jobs.iter().collect();
        jobs.sort_by_key(|job| (job.priority, job.order, job.id));
        jobs.into_iter().for_each(|job| desk.enter(job));
        desk
    }

    /// Takes a job in, in the order of the line.
    fn enter(&mut self, job: &'a Job) {
        let Some(line) = self.lines.get_mut(&job.tenant) else { return };
        match job.state {
            State::Waiting { .. } => line.join(job),
            State::Running { engine, is_pausing, .. } => {
                line.took(job);
                let seat = Seat::Engine(engine);
                if let Some(room) = self.rooms.values_mut().find(|room| room.has(seat)) {
                    room.put(seat, job, is_pausing);
                }
                if !is_pausing {
                    self.turns.enter(job);
                }
            }
        }
    }

    fn stop_unneeded(&mut self) {
        for room in self.rooms.values_mut() {
            for engine in room.unneeded(self.rules.idle_ms_max) {
                room.stop(engine);
                self.plan.stop.push(engine);
            }
        }
    }

    /// The next unit to be looked at; each is looked at once.
    fn next(&mut self) -> Option<Unit<'a>> {
        let (rules, ranks) = (self.rules, self.turns.ranks());
        let key = |line: &Line<'a>| {
            let place = line.next(rules)?;
            let first = *line.units.get(place)?.first()?;
            let aged_ms = aged_ms(first);
            let due = aged_ms >= rules.patience_ms;
            let virtual_ns = line.tenant.virtual_ns.saturating_add(u128::from(rules.quantum_ns) * u128::from(line.running));
            let turn = Reverse(ranks.get(&line.tenant.id).copied());
            Some(((turn, first.priority, !due, Reverse(if due { aged_ms } else { 0 }), virtual_ns, line.tenant.id), place))
        };
        let ((.., tenant), place) = self.lines.values().filter_map(key).min()?;
        Some(self.lines.get_mut(&tenant)?.units.remove(place))
    }

    /// Places as many of a unit as fit, and tells the others why they wait.
    fn seat(&mut self, mut unit: Unit<'a>) {
        unit.retain(|job| self.is_allowed(job));
        while let Some(device) = self.best(&unit) {
            unit.retain(|job| self.is_in_quota(job).is_err() || !self.put(device, job));
            unit.retain(|job| self.is_allowed(job));
        }
        let Some((first, others)) = unit.split_first() else { return };
        let reason = self.make_room(first);
        self.wait_for_device(first, reason);
        for job in others {
            let reason = self.why(job, self.needs(job));
            self.wait_for_device(job, reason);
        }
    }

    /// Whether its tenant may run this job now; else it is told why not.
    fn is_allowed(&mut self, job: &Job) -> bool {
        match self.is_in_quota(job) {
            Ok(()) => true,
            Err(reason) => {
                self.plan.wait.push(Wait { job: job.id, reason, ages: false });
                false
            }
        }
    }

    fn is_in_quota(&self, job: &Job) -> Result<(), Reason> {
        let Some(Line { tenant, running, bytes, .. }) = self.lines.get(&job.tenant) else { return Ok(()) };
        let (quota, needed, running) = (tenant.quota, bytes_of(job), *running);
        let free = quota.device_bytes.saturating_sub(*bytes);
        if needed > quota.device_bytes {
            return Err(Reason::OverQuota { needed, allowed: quota.device_bytes });
        }
        if tenant.device_ms >= quota.device_ms {
            return Err(Reason::DeviceTime { used_ms: tenant.device_ms, allowed_ms: quota.device_ms });
        }
        if running >= quota.running_jobs {
            return Err(Reason::RunningJobs { running, allowed: quota.running_jobs });
        }
        if needed > free {
            return Err(Reason::TenantMemory { needed, free, allowed: quota.device_bytes });
        }
        Ok(())
    }

    /// The device that takes most of the unit; of several the one that has its trunk, then the one with most free.
    fn best(&self, unit: &[&Job]) -> Option<DeviceId> {
        let mut best = None;
        let first = unit.first()?;
        let needs = self.needs(first);
        let takes_any = |room: &Room| unit.iter().any(|job| room.fit(job, needs).is_ok());
        for (id, room) in self.rooms.iter().filter(|(_, room)| takes_any(room)) {
            let mut trial = room.clone();
            let count = unit.iter().filter(|job| trial.place(job, needs, usize::MAX).is_some()).count();
            let score = (count, room.has_trunk(first), room.free_bytes());
            // The lowest number of equals.
            if best.is_none_or(|(other, _)| score > other) {
                best = Some((score, *id));
            }
        }
        best.map(|(_, id)| id)
    }

    /// Places a job on a device, if it fits.
    fn put(&mut self, device: DeviceId, job: &Job) -> bool {
        let (needs, next) = (self.needs(job), self.plan.start.len());
        let Some(room) = self.rooms.get_mut(&device) else { return false };
        let Some(seat) = room.place(job, needs, next) else { return false };
        self.rooms.values_mut().for_each(|room| room.release(job.id));
        if seat == Seat::New(next) {
            self.plan.start.push(NewEngine { device, trunk: job.trunk, lane: job.lane });
        }
        self.plan.place.push(Placement { job: job.id, seat, is_turn: self.turns.placed(job.tenant) });
        self.pass_over();
        if let Some(line) = self.lines.get_mut(&job.tenant) {
            line.took(job);
        }
        true
    }

    /// Somebody has a place, or will: whoever came before it in the order was passed over.
    fn pass_over(&mut self) {
        for head in &self.heads {
            self.plan.wait.get_mut(*head).into_iter().for_each(|wait| wait.ages = true);
        }
    }

    /// Why a job fits nowhere, by the device that is nearest to taking it.
    fn why(&self, job: &Job, needs: Needs) -> Reason {
        if self.is_promised(job.id) {
            return Reason::MakingRoom;
        }
        let needed = alone(job, needs);
        match self.rooms.values().map(Room::memory_bytes).max() {
            None => return Reason::NoDevice,
            Some(largest) if needed > largest => return Reason::TooLarge { needed, largest },
            Some(_) => {}
        }
        let is_foreign = |room: &Room| room.fit(job, needs) == Err(Full::Foreign);
        if self.rooms.values().filter(|room| room.memory_bytes() >= needed).all(is_foreign) {
            return Reason::OtherClass;
        }
        let full: Vec<Full> = self.rooms.values().filter_map(|room| room.fit(job, needs).err()).collect();
        let memory = full.iter().filter_map(|full| match full {
            Full::Memory { needed, free } => Some((*free, *needed)),
            _ => None,
        });
        if let Some((free, needed)) = memory.max_by_key(|(free, needed)| (*free, Reverse(*needed))) {
            return Reason::Memory { needed, free };
        }
        let barred = full.iter().filter_map(|full| match full {
            Full::Barred { left_ms } => Some(*left_ms),
            _ => None,
        });
        if let Some(left_ms) = barred.min() {
            return Reason::Later { left_ms };
        }
        if full.contains(&Full::Engines) {
            return Reason::Engines { allowed: self.rules.device_mps_max };
        }
        match (full.contains(&Full::Alone), full.contains(&Full::Seats), full.contains(&Full::Taken)) {
            (true, ..) => Reason::Alone,
            (_, true, _) => Reason::Seats { allowed: self.rules.device_jobs_max },
            (.., true) if job.lane == Lane::Solo => Reason::Alone,
            (.., true) => Reason::Taken,
            _ => Reason::Kept,
        }
    }

    /// Tells a job that it waits for a device. The patience of a tenant's first runs from when it is passed over, unless it can never start.
    fn wait_for_device(&mut self, job: &Job, reason: Reason) {
        let is_hopeless = matches!(reason, Reason::TooLarge { .. } | Reason::OtherClass);
        let line = self.lines.get_mut(&job.tenant);
        let is_head = !is_hopeless && line.is_some_and(|line| !std::mem::replace(&mut line.has_head, true));
        if is_head {
            self.heads.push(self.plan.wait.len());
        }
        self.plan.wait.push(Wait { job: job.id, reason, ages: is_head && aged_ms(job) > 0 });
    }

    /// The whole of it.
    fn plan(mut self) -> Plan {
        let promised = |(id, room): (&DeviceId, &Room)| room.promised().map(|job| Keep { device: *id, job });
        self.plan.keep = self.rooms.iter().filter_map(promised).collect();
        let wants = self.lines.values().map(|line| (line.tenant.id, line.has_head));
        self.plan.clocks = self.turns.clocks(wants);
        self.plan
    }

    fn needs(&self, job: &Job) -> Needs {
        self.needs.get(&job.trunk).copied().unwrap_or_default()
    }
}

impl<'a> Line<'a> {
    fn new(tenant: &'a Tenant) -> Self {
        Self { tenant, running: 0, bytes: 0, units: Vec::new(), has_head: false }
    }

    /// Puts a job at the end, or to the other members of its cohort.
    fn join(&mut self, job: &'a Job) {
        let is_mate = |unit: &&mut Unit<'a>| {
            let key = |job: &Job| (job.cohort, job.priority, job.trunk, job.lane);
            job.cohort.is_some() && job.lane == Lane::Fused && unit.first().is_some_and(|first| key(first) == key(job))
        };
        match self.units.iter_mut().find(is_mate) {
            Some(unit) => unit.push(job),
            None => self.units.push(vec![job]),
        }
    }

    /// The waiting job of this number.
    fn find(&self, id: JobId) -> Option<&'a Job> {
        self.units.iter().flatten().find(|job| job.id == id).copied()
    }

    /// A waiting job has its place.
    fn leave(&mut self, id: JobId) {
        self.units.iter_mut().for_each(|unit| unit.retain(|job| job.id != id));
        self.units.retain(|unit| !unit.is_empty());
    }

    /// Counts a job that runs.
    fn took(&mut self, job: &Job) {
        self.running += 1;
        self.bytes = self.bytes.saturating_add(bytes_of(job));
    }

    /// The place of the unit that is next: the first of the highest priority whose patience is over, else the first.
    fn next(&self, rules: Rules) -> Option<usize> {
        let first = |place: usize| self.units.get(place).and_then(|unit| unit.first().copied());
        let priority = first(0)?.priority;
        let is_due = |place: &usize| first(*place).is_some_and(|job| job.priority == priority && aged_ms(job) >= rules.patience_ms);
        Some((0..self.units.len()).find(is_due).unwrap_or(0))
    }
}

fn bytes_of(job: &Job) -> u64 {
    job.adapter_bytes.saturating_add(job.activation_bytes)
}

fn aged_ms(job: &Job) -> u64 {
    match job.state {
        State::Waiting { aged_ms } => aged_ms,
        State::Running { .. } => 0,
    }
}
