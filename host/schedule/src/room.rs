//! The memory of one device, and what fits into it.
//!
//! Knows sizes, not who goes first.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::Seat;
use crate::scene::{Bar, Device, EngineId, Job, JobId, Lane, Trunk, TrunkId};

/// What one engine holds.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    trunk: TrunkId,
    lane: Lane,
    needs: Needs,
    is_stopping: bool,
    idle_ms: u64,
    jobs: BTreeMap<JobId, Share>,
}

/// What engines on a trunk take of a device before any job.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    engine_bytes: u64,
    weight_bytes: u64,
}

impl Needs {
    pub(crate) fn of(trunk: &Trunk) -> Self {
        let Trunk { engine_bytes, weight_bytes, .. } = *trunk;
        Self { engine_bytes, weight_bytes }
    }
}

/// One job's part of a load.
#[derive(Clone, Copy, Debug)]
struct Share {
    adapter_bytes: u64,
    activation_bytes: u64,
    is_leaving: bool,
}

/// One device.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    memory_bytes: u64,
    /// Whether engines of the lane `mps` have weights once between them.
    shares_weights: bool,
    jobs_max: u64,
    mps_max: u64,
    loads: BTreeMap<Seat, Load>,
    /// Engines that may not be started now.
    bars: Vec<Bar>,
    /// Jobs that began on a device of another class.
    foreign: BTreeSet<JobId>,
    kept: Option<Keep>,
}

/// Who is to get in: others take only what leaves it its place.
#[derive(Clone, Copy, Debug)]
struct Keep {
    job: Job,
    needs: Needs,
    /// Whether room was made for it, which it is to have though others come first by then.
    is_promised: bool,
}

/// Where a job fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Into an engine that there is.
    Into(Seat),
    /// Into a new one.
    New,
}

/// Why a job does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// It began on a device of another class.
    Foreign,
    /// An engine for it may not be started now.
    Barred { left_ms: u64 },
    /// Somebody has the device to themselves.
    Taken,
    /// It wants the device to itself, and somebody is there.
    Alone,
    /// As many jobs as may.
    Seats,
    /// As many engines of the lane `mps` as may.
    Engines,
    /// Too little memory.
    Memory { needed: u64, free: u64 },
    /// What is free is kept for another.
    Kept,
}

impl Load {
    pub(crate) fn new(trunk: TrunkId, lane: Lane, needs: Needs) -> Self {
        Self { trunk, lane, needs, is_stopping: false, idle_ms: 0, jobs: BTreeMap::new() }
    }

    pub(crate) fn of(engine: &crate::Engine, needs: Needs) -> Self {
        let crate::Engine { trunk, lane, is_stopping, idle_ms, .. } = *engine;
        Self { trunk, lane, needs, is_stopping, idle_ms, jobs: BTreeMap::new() }
    }

    fn bytes(&self) -> u64 {
        let adapters = self.jobs.values().map(|job| job.adapter_bytes).fold(self.needs.engine_bytes, u64::saturating_add);
        adapters.saturating_add(self.activation_bytes())
    }

    fn activation_bytes(&self) -> u64 {
        self.jobs.values().map(|job| job.activation_bytes).max().unwrap_or(0)
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty() && !self.is_stopping
    }
}

impl Room {
    pub(crate) fn new(device: &Device, (jobs_max, mps_max): (u64, u64)) -> Self {
        let Device { memory_bytes, shares_weights, .. } = *device;
        let (loads, bars, foreign) = Default::default();
        Self { memory_bytes, shares_weights, jobs_max, mps_max, loads, bars, foreign, kept: None }
    }

