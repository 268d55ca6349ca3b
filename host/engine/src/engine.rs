//! The engine without its thread: takes commands, answers them.
//!
//! Never knows who sends a command, and reads no clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use nodus_kernels::{DType, Device, DeviceError, HostTensor, SharedWeights};
use nodus_protocol::{AdapterSlot, Command, EngineError, ErrorKind, JobSlot, LoraConfig, ModelConfig, Reply, TrunkSlot};

use crate::TrunkError;
use crate::adapter::{Adapter, Sites};
use crate::cache::TrunkCache;
use crate::counters::{Counters, Counts};
use crate::error::to_job;
use crate::form::{Decision, Item, View, Work, decide};
use crate::jobs::JobBytes;
use crate::plan::{BatchSize, matrices};
use crate::residue::Residue;
use crate::trunk::Trunk;

/// How an engine works. None of it changes a result.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a pass waits for a job that took part in the last one.
    pub linger: Duration,
    /// Rows of all batches of one pass at most; a single larger batch runs alone.
    pub rows_max: usize,
    /// Bytes of activations kept for the backward pass at most; the others are computed again.
    pub kept_bytes_max: u64,
    /// Bytes of the trunk cache on the device at most; with 0 there is none. Jobs come first: it gives way where they need the memory.
    pub trunk_cache_bytes: u64,
    /// Bytes on the host at most, for what has no room in the trunk cache; only where the device's memory is apart from the host's.
    pub trunk_cache_host_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            linger: Duration::from_millis(2),
            rows_max: 8192,
            kept_bytes_max: 512 << 20,
            trunk_cache_bytes: 256 << 20,
            trunk_cache_host_bytes: 1 << 30,
        }
    }
}

/// Nanoseconds since a moment of its own. Only figures depend on it; without a thread it stands still.
pub(crate) type Clock = Box<dyn Fn() -> u64 + Send>;

/// An engine on one device.
pub struct Engine<D: Device> {
    pub(crate) device: D,
    pub(crate) options: Options,
    pub(crate) trunks: Vec<Trunk<D>>,
    pub(crate) adapters: BTreeMap<AdapterSlot, Adapter<D>>,
    pub(crate) cache: TrunkCache<D>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) clock: Clock,
    /// Whether each job gets passes of its own.
    is_apart: bool,
    /// Why nothing works any more.
    pub(crate) lost: Option<EngineError>,
    previous: Option<(TrunkSlot, BTreeSet<JobSlot>)>,
    /// What passes left in memory.
    pub(crate) residue: Residue,
    /// Jobs that go before others.
    urgent: BTreeSet<JobSlot>,
}

impl<D: Device> Engine<D> {
    /// An engine without trunks.
    pub fn new(device: D, options: Options) -> Self {
        let host_bytes = if device.has_separate_memory() { options.trunk_cache_host_bytes } else { 0 };
        let cache = TrunkCache::new(options.trunk_cache_bytes, host_bytes);
        let (trunks, adapters, counters, clock) = (Vec::new(), BTreeMap::new(), Arc::default(), Box::new(|| 0));
        let (is_apart, lost, previous, residue, urgent) = (false, None, None, Residue::default(), BTreeSet::new());
        Self { device, options, trunks, adapters, cache, counters, clock, is_apart, lost, previous, residue, urgent }
    }

    /// Loads a trunk. Tensors are those of transformers by name (`model.embed_tokens.weight`, ...); others are ignored.
    ///
    /// # Errors
    /// Names what is missing, or of another shape than the configuration says.
    pub fn add_trunk(&mut self, config: &ModelConfig, tensors: &BTreeMap<String, HostTensor>) -> Result<TrunkSlot, TrunkError> {
        let trunk = Trunk::load(&mut self.device, config, tensors)?;
        Ok(self.put(trunk))
    }

    /// Makes a trunk of random weights on the device: the same weights for the same configuration, type and seed on every device.
    ///
    /// # Errors
    /// Sizes that make no trunk; too little memory.
    pub fn add_random_trunk(&mut self, config: &ModelConfig, dtype: DType, seed: u64) -> Result<TrunkSlot, TrunkError> {
        let trunk = Trunk::random(&mut self.device, config, dtype, seed)?;
        Ok(self.put(trunk))
    }

    /// All trunks are there: what of their weights other processes on the device can be handed.
    ///
    /// # Errors
    /// The device fails.
    pub fn share_weights(&mut self) -> Result<Option<SharedWeights>, DeviceError> {
        self.device.share_weights()
    }

