//! A machine that carries plans out, and looks at each of them.

mod promises;

use std::collections::{BTreeMap, BTreeSet};

use nodus_schedule::{
    Bar, Clock, Device, DeviceId, Engine, EngineId, Foreign, Job, JobId, Lane, NewEngine, Plan, Priority, Quota, Reason, Rules, Scene,
    Seat, Shares, State, Tenant, TenantId, Trunk, TrunkId, Waits, decide,
};

pub(crate) const TICK_MS: u64 = 1000;

pub(crate) fn job(id: u128, tenant: u128, adapter_bytes: u64, activation_bytes: u64) -> Job {
    let state = State::Waiting { aged_ms: 0 };
    let (lane, priority) = (Lane::Fused, Priority::Low);
    let order = u64::try_from(id).unwrap();
    Job {
        id: JobId(id),
        tenant: TenantId(tenant),
        order,
        cohort: None,
        trunk: TrunkId(0),
        lane,
        priority,
        adapter_bytes,
        activation_bytes,
        state,
    }
}

pub(crate) struct World {
    scene: Scene,
    shares: Shares,
    waits: Waits,
    /// Jobs that make room take a tick for that, and up to so many more.
    pub(crate) linger: u64,
    lingering: BTreeMap<JobId, u64>,
    left: BTreeMap<JobId, u64>,
    done: BTreeSet<JobId>,
    next_engine: u64,
    /// How long each tenant has waited for a device without a job that runs, and how long the longest did.
    bare_ms: BTreeMap<TenantId, u64>,
    pub(crate) barest_ms: u64,
    /// How often jobs were told to make room, those of low priority for high ones left out.
    pub(crate) turns: u64,
}

/// Every other device shares weights.
fn device(id: u32, memory_bytes: u64) -> Device {
    Device { id: DeviceId(id), memory_bytes, shares_weights: id.is_multiple_of(2) }
}

/// Half of what its engines take are weights.
fn trunk(id: u32, engine_bytes: u64) -> Trunk {
    Trunk { id: TrunkId(id), engine_bytes, weight_bytes: engine_bytes / 2 }
}

fn find_in(jobs: &[Job], id: JobId) -> usize {
    jobs.iter().position(|job| job.id == id).unwrap()
}

impl World {
    pub(crate) fn new(devices: &[u64], trunks: &[u64], tenants: u128) -> Self {
        let rules = Rules {
            device_jobs_max: 64,
            device_mps_max: 2,
            patience_ms: 10 * TICK_MS,
            idle_ms_max: 30 * TICK_MS,
            quantum_ns: 1_000_000_000,
        };
        let quota = Quota { running_jobs: u64::MAX, device_ms: u64::MAX, device_bytes: u64::MAX };
        let scene = Scene {
            devices: (0..).zip(devices).map(|(id, bytes)| device(id, *bytes)).collect(),
            trunks: (0..).zip(trunks).map(|(id, bytes)| trunk(id, *bytes)).collect(),
            engines: Vec::new(),
            tenants: (1..=tenants).map(|id| Tenant { id: TenantId(id), virtual_ns: 0, device_ms: 0, waited_ms: 0, quota }).collect(),
            jobs: Vec::new(),
            bars: Vec::new(),
            foreign: Vec::new(),
            kept: Vec::new(),
            rules,
        };
        let (shares, waits, lingering, left, done, bare_ms) = Default::default();
        Self { scene, shares, waits, linger: 0, lingering, left, done, next_engine: 0, bare_ms, barest_ms: 0, turns: 0 }
    }

    pub(crate) fn quota(&mut self, tenant: TenantId, running_jobs: u64, device_ms: u64, device_bytes: u64) {
        let tenant = self.scene.tenants.iter_mut().find(|one| one.id == tenant).unwrap();
        tenant.quota = Quota { running_jobs, device_ms, device_bytes };
    }