    /// From now on others take only what leaves this job its place.
    pub(crate) fn keep(&mut self, job: &Job, needs: Needs, is_promised: bool) {
        self.kept = Some(Keep { job: *job, needs, is_promised });
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// For whom room was made here.
    pub(crate) fn promised(&self) -> Option<JobId> {
        self.kept.filter(|kept| kept.is_promised).map(|kept| kept.job.id)
    }

    /// A job has its place, here or elsewhere.
    pub(crate) fn release(&mut self, job: JobId) {
        self.kept = self.kept.filter(|kept| kept.job.id != job);
    }

    pub(crate) fn bar(&mut self, bar: Bar) {
        self.bars.push(bar);
    }

    pub(crate) fn exclude(&mut self, job: JobId) {
        self.foreign.insert(job);
    }

    /// Whether a device that is cleared for the job would take it: it is of its class, and an engine may be started.
    pub(crate) fn is_open_to(&self, job: &Job) -> bool {
        !self.foreign.contains(&job.id) && (self.seat(job).is_some() || self.barred_ms(job).is_none())
    }

    /// For how long no engine may be started for a job.
    fn barred_ms(&self, job: &Job) -> Option<u64> {
        let is_its = |bar: &&Bar| (bar.trunk, bar.lane) == (job.trunk, job.lane) && bar.job.is_none_or(|only| only == job.id);
        self.bars.iter().filter(is_its).map(|bar| bar.left_ms).max()
    }

    pub(crate) fn add(&mut self, seat: Seat, load: Load) {
        self.loads.insert(seat, load);
    }

    /// Puts a job into an engine.
    pub(crate) fn put(&mut self, seat: Seat, job: &Job, is_leaving: bool) {
        if let Some(load) = self.loads.get_mut(&seat) {
            let Job { adapter_bytes, activation_bytes, .. } = *job;
            load.jobs.insert(job.id, Share { adapter_bytes, activation_bytes, is_leaving });
        }
    }

    pub(crate) fn has(&self, seat: Seat) -> bool {
        self.loads.contains_key(&seat)
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        let bytes = self.loads.values().map(Load::bytes).fold(0, u64::saturating_add);
        self.memory_bytes.saturating_sub(bytes.saturating_sub(self.shared_bytes()))
    }

    /// Weights that engines have from others, counted with each of them.
    fn shared_bytes(&self) -> u64 {
        let mut counted = BTreeSet::new();
        let sharing = self.loads.values().filter(|load| self.shares_weights && load.lane == Lane::Mps);
        let again = sharing.filter(|load| !counted.insert(load.trunk));
        again.map(|load| load.needs.weight_bytes).fold(0, u64::saturating_add)
    }

    /// What a job needs here with an engine of its own.
    fn needed(&self, job: &Job, needs: Needs) -> u64 {
        let is_mate = |load: &Load| load.lane == Lane::Mps && load.trunk == job.trunk;
        let finds_weights = self.shares_weights && job.lane == Lane::Mps && self.loads.values().any(is_mate);
        alone(job, needs).saturating_sub(if finds_weights { needs.weight_bytes } else { 0 })
    }

    pub(crate) fn jobs(&self) -> u64 {
        self.loads.values().map(|load| load.jobs.len() as u64).sum()
    }

    /// An engine on the job's trunk that takes it.
    fn seat(&self, job: &Job) -> Option<Seat> {
        let takes = |load: &Load| job.lane == Lane::Fused && load.lane == Lane::Fused && load.trunk == job.trunk && !load.is_stopping;
        self.loads.iter().find(|(_, load)| takes(load)).map(|(seat, _)| *seat)
    }

    /// Whether there is an engine that holds the job's trunk and takes it.
    pub(crate) fn has_trunk(&self, job: &Job) -> bool {
        self.seat(job).is_some()
    }

    /// Where a job fits now, an engine of its own taking so many bytes.
    pub(crate) fn fit(&self, job: &Job, needs: Needs) -> Result<Fit, Full> {
        let fit = self.find(job, needs)?;
        let leaves_its_place = |kept: Keep| {
            let mut then = Self { kept: None, ..self.clone() };
            then.place(job, needs, usize::MAX);
            then.evict(&kept.job, kept.needs).is_some()
        };
        match self.kept {
            Some(kept) if kept.job.id != job.id && !leaves_its_place(kept) => Err(Full::Kept),
            _ => Ok(fit),
        }
    }

    /// The same, whoever the device is kept for.
    fn find(&self, job: &Job, needs: Needs) -> Result<Fit, Full> {
        if self.foreign.contains(&job.id) {
            return Err(Full::Foreign);
        }
        if self.loads.values().any(|load| load.lane == Lane::Solo) {
            return Err(Full::Taken);
        }
        if job.lane == Lane::Solo && !self.loads.is_empty() {
            return Err(Full::Alone);
        }
        if self.jobs() >= self.jobs_max {
            return Err(Full::Seats);
        }
        if job.lane == Lane::Mps && self.loads.values().filter(|load| load.lane == Lane::Mps).count() as u64 >= self.mps_max {
            return Err(Full::Engines);
        }
        let seat = self.seat(job);
        if let (None, Some(left_ms)) = (seat, self.barred_ms(job)) {
            return Err(Full::Barred { left_ms });
        }
        let load = seat.and_then(|seat| self.loads.get(&seat));
        let needed = match load {
            Some(load) => job.adapter_bytes.saturating_add(job.activation_bytes.saturating_sub(load.activation_bytes())),
            None => self.needed(job, needs),
        };
        let free = self.free_bytes();
        match (needed <= free, seat) {
            (false, _) => Err(Full::Memory { needed, free }),
            (true, Some(seat)) => Ok(Fit::Into(seat)),
            (true, None) => Ok(Fit::New),
        }
    }

    /// Puts a job where it fits; a new engine gets this number.
    pub(crate) fn place(&mut self, job: &Job, needs: Needs, next: usize) -> Option<Seat> {
        let seat = match self.fit(job, needs).ok()? {
            Fit::Into(seat) => seat,
            Fit::New => {
                self.add(Seat::New(next), Load::new(job.trunk, job.lane, needs));
                Seat::New(next)
            }
        };
        self.put(seat, job, false);
        Some(seat)
    }

    /// Engines without jobs whose end would let the job in once those have gone that are going, the longest idle first and no more than are needed.
    /// One whose jobs are going is none of them yet. None where it would not.
    pub(crate) fn evict(&self, job: &Job, needs: Needs) -> Option<Vec<EngineId>> {
        let (own, mut without) = (self.seat(job), self.without_leaving());
        let idle = without.loads.iter().filter_map(|(seat, load)| match seat {
            Seat::Engine(id) if load.is_idle() && Some(*seat) != own => Some((load.idle_ms, *id)),
            _ => None,
        });
        let mut idle: Vec<(u64, EngineId)> = idle.collect();
        idle.sort_by_key(|(idle_ms, id)| (std::cmp::Reverse(*idle_ms), *id));
        let mut ended = Vec::new();
        for (_, id) in idle {
            if without.fit(job, needs).is_ok() {
                break;
            }
            without.loads.remove(&Seat::Engine(id));
            ended.push(id);
        }
        ended.retain(|id| self.loads.get(&Seat::Engine(*id)).is_some_and(Load::is_idle));
        without.fit(job, needs).is_ok().then_some(ended)
    }

    /// Whether a job runs here.
    pub(crate) fn holds(&self, job: JobId) -> bool {
        self.loads.values().any(|load| load.jobs.contains_key(&job))
    }

    /// The fewest of these jobs, taken in their order, whose end would let the job in, with the idle engines that must end too. Whoever of them
    /// turns out not to be needed stays.
    pub(crate) fn displace(&self, job: &Job, needs: Needs, jobs: &[JobId]) -> Option<Vec<JobId>> {
        let here: Vec<JobId> = jobs.iter().copied().filter(|id| self.holds(*id)).collect();
        let lets_in = |ended: &[JobId]| {
            let mut without = self.without_leaving();
            without.loads.values_mut().for_each(|load| load.jobs.retain(|id, _| !ended.contains(id)));
            without.evict(job, needs).is_some()
        };
        if here.is_empty() || !lets_in(&here) {
            return None;
        }
        let mut ended: Vec<JobId> = Vec::new();
        for id in here {
            ended.push(id);
            if lets_in(&ended) {
                break;
            }
        }
        for id in ended.clone() {
            let others: Vec<JobId> = ended.iter().copied().filter(|other| *other != id).collect();
            if !others.is_empty() && lets_in(&others) {
                ended = others;
            }
        }
        Some(ended)
    }

    /// As it will be when those have gone that are going.
    fn without_leaving(&self) -> Self {
        let mut without = self.clone();
        without.loads.retain(|_, load| !load.is_stopping);
        without.loads.values_mut().for_each(|load| load.jobs.retain(|_, job| !job.is_leaving));
        without
    }

    /// From now on the engine takes no job.
    pub(crate) fn stop(&mut self, engine: EngineId) {
        if let Some(load) = self.loads.get_mut(&Seat::Engine(engine)) {
            load.is_stopping = true;
        }
    }

    /// Engines that nobody needs: those of single jobs that ended, and those idle for longer than this.
    pub(crate) fn unneeded(&self, idle_ms_max: u64) -> Vec<EngineId> {
        let is_unneeded = |load: &Load| load.is_idle() && (load.lane != Lane::Fused || load.idle_ms > idle_ms_max);
        self.loads
            .iter()
            .filter_map(|(seat, load)| match seat {
                Seat::Engine(id) if is_unneeded(load) => Some(*id),
                _ => None,
            })
            .collect()
    }
}

/// What a job needs of an empty device.
pub(crate) fn alone(job: &Job, needs: Needs) -> u64 {
    needs.engine_bytes.saturating_add(job.adapter_bytes).saturating_add(job.activation_bytes)
}
