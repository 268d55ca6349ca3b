//! Passes and optimiser steps, from commands to replies.
//!
//! Never lets one member's failure reach another: each is checked before the pass, and settled after it, alone.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use nodus_kernels::{AdamWItem, Device, DeviceError, Use};
use nodus_protocol::{
    AdamW, AdapterSlot, Batch, Command, EngineError, JobSlot, LossSums, ModelConfig, Normalisation, Reply, SequenceLoss, StepReport,
    TrunkSlot,
};

use crate::adapter::Adapter;
use crate::engine::{Engine, no_adapter};
use crate::error::to_job;
use crate::pass::memory::{Keep, Sizes};
use crate::pass::prepare::reach;
use crate::pass::{Cuts, Failure, Member, Pass, sequence_losses};
use crate::plan::{BatchSize, activation_bytes};
use crate::residue::Owner;
use crate::rows::RowMap;
use crate::trunk::Trunk;

/// What a command asks of a pass.
#[derive(Clone, Copy)]
struct Ask<'c> {
    slot: AdapterSlot,
    batch: &'c Batch,
    /// What errors count its sequences from.
    first: usize,
    trains: bool,
    optimiser: Option<&'c AdamW>,
}

impl<'c> Ask<'c> {
    fn of(command: &'c Command) -> Option<Self> {
        match command {
            Command::ForwardBackward { slot, batch } => Some(Self { slot: *slot, batch, first: 0, trains: true, optimiser: None }),
            Command::TrainStep { slot, batch, optimiser } => {
                Some(Self { slot: *slot, batch, first: 0, trains: true, optimiser: Some(optimiser) })
            }
            Command::Evaluate { slot, batch, first } => Some(Self { slot: *slot, batch, first: *first, trains: false, optimiser: None }),
            _ => None,
        }
    }
}

/// One answer an adapter.
type Answers<T> = BTreeMap<AdapterSlot, Result<T, EngineError>>;