    pub(crate) fn bars(&mut self, bars: &[Bar]) {
        self.scene.bars = bars.to_vec();
    }

    pub(crate) fn foreign(&mut self, foreign: &[Foreign]) {
        self.scene.foreign = foreign.to_vec();
    }

    /// Where a job runs.
    pub(crate) fn device_of(&self, id: JobId) -> Option<DeviceId> {
        let State::Running { engine, .. } = self.scene.jobs.iter().find(|job| job.id == id)?.state else { return None };
        self.scene.engines.iter().find(|one| one.id == engine).map(|engine| engine.device)
    }

    pub(crate) fn add(&mut self, job: Job, ticks: u64) {
        self.left.insert(job.id, ticks);
        self.scene.jobs.push(job);
    }

    /// Its owner wants it no more.
    pub(crate) fn cancel(&mut self, id: JobId) {
        self.scene.jobs.retain(|job| job.id != id);
    }

    /// For how long a tenant has waited for its turn.
    pub(crate) fn waited_ms(&self, of: TenantId) -> u64 {
        self.waits.of(of)
    }

    pub(crate) fn waiting(&self, tenant: TenantId) -> usize {
        self.scene.jobs.iter().filter(|job| job.tenant == tenant && matches!(job.state, State::Waiting { .. })).count()
    }

    pub(crate) fn running(&self) -> usize {
        self.scene.jobs.iter().filter(|job| matches!(job.state, State::Running { .. })).count()
    }

    pub(crate) fn is_running(&self, id: JobId) -> bool {
        self.scene.jobs.iter().any(|job| job.id == id && matches!(job.state, State::Running { .. }))
    }

    pub(crate) fn state_of(&self, id: JobId) -> Option<State> {
        self.scene.jobs.iter().find(|job| job.id == id).map(|job| job.state)
    }

    /// A job that runs is not at work yet.
    pub(crate) fn stalls(&mut self, id: JobId) {
        let job = self.scene.jobs.iter_mut().find(|job| job.id == id).unwrap();
        if let State::Running { ran_ms, .. } = &mut job.state {
            *ran_ms = 0;
        }
    }

    pub(crate) fn is_done(&self, id: JobId) -> bool {
        self.done.contains(&id)
    }

    pub(crate) fn left(&self) -> usize {
        self.scene.jobs.len()
    }

    pub(crate) fn device_ms(&self, tenant: TenantId) -> u64 {
        self.scene.tenants.iter().find(|one| one.id == tenant).unwrap().device_ms
    }

    /// A second passes; then it is decided what comes next, and that is done.
    pub(crate) fn tick(&mut self) -> Plan {
        self.pass();
        let plan = self.decide();
        let mut last = plan.clone();
        // Who is placed may open a place for others: what was done is a change.
        while !last.place.is_empty() {
            last = self.decide();
        }
        self.check_work(&last);
        plan
    }

    fn decide(&mut self) -> Plan {
        let present = self.scene.jobs.iter().map(|job| job.tenant).collect();
        self.shares.present(&present);
        for tenant in &mut self.scene.tenants {
            (tenant.virtual_ns, tenant.waited_ms) = (self.shares.of(tenant.id), self.waits.of(tenant.id));
        }
        let plan = decide(&self.scene);
        self.check_order(&plan);
        self.check_promises(&plan);
        self.obey(&plan);
        self.keep(&plan);
        self.check_room();
        plan
    }