    fn put(&mut self, trunk: Trunk<D>) -> TrunkSlot {
        self.honour_unproven();
        let slot = TrunkSlot(self.trunks.len() as u32);
        self.trunks.push(trunk);
        self.count_bytes();
        slot
    }

    /// What is not shown to be exact on this device: each job gets passes of its own, whose rows nothing of another job's stands beside or
    /// came before. Nothing is kept for later epochs either, since rows that come in would change what the others stand beside.
    fn honour_unproven(&mut self) {
        let unproven = self.device.unproven();
        self.is_apart = !unproven.is_empty();
        if self.is_apart {
            tracing::warn!(operations = unproven.join(", "), "not shown to be exact on this device: each job gets passes of its own");
            self.cache = TrunkCache::new(0, 0);
        }
    }

    /// What makes the bits of results on a trunk; see [`Device::class`]. Empty where there is no such trunk.
    #[must_use]
    pub fn class(&self, trunk: TrunkSlot) -> Vec<(String, String)> {
        let config = self.trunks.get(trunk.0 as usize).map(|trunk| &trunk.config);
        config.map_or_else(Vec::new, |config| self.device.class(&matrices(config)))
    }

    /// The device, for looking inside.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Measures its figures with this clock, in nanoseconds since any moment. No result depends on it; a thread brings its own.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Fn() -> u64 + Send + 'static) -> Self {
        self.clock = Box::new(clock);
        self
    }

    /// The device, for measurements.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Lets go of everything and gives the device back.
    #[must_use]
    pub fn into_device(self) -> D {
        self.device
    }

    /// What it has done.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counters.read()
    }

    /// What each job holds of the device's memory; also of jobs that ended.
    #[must_use]
    pub fn jobs(&self) -> BTreeMap<JobSlot, JobBytes> {
        self.counters.jobs().0.clone()
    }

    /// Carries out one command.
    ///
    /// # Errors
    /// As the command says.
    pub fn execute(&mut self, command: Command) -> Result<Reply, EngineError> {
        self.execute_all(vec![command]).pop().unwrap_or_else(|| Err(EngineError::gone()))
    }

    /// Carries out commands that arrive all at once, in as few passes as [`decide`] allows, and answers each in its place.
    pub fn execute_all(&mut self, commands: Vec<Command>) -> Vec<Result<Reply, EngineError>> {
        let mut replies: Vec<Option<Result<Reply, EngineError>>> = commands.iter().map(|_| None).collect();
        let mut waiting: Vec<(usize, Command)> = commands.into_iter().enumerate().collect();
        loop {
            let items: Vec<Item> = waiting.iter().map(|(_, command)| self.item(command, 0)).collect();
            // Nothing else will arrive, so there is nobody to wait for.
            let decision = self.decide(&items, u64::MAX, 0);
            let commands: Vec<&Command> = chosen(&decision).iter().filter_map(|i| waiting.get(*i)).map(|(_, command)| command).collect();
            if commands.is_empty() {
                break;
            }
            let answers = self.carry_out(&decision, &commands);
            let taken: Vec<usize> = chosen(&decision).iter().filter_map(|i| waiting.get(*i)).map(|(place, _)| *place).collect();
            for (place, answer) in taken.iter().zip(answers) {
                if let Some(reply) = replies.get_mut(*place) {
                    *reply = Some(answer);
                }
            }
            waiting.retain(|(place, _)| !taken.contains(place));
        }
        replies.into_iter().map(|reply| reply.unwrap_or_else(|| Err(EngineError::gone()))).collect()
    }

    /// What the decision sees of a command.
    pub(crate) fn item(&self, command: &Command, sent_us: u64) -> Item {
        let (adapter, rows) = match command {
            Command::ForwardBackward { slot, batch } | Command::TrainStep { slot, batch, .. } | Command::Evaluate { slot, batch, .. } => {
                (*slot, Some(BatchSize::rows_of(batch, self.device.row_align())))
            }
            Command::CreateAdapter { slot, .. }
            | Command::LoadAdapter { slot, .. }
            | Command::OptimStep { slot, .. }
            | Command::Export { slot }
            | Command::DropAdapter { slot } => (*slot, None),
            Command::Reserve { job, .. }
            | Command::Prioritise { job }
            | Command::Snapshot { job }
            | Command::Restore { job, .. }
            | Command::DropJob { job } => (AdapterSlot { job: *job, index: u32::MAX }, None),
            Command::Bound { .. } => (AdapterSlot { job: JobSlot(u32::MAX), index: u32::MAX }, None),
        };
        let work = match (rows, self.adapters.get(&adapter)) {
            (Some(rows), Some(found)) => Work::Pass { trunk: found.trunk, rows },
            _ => Work::Alone,
        };
        Item { adapter, work, is_urgent: self.urgent.contains(&adapter.job), sent_us }
    }

    /// What to do with these commands, at this time.
    pub(crate) fn decide(&mut self, items: &[Item], now_us: u64, previous_end_us: u64) -> Decision {
        if let Some((_, jobs)) = &mut self.previous {
            jobs.retain(|job| self.adapters.keys().any(|slot| slot.job == *job));
        }
        decide(&View {
            items,
            previous: self.previous.as_ref().map(|(trunk, jobs)| (*trunk, jobs)),
            previous_end_us,
            now_us,
            linger_us: u64::try_from(self.options.linger.as_micros()).unwrap_or(u64::MAX),
            // A pass that has no room for a second takes the oldest alone.
            rows_max: if self.is_apart { 0 } else { self.options.rows_max },
        })
    }

    /// Does what was decided with the commands chosen and answers each in its place.
    pub(crate) fn carry_out(&mut self, decision: &Decision, commands: &[&Command]) -> Vec<Result<Reply, EngineError>> {
        if let Some(lost) = &self.lost {
            return commands.iter().map(|_| Err(lost.clone())).collect();
        }
        let replies = match decision {
            Decision::Pass(trunk, _) => {
                let replies = self.pass(*trunk, commands);
                let jobs: BTreeSet<JobSlot> = commands.iter().map(|command| self.item(command, 0).adapter.job).collect();
                // Others do not wait for an urgent job, which does not wait for them.
                if jobs.is_disjoint(&self.urgent) {
                    self.previous = Some((*trunk, jobs));
                }
                replies
            }
            _ => commands.iter().map(|command| self.manage(command)).collect(),
        };
        for error in replies.iter().filter_map(|reply| reply.as_ref().err()) {
            if error.kind == ErrorKind::DeviceLost {
                tracing::error!(%error, "the device is lost; everything is refused from here on");
                self.lost = Some(error.clone());
            }
        }
        self.count_bytes();
        replies
    }

    /// Everything that needs no pass.
    fn manage(&mut self, command: &Command) -> Result<Reply, EngineError> {
        match command {
            Command::CreateAdapter { slot, trunk, config, seed, cohort } => {
                let adapter = self.create(*slot, *trunk, config, *seed, *cohort)?;
                Ok(self.install(*slot, adapter))
            }
            Command::LoadAdapter { slot, trunk, weights, seed, cohort } => {
                weights.validate(&self.trunk(*trunk)?.config)?;
                let mut adapter = self.create(*slot, *trunk, &weights.config, *seed, *cohort)?;
                adapter.fill(&mut self.device, weights).map_err(|error| to_job(&error))?;
                Ok(self.install(*slot, adapter))
            }
            Command::OptimStep { slot, optimiser } => self.optim_step(*slot, optimiser).map(Reply::Step),
            Command::Export { slot } => self.export(*slot),
            Command::DropAdapter { slot } => self.uninstall(*slot).ok_or_else(|| no_adapter(*slot)),
            Command::Reserve { job, adapter_bytes, activation_bytes } => {
                let free_bytes = self.free_bytes();
                self.counters.jobs().reserve(*job, *adapter_bytes, *activation_bytes, free_bytes).map(|()| Reply::Done)
            }
            Command::Bound { bytes } => self.device.bound(*bytes).map(|()| Reply::Done).map_err(|error| to_job(&error)),
            Command::Snapshot { job } => self.snapshot(*job).map(|state| Reply::State(Box::new(state))),
            Command::Restore { job, trunk, cohort, state } => self.restore(*job, (*trunk, *cohort), state).map(|()| Reply::Done),
            Command::Prioritise { job } => {
                self.urgent.insert(*job);
                Ok(Reply::Done)
            }
            Command::DropJob { job } => {
                self.urgent.remove(job);
                let slots: Vec<AdapterSlot> = self.adapters.keys().copied().filter(|slot| slot.job == *job).collect();
                slots.into_iter().for_each(|slot| drop(self.uninstall(slot)));
                self.counters.jobs().ended(*job);
                self.residue.clear(|| self.device.forget_passes()).map(|()| Reply::Done).map_err(|error| to_job(&error))
            }
            // A pass on an adapter that is not there.
            Command::ForwardBackward { slot, .. } | Command::TrainStep { slot, .. } | Command::Evaluate { slot, .. } => {
                Err(no_adapter(*slot))
            }
        }
    }

    fn create(
        &mut self,
        slot: AdapterSlot,
        trunk: TrunkSlot,
        config: &LoraConfig,
        seed: u64,
        cohort: Option<u64>,
    ) -> Result<Adapter<D>, EngineError> {
        let model = self.make_room(slot, trunk, config)?;
        Adapter::create(&mut self.device, slot, (trunk, &model), config, seed, cohort).map_err(|error| to_job(&error))
    }

    /// Checks that an adapter may be made, and makes room for it; its model.
    pub(crate) fn make_room(&mut self, slot: AdapterSlot, trunk: TrunkSlot, config: &LoraConfig) -> Result<ModelConfig, EngineError> {
        if self.adapters.contains_key(&slot) {
            return Err(EngineError::invalid(format!("adapter {} exists already, expected a free slot", slot.index)));
        }
        let model = self.trunk(trunk)?.config.clone();
        config.validate(&model)?;
        let needed_bytes = Sites::new(config, &model).state_bytes();
        self.counters.jobs().check_adapter(slot.job, needed_bytes, self.free_bytes())?;
        if needed_bytes > self.device.free_bytes() {
            self.cache.release(&mut self.device).map_err(|error| to_job(&error))?;
        }
        Ok(model)
    }

    pub(crate) fn install(&mut self, slot: AdapterSlot, adapter: Adapter<D>) -> Reply {
        self.counters.jobs().granted(slot, adapter.sites.state_bytes(), adapter.sites.weight_bytes());
        self.adapters.insert(slot, adapter);
        Reply::Done
    }

    /// Drops an adapter, and with the last of a cohort what the trunk cache has of it.
    fn uninstall(&mut self, slot: AdapterSlot) -> Option<Reply> {
        let adapter = self.adapters.remove(&slot)?;
        self.counters.jobs().zeroed(slot, adapter.sites.state_bytes());
        if adapter.cohort.is_some() {
            self.cache.retain_cohorts(&self.adapters.values().filter_map(|adapter| adapter.cohort).collect());
        }
        Some(Reply::Done)
    }

    /// What the device has left for jobs: the trunk cache gives way to them.
    fn free_bytes(&self) -> u64 {
        self.device.free_bytes().saturating_add(self.cache.counts().device_bytes)
    }

    fn export(&mut self, slot: AdapterSlot) -> Result<Reply, EngineError> {
        let adapter = self.adapters.get_mut(&slot).ok_or_else(|| no_adapter(slot))?;
        if let Some(poison) = &adapter.poison {
            return Err(poison.clone());
        }
        let weights = adapter.weights(&mut self.device).map_err(|error| to_job(&error))?;
        let broken = weights.modules.iter().find(|module| module.a.iter().chain(&module.b).any(|value| !value.is_finite()));
        match broken {
            Some(module) => Err(adapter.poison(&format!("a weight of layers.{}.{} is not finite", module.layer, module.module.path()))),
            None => {
                self.counters.jobs().exported(slot, adapter.sites.weight_bytes());
                Ok(Reply::Weights(Box::new(weights)))
            }
        }
    }

    fn trunk(&self, slot: TrunkSlot) -> Result<&Trunk<D>, EngineError> {
        self.trunks.get(slot.0 as usize).ok_or_else(|| EngineError::new(ErrorKind::NotFound, format!("there is no trunk {}", slot.0)))
    }

    fn count_bytes(&self) {
        self.counters.allocated_bytes.store(self.device.allocated_bytes(), Relaxed);
        self.counters.set_cache(self.cache.counts());
    }
}

/// The places of the items that a decision runs.
pub(crate) fn chosen(decision: &Decision) -> &[usize] {
    match decision {
        Decision::Alone(chosen) | Decision::Pass(_, chosen) => chosen,
        Decision::Idle | Decision::Wait { .. } => &[],
    }
}

pub(crate) fn no_adapter(slot: AdapterSlot) -> EngineError {
    EngineError::new(ErrorKind::NotFound, format!("there is no adapter {}", slot.index))
}