impl<D: Device> Engine<D> {
    /// Runs commands of different adapters on one trunk in one pass; those that end in a step take it.
    pub(crate) fn pass(&mut self, trunk: TrunkSlot, commands: &[&Command]) -> Vec<Result<Reply, EngineError>> {
        let asks: Vec<Result<Ask<'_>, EngineError>> = commands.iter().map(|command| self.check(command)).collect();
        let good: Vec<Ask<'_>> = asks.iter().filter_map(|ask| ask.as_ref().ok().copied()).collect();
        let mut losses = self.losses(trunk, &good, self.cache.is_on());
        let sound = |ask: &&Ask<'_>| losses.get(&ask.slot).is_some_and(Result::is_ok);
        let stepping = good.iter().filter(sound).filter_map(|ask| Some((ask.slot, ask.optimiser?))).collect();
        let start_ns = (self.clock)();
        let mut steps = self.optim_steps(&stepping);
        self.counters.step_ns.fetch_add((self.clock)().saturating_sub(start_ns), Relaxed);
        let reply = |ask: Result<Ask<'_>, EngineError>| {
            let ask = ask?;
            let losses = losses.remove(&ask.slot).unwrap_or_else(|| Err(no_adapter(ask.slot)))?;
            match ask.optimiser {
                None => Ok(Reply::Loss(losses)),
                Some(_) => steps.remove(&ask.slot).unwrap_or_else(|| Err(no_adapter(ask.slot))).map(Reply::Step),
            }
        };
        asks.into_iter().map(reply).collect()
    }

    /// An optimiser step on what is accumulated.
    pub(crate) fn optim_step(&mut self, slot: AdapterSlot, optimiser: &AdamW) -> Result<StepReport, EngineError> {
        let adapter = self.sound_adapter(slot)?;
        check_step(optimiser, adapter.sums.sequences, adapter.sums.weight_sum)?;
        self.optim_steps(&BTreeMap::from([(slot, optimiser)])).remove(&slot).unwrap_or_else(|| Err(no_adapter(slot)))
    }

    /// Everything that can be wrong with a command, before anything happens.
    fn check<'c>(&self, command: &'c Command) -> Result<Ask<'c>, EngineError> {
        let ask = Ask::of(command).ok_or_else(|| EngineError::invalid("the command has no batch"))?;
        let adapter = self.sound_adapter(ask.slot)?;
        if let Some(trunk) = self.trunks.get(adapter.trunk.0 as usize) {
            check_batch(ask.batch, ask.first, &trunk.config)?;
            let size = BatchSize::of_all(ask.batch, self.device.row_align());
            let needed_bytes = activation_bytes(&trunk.config, &adapter.sites, size, ask.trains);
            let mut jobs = self.counters.jobs();
            jobs.check_activations(ask.slot.job, needed_bytes)?;
            jobs.passing(ask.slot.job, needed_bytes);
        }
        if let Some(optimiser) = ask.optimiser {
            check_step(optimiser, ask.batch.sequences.len() as u64, adapter.weight_sum_with(ask.batch))?;
        }
        Ok(ask)
    }

    fn sound_adapter(&self, slot: AdapterSlot) -> Result<&Adapter<D>, EngineError> {
        let adapter = self.adapters.get(&slot).ok_or_else(|| no_adapter(slot))?;
        adapter.poison.as_ref().map_or(Ok(adapter), |poison| Err(poison.clone()))
    }

    /// Losses of each ask; those that train have their gradients added to. Where memory lacks the trunk cache gives its own back; where it
    /// still lacks for all in one pass they go in two, and so on, so that only one that is too large by itself is refused.
    fn losses(&mut self, trunk: TrunkSlot, asks: &[Ask<'_>], cached: bool) -> Answers<Vec<SequenceLoss>> {
        match self.run(trunk, asks, cached) {
            Ok(losses) => losses,
            Err(DeviceError::OutOfMemory { .. }) if cached => match self.cache.release(&mut self.device) {
                Ok(()) => self.losses(trunk, asks, false),
                Err(error) => asks.iter().map(|ask| (ask.slot, Err(to_job(&error)))).collect(),
            },
            Err(DeviceError::OutOfMemory { needed_bytes, free_bytes }) if asks.len() > 1 => {
                tracing::debug!(needed_bytes, free_bytes, members = asks.len(), "no room for all in one pass; they go in two");
                asks.chunks(asks.len().div_ceil(2)).flat_map(|half| self.losses(trunk, half, false)).collect()
            }
            Err(error) => asks.iter().map(|ask| (ask.slot, Err(to_job(&error)))).collect(),
        }
    }

    /// One pass. An error means that it had no effect.
    fn run(&mut self, slot: TrunkSlot, asks: &[Ask<'_>], cached: bool) -> Result<Answers<Vec<SequenceLoss>>, DeviceError> {
        let start_ns = (self.clock)();
        let Some(trunk) = self.trunks.get(slot.0 as usize) else { return Ok(BTreeMap::new()) };
        let (hidden, halves) = (trunk.config.hidden_size, 2 * trunk.config.num_hidden_layers);
        let mut members = Member::all(&mut self.adapters, &asks.iter().map(|ask| (ask.slot, (ask.batch, ask.trains))).collect());
        if cached {
            self.cache.begin_pass();
            members.iter_mut().for_each(|member| member.look_up(&mut self.cache, slot, halves));
        }
        let sources: Vec<_> = members.iter().map(Member::source).collect();
        let map = RowMap::new(&sources, halves, self.device.row_align());
        drop(sources);
        let (come_in, computed) = (reach(&map, &members, true).len(), reach(&map, &members, false));
        let missed = computed.len();
        let mut slots = self.cache.make_room(&mut self.device, computed, hidden)?;
        let keep = plan_pass(&self.device, trunk, &map, &members, self.options.kept_bytes_max)?;
        self.counters.forming_ns.fetch_add((self.clock)().saturating_sub(start_ns), Relaxed);

        let owners = Owner::all(members.iter().map(|member| (member.slot.job, member.adapter.cohort)));
        self.residue.before(owners, || self.device.forget_passes())?;
        let cuts = Cuts { cache: &self.cache, slots: &mut slots };
        let outcome = Pass::new(&mut self.device, trunk, &map, &mut members, cuts, &self.clock).run(&keep);
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(Failure { error, torn: false }) => return Err(error),
            Err(Failure { error, torn: true }) => {
                let error = to_job(&error);
                return Ok(members.into_iter().map(|member| (member.slot, Err(tear(member, &error)))).collect());
            }
        };
        self.cache.keep(slots);
        self.cache.count(come_in, missed);
        let rows: Vec<(JobSlot, u64)> = asks.iter().map(|ask| (ask.slot.job, ask.batch.rows() as u64)).collect();
        self.counters.count_pass(&rows, map.work(), (outcome.trunk_ns, outcome.above_ns));
        let firsts: BTreeMap<AdapterSlot, usize> = asks.iter().map(|ask| (ask.slot, ask.first)).collect();
        let settle = |(number, member): (usize, Member<'_, D>)| {
            let first = firsts.get(&member.slot).copied().unwrap_or(0);
            (member.slot, settle(member, first, map.losses_of(number, &outcome.losses)))
        };
        Ok(members.into_iter().enumerate().map(settle).collect())
    }

    /// Steps that [`check_step`] has passed, in one call of the device.
    fn optim_steps(&mut self, asks: &BTreeMap<AdapterSlot, &AdamW>) -> Answers<StepReport> {
        let count = asks.len();
        if count == 0 {
            return BTreeMap::new();
        }
        let mut stepping: Vec<(AdapterSlot, &AdamW, &mut Adapter<D>)> = Vec::with_capacity(count);
        for (slot, adapter) in &mut self.adapters {
            if let Some(optimiser) = asks.get(slot) {
                stepping.push((*slot, optimiser, adapter));
            }
        }
        let mut norms = vec![0.0; count];
        if (count * size_of::<f32>()) as u64 > self.device.free_bytes() {
            // A failure of the device shows at the step.
            drop(self.cache.release(&mut self.device));
        }
        let items = stepping.iter_mut().enumerate().map(|(index, (_, optimiser, adapter))| item(index, optimiser, adapter)).collect();
        if let Err(error) = adamw(&mut self.device, items, &mut norms) {
            let error = to_job(&error);
            return stepping.into_iter().map(|(slot, _, _)| (slot, Err(error.clone()))).collect();
        }
        stepping.into_iter().zip(norms).map(|((slot, _, adapter), norm)| (slot, report(adapter, norm))).collect()
    }
}