    fn pass(&mut self) {
        let Scene { engines, jobs, tenants, kept, rules, .. } = &mut self.scene;
        self.waits.pass(TICK_MS, rules.patience_ms);
        kept.iter_mut().for_each(|kept| kept.kept_ms += TICK_MS);
        engines.retain(|engine| !engine.is_stopping);
        let share = 1_000_000 * TICK_MS / jobs.iter().filter(|job| matches!(job.state, State::Running { .. })).count().max(1) as u64;
        jobs.retain_mut(|job| match &mut job.state {
            State::Waiting { aged_ms } => {
                *aged_ms += if *aged_ms > 0 { TICK_MS } else { 0 };
                true
            }
            // It goes on later where it was.
            State::Running { is_pausing: true, .. } => {
                let left = self.lingering.entry(job.id).or_insert(job.id.0 as u64 % (self.linger + 1));
                if *left == 0 {
                    self.lingering.remove(&job.id);
                    job.state = State::Waiting { aged_ms: 0 };
                } else {
                    *left -= 1;
                }
                true
            }
            State::Running { ran_ms, .. } => {
                *ran_ms += TICK_MS;
                self.shares.charge(job.tenant, share);
                tenants.iter_mut().find(|tenant| tenant.id == job.tenant).unwrap().device_ms += share / 1_000_000;
                let left = self.left.get_mut(&job.id).unwrap();
                *left -= 1;
                if *left == 0 {
                    self.done.insert(job.id);
                }
                *left > 0
            }
        });
        for bare_ms in self.bare_ms.values_mut() {
            *bare_ms += TICK_MS;
            self.barest_ms = self.barest_ms.max(*bare_ms);
        }
        for engine in engines {
            let is_used = jobs.iter().any(|job| matches!(job.state, State::Running { engine: seat, .. } if seat == engine.id));
            engine.idle_ms = if is_used { 0 } else { engine.idle_ms + TICK_MS };
        }
    }

    /// The order in which things are told changes nothing.
    fn check_order(&self, plan: &Plan) {
        let mut other = self.scene.clone();
        other.jobs.reverse();
        other.engines.reverse();
        other.tenants.reverse();
        other.devices.reverse();
        other.trunks.reverse();
        other.bars.reverse();
        other.foreign.reverse();
        other.kept.reverse();
        assert_eq!(decide(&other), *plan);
    }

    fn obey(&mut self, plan: &Plan) {
        let Scene { engines, jobs, tenants, kept, rules, .. } = &mut self.scene;
        let find = |id: JobId| find_in(jobs, id);
        for stop in &plan.stop {
            let engine = engines.iter_mut().find(|engine| engine.id == *stop).unwrap();
            assert!(!std::mem::replace(&mut engine.is_stopping, true), "stopped twice");
        }
        let first = self.next_engine;
        for NewEngine { device, trunk, lane } in &plan.start {
            let id = EngineId(self.next_engine);
            self.next_engine += 1;
            engines.push(Engine { id, device: *device, trunk: *trunk, lane: *lane, is_stopping: false, idle_ms: 0 });
        }
        let (mut placed, mut ages) = (Vec::new(), BTreeMap::new());
        for place in &plan.place {
            let engine = match place.seat {
                Seat::Engine(id) => id,
                Seat::New(number) => EngineId(first + number as u64),
            };
            placed.push((find(place.job), engine, place.is_turn));
        }
        let pauses: Vec<usize> = plan.pause.iter().map(|id| find(*id)).collect();
        let waits: BTreeMap<usize, bool> = plan.wait.iter().map(|wait| (find(wait.job), wait.ages)).collect();
        assert_eq!(waits.len(), plan.wait.len(), "told twice");
        for (place, engine, is_turn) in placed {
            assert!(matches!(jobs[place].state, State::Waiting { .. }), "placed twice");
            assert!(!waits.contains_key(&place), "placed and told to wait");
            jobs[place].state = State::Running { engine, is_pausing: false, ran_ms: 0, is_turn };
        }
        let is_high = |id: JobId| jobs.iter().any(|job| job.id == id && job.priority == Priority::High);
        let is_new = |id: JobId| kept.iter().all(|kept| kept.job != id);
        let has_high = plan.keep.iter().any(|keep| is_new(keep.job) && is_high(keep.job));
        let mut is_turn = false;
        for place in pauses {
            let (tenant, is_low) = (jobs[place].tenant, jobs[place].priority == Priority::Low);
            let State::Running { is_pausing, ran_ms, .. } = &mut jobs[place].state else { panic!("paused though it does not run") };
            assert!(!std::mem::replace(is_pausing, true), "paused twice");
            if !(has_high && is_low) {
                is_turn = true;
                assert!(*ran_ms >= rules.patience_ms, "it had no patience of its own");
                let is_over = |other: &&Tenant| other.id != tenant && other.waited_ms >= rules.patience_ms;
                let is_aged = |wait: &nodus_schedule::Wait| {
                    jobs.iter()
                        .any(|job| job.id == wait.job && matches!(job.state, State::Waiting { aged_ms } if aged_ms >= rules.patience_ms))
                };
                assert!(tenants.iter().find(is_over).is_some() || plan.wait.iter().any(is_aged), "nobody's patience is over");
            }
        }
        self.turns += u64::from(is_turn);
        for placed in plan.place.iter().filter(|placed| placed.is_turn) {
            self.waits.end(jobs[find_in(jobs, placed.job)].tenant);
        }
        self.waits.heed(&plan.clocks);
        for tenant in tenants {
            let waits = plan.clocks.iter().filter(|(of, clock)| (*of, *clock) == (tenant.id, Clock::Runs)).count();
            assert!(waits <= 1, "two clocks of one tenant");
            let runs = jobs.iter().any(|job| job.tenant == tenant.id && matches!(job.state, State::Running { is_pausing: false, .. }));
            let bare_ms = self.bare_ms.entry(tenant.id).or_default();
            *bare_ms = if waits == 0 || runs { 0 } else { *bare_ms };
        }
        for (place, job) in jobs.iter_mut().enumerate() {
            if let State::Waiting { aged_ms } = &mut job.state {
                let is_aging = *waits.get(&place).expect("every waiting job is placed or told why not");
                *ages.entry(job.tenant).or_insert(0) += u32::from(is_aging);
                *aged_ms = if is_aging { (*aged_ms).max(1) } else { 0 };
            }
        }
        assert!(ages.values().all(|count| *count <= 1), "the patience of one job of each tenant runs at most");
    }

    /// After the plan was obeyed.
    fn check_room(&self) {
        let Scene { devices, engines, jobs, tenants, .. } = &self.scene;
        let in_engine = |id: EngineId| jobs.iter().filter(move |job| matches!(job.state, State::Running { engine, .. } if engine == id));
        for engine in engines {
            assert!(in_engine(engine.id).all(|job| job.trunk == engine.trunk && job.lane == engine.lane), "{engine:?}");
            assert!(!engine.is_stopping || in_engine(engine.id).count() == 0, "stopped with jobs in it");
            assert!(engine.lane == Lane::Fused || in_engine(engine.id).count() <= 1, "an engine of its own");
        }
        for device in devices {
            assert!(self.used(device.id) <= device.memory_bytes, "{device:?}: {}", self.used(device.id));
            let here: Vec<_> = engines.iter().filter(|engine| engine.device == device.id).collect();
            assert!(here.iter().filter(|engine| engine.lane == Lane::Mps).count() <= 2, "{here:?}");
            assert!(here.len() <= 1 || here.iter().all(|engine| engine.lane != Lane::Solo), "alone: {here:?}");
            let fused = here.iter().filter(|engine| engine.lane == Lane::Fused && !engine.is_stopping);
            let trunks: Vec<TrunkId> = fused.map(|engine| engine.trunk).collect();
            assert_eq!(trunks.iter().collect::<BTreeSet<_>>().len(), trunks.len(), "a trunk twice");
        }
        for tenant in tenants {
            let running = jobs.iter().filter(|job| job.tenant == tenant.id && matches!(job.state, State::Running { .. }));
            let (count, bytes) = running.fold((0, 0), |(count, bytes), job| (count + 1, bytes + job.adapter_bytes + job.activation_bytes));
            assert!(count <= tenant.quota.running_jobs && bytes <= tenant.quota.device_bytes, "{tenant:?}: {count} jobs, {bytes} bytes");
        }
    }