/// What each layer of a pass keeps.
fn plan_pass<D: Device>(
    device: &D,
    trunk: &Trunk<D>,
    map: &RowMap,
    members: &[Member<'_, D>],
    kept_bytes_max: u64,
) -> Result<Vec<Keep>, DeviceError> {
    let ranks = |layer, module| members.iter().filter_map(move |member| Some(member.adapter.sites.get(layer, module)?.rank));
    let free_bytes = device.free_bytes();
    let sizes = Sizes::of(&trunk.config, map, |layer, module| ranks(layer, module).max().unwrap_or(0));
    sizes.plan(kept_bytes_max, free_bytes).map_err(|needed_bytes| DeviceError::OutOfMemory { needed_bytes, free_bytes })
}

/// After a failure amid gradients: what the member has accumulated can no longer be trusted.
fn tear<D: Device>(member: Member<'_, D>, error: &EngineError) -> EngineError {
    if member.trains {
        member.adapter.poison = Some(error.clone());
    }
    error.clone()
}

/// Books a pass's losses on the member, or ends it.
fn settle<D: Device>(member: Member<'_, D>, first: usize, losses: impl IntoIterator<Item = f32>) -> Result<Vec<SequenceLoss>, EngineError> {
    let losses = sequence_losses(member.batch, first, losses).map_err(|what| match member.trains {
        true => member.adapter.poison(&what),
        false => member.adapter.poison_evaluated(&what),
    })?;
    if member.trains {
        losses.iter().for_each(|sequence| member.adapter.sums.add(sequence));
        member.adapter.count += 1;
    }
    Ok(losses)
}

/// Books a step on the adapter, or ends it.
fn report<D: Device>(adapter: &mut Adapter<D>, grad_norm: f32) -> Result<StepReport, EngineError> {
    if !grad_norm.is_finite() {
        return Err(adapter.poison(&format!("the gradient's norm is {grad_norm}, expected a finite number")));
    }
    adapter.steps += 1;
    let sums = std::mem::take(&mut adapter.sums);
    Ok(StepReport { step: adapter.steps, sums, loss: sums.mean(), grad_norm })
}

fn item<'a, D: Device>(norm_index: usize, optimiser: &AdamW, adapter: &'a mut Adapter<D>) -> AdamWItem<'a, D::Buffer> {
    let step = adapter.steps + 1;
    AdamWItem {
        divisor: divisor(optimiser.normalisation, &adapter.sums),
        params: &mut adapter.params,
        grads: &mut adapter.grads,
        moment1: &mut adapter.moment1,
        moment2: &mut adapter.moment2,
        max_grad_norm: optimiser.max_grad_norm,
        learning_rate: optimiser.learning_rate,
        beta1: optimiser.beta1,
        beta2: optimiser.beta2,
        eps: optimiser.eps,
        weight_decay: optimiser.weight_decay,
        step,
        norm_index,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the gradient that it divides is float32")]
fn divisor(normalisation: Normalisation, sums: &LossSums) -> f32 {
    match normalisation {
        Normalisation::WeightSum => sums.weight_sum as f32,
        Normalisation::Sequences => sums.sequences as f32,
        Normalisation::One => 1.0,
    }
}

fn adamw<D: Device>(device: &mut D, mut items: Vec<AdamWItem<'_, D::Buffer>>, norms: &mut [f32]) -> Result<(), DeviceError> {
    let mut buffer = device.alloc(Use::State, norms.len())?;
    device.adamw(&mut items, &mut buffer)?;
    device.download(&buffer, 0, norms)
}

/// Whether a step can be taken: on so many sequences, with weights of this sum.
fn check_step(optimiser: &AdamW, sequences: u64, weight_sum: f64) -> Result<(), EngineError> {
    optimiser.validate()?;
    if sequences == 0 {
        return Err(EngineError::invalid("nothing is accumulated since the last step, expected a forward-backward before it"));
    }
    if optimiser.normalisation == Normalisation::WeightSum && weight_sum <= 0.0 {
        return Err(EngineError::invalid("the weights accumulated since the last step sum to 0, expected at least one labelled row"));
    }
    Ok(())
}

fn check_batch(batch: &Batch, first: usize, config: &ModelConfig) -> Result<(), EngineError> {
    if batch.sequences.is_empty() {
        return Err(EngineError::invalid("the batch is empty, expected at least one sequence"));
    }
    for (number, sequence) in (first..).zip(&batch.sequences) {
        sequence.check(config).map_err(|error| EngineError::invalid(format!("sequence {number}: {error}")))?;
    }
    Ok(())
}