    /// Nobody waits while there is room, unless it is kept for somebody.
    fn check_work(&self, plan: &Plan) {
        let Scene { devices, jobs, .. } = &self.scene;
        let is_kept = plan.wait.iter().any(|wait| matches!(wait.reason, Reason::Kept | Reason::MakingRoom))
            || jobs.iter().any(|job| matches!(job.state, State::Waiting { aged_ms } if aged_ms >= self.scene.rules.patience_ms));
        let waits = plan.wait.iter().filter(|wait| matches!(wait.reason, Reason::Memory { .. } | Reason::Alone | Reason::Taken));
        for wait in waits.filter(|_| !is_kept) {
            let job = jobs.iter().find(|job| job.id == wait.job).unwrap();
            assert!(devices.iter().all(|device| !self.would_fit(job, device)), "{wait:?} though there is room");
        }
    }

    fn loads(&self, device: DeviceId) -> impl Iterator<Item = (&Engine, u64, u64)> {
        self.scene.engines.iter().filter(move |engine| engine.device == device).map(|engine| {
            let jobs = self.scene.jobs.iter().filter(|job| matches!(job.state, State::Running { engine: id, .. } if id == engine.id));
            let (adapters, activations) = jobs.fold((0, 0), |(sum, most), job| (sum + job.adapter_bytes, job.activation_bytes.max(most)));
            (engine, adapters, activations)
        })
    }

    fn own(&self, trunk: TrunkId) -> u64 {
        self.scene.trunks.iter().find(|one| one.id == trunk).unwrap().engine_bytes
    }

    /// With the weights of engines that share them counted once.
    fn used(&self, device: DeviceId) -> u64 {
        let apart: u64 = self.loads(device).map(|(engine, adapters, activations)| self.own(engine.trunk) + adapters + activations).sum();
        let again: u64 = self.scene.trunks.iter().map(|trunk| trunk.weight_bytes * self.sharing(device, trunk.id).saturating_sub(1)).sum();
        apart - again
    }

    /// Engines that have a trunk's weights between them.
    fn sharing(&self, device: DeviceId, trunk: TrunkId) -> u64 {
        let shares = self.scene.devices.iter().any(|one| one.id == device && one.shares_weights);
        let is_one = |engine: &&Engine| engine.device == device && engine.trunk == trunk && engine.lane == Lane::Mps && shares;
        self.scene.engines.iter().filter(is_one).count() as u64
    }

    fn would_fit(&self, job: &Job, device: &Device) -> bool {
        let loads: Vec<_> = self.loads(device.id).collect();
        if loads.iter().any(|(engine, ..)| engine.lane == Lane::Solo) || (job.lane == Lane::Solo && !loads.is_empty()) {
            return false;
        }
        let mps = loads.iter().filter(|(engine, ..)| engine.lane == Lane::Mps).count() as u64;
        if job.lane == Lane::Mps && mps >= self.scene.rules.device_mps_max {
            return false;
        }
        let takes =
            |engine: &Engine| !engine.is_stopping && engine.trunk == job.trunk && (engine.lane, job.lane) == (Lane::Fused, Lane::Fused);
        let needed = match loads.iter().find(|(engine, ..)| takes(engine)) {
            Some((_, _, activations)) => job.adapter_bytes + job.activation_bytes.saturating_sub(*activations),
            None => {
                let has_weights = job.lane == Lane::Mps && self.sharing(device.id, job.trunk) > 0;
                let weights = self.scene.trunks.iter().find(|one| one.id == job.trunk).unwrap().weight_bytes;
                self.own(job.trunk) + job.adapter_bytes + job.activation_bytes - if has_weights { weights } else { 0 }
            }
        };
        self.used(device.id) + needed <= device.memory_bytes
    }
}
