//! Passes and optimiser steps, from commands to replies.
//!
//! Never lets one member's failure reach another: each is checked before the pass, and settled after it, alone.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use nodus_kernels::{AdamWItem, Device, DeviceError, Use};
use nodus_protocol::{
    AdamW, AdapterSlot, Batch, Command, EngineError, LossSums, ModelConfig, Normalisation, Reply, SequenceLoss, StepReport, TrunkSlot,
};

use crate::adapter::Adapter;
use crate::engine::{Engine, no_adapter};
use crate::error::to_job;
use crate::pass::{Failure, Member, Pass, memory, sequence_losses};
use crate::rows::{RowMap, order};

/// What a command asks of a pass.
#[derive(Clone, Copy)]
struct Ask<'c> {
    slot: AdapterSlot,
    batch: &'c Batch,
    trains: bool,
    optimiser: Option<&'c AdamW>,
}

impl<'c> Ask<'c> {
    fn of(command: &'c Command) -> Option<Self> {
        match command {
            Command::ForwardBackward { slot, batch } => Some(Self { slot: *slot, batch, trains: true, optimiser: None }),
            Command::TrainStep { slot, batch, optimiser } => Some(Self { slot: *slot, batch, trains: true, optimiser: Some(optimiser) }),
            Command::Evaluate { slot, batch } => Some(Self { slot: *slot, batch, trains: false, optimiser: None }),
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
        let mut losses = self.losses(trunk, &good);
        let sound = |ask: &&Ask<'_>| losses.get(&ask.slot).is_some_and(Result::is_ok);
        let stepping = good.iter().filter(sound).filter_map(|ask| Some((ask.slot, ask.optimiser?))).collect();
        let mut steps = self.optim_steps(&stepping);
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
            check_batch(ask.batch, &trunk.config)?;
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

    /// Losses of each ask; those that train have their gradients added to. Where memory lacks for all in one pass each runs alone, so that
    /// only one that is too large by itself is refused.
    fn losses(&mut self, trunk: TrunkSlot, asks: &[Ask<'_>]) -> Answers<Vec<SequenceLoss>> {
        match self.run(trunk, asks) {
            Ok(losses) => losses,
            Err(DeviceError::OutOfMemory { needed_bytes, free_bytes }) if asks.len() > 1 => {
                tracing::debug!(needed_bytes, free_bytes, members = asks.len(), "no room for all in one pass; each runs alone");
                asks.iter().flat_map(|ask| self.losses(trunk, std::slice::from_ref(ask))).collect()
            }
            Err(error) => asks.iter().map(|ask| (ask.slot, Err(to_job(&error)))).collect(),
        }
    }

    /// One pass. An error means that it had no effect.
    fn run(&mut self, trunk: TrunkSlot, asks: &[Ask<'_>]) -> Result<Answers<Vec<SequenceLoss>>, DeviceError> {
        let Some(trunk) = self.trunks.get(trunk.0 as usize) else { return Ok(BTreeMap::new()) };
        let mut members: Vec<Member<'_, D>> = Vec::with_capacity(asks.len());
        let by_slot: BTreeMap<AdapterSlot, &Ask<'_>> = asks.iter().map(|ask| (ask.slot, ask)).collect();
        for (slot, adapter) in &mut self.adapters {
            if let Some(ask) = by_slot.get(slot) {
                members.push(Member { slot: *slot, cut: adapter.sites.cut, adapter, batch: ask.batch, trains: ask.trains });
            }
        }
        members.sort_by_key(|member| order(member.trains, member.cut));

        let sources: Vec<_> = members.iter().map(Member::source).collect();
        let map = RowMap::new(&sources, 2 * trunk.config.num_hidden_layers, self.device.row_align());
        drop(sources);
        let values = match run_pass(&mut self.device, trunk, &map, &mut members, self.options.kept_bytes_max) {
            Ok(values) => values,
            Err(Failure { error, torn: false }) => return Err(error),
            Err(Failure { error, torn: true }) => {
                let error = to_job(&error);
                let poison = |member: Member<'_, D>| {
                    if member.trains {
                        member.adapter.poison = Some(error.clone());
                    }
                    (member.slot, Err(error.clone()))
                };
                return Ok(members.into_iter().map(poison).collect());
            }
        };

        let (computed, spared) = map.work();
        self.counters.passes.fetch_add(1, Relaxed);
        self.counters.rows.fetch_add(asks.iter().map(|ask| ask.batch.rows() as u64).sum(), Relaxed);
        self.counters.row_halves.fetch_add(computed, Relaxed);
        self.counters.row_halves_spared.fetch_add(spared, Relaxed);
        let settle = |(number, member): (usize, Member<'_, D>)| (member.slot, settle(member, map.losses_of(number, &values)));
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
        let items = stepping.iter_mut().enumerate().map(|(index, (_, optimiser, adapter))| item(index, optimiser, adapter)).collect();
        if let Err(error) = adamw(&mut self.device, items, &mut norms) {
            let error = to_job(&error);
            return stepping.into_iter().map(|(slot, _, _)| (slot, Err(error.clone()))).collect();
        }
        stepping.into_iter().zip(norms).map(|((slot, _, adapter), norm)| (slot, report(adapter, norm))).collect()
    }
}

/// Plans and runs a pass; one without labelled rows does nothing.
fn run_pass<D: Device>(
    device: &mut D,
    trunk: &crate::trunk::Trunk<D>,
    map: &RowMap,
    members: &mut [Member<'_, D>],
    kept_bytes_max: u64,
) -> Result<Vec<f32>, Failure> {
    if map.tokens.is_empty() {
        return Ok(Vec::new());
    }
    let rank = |layer, module| members.iter().filter_map(|member| member.adapter.sites.get(layer, module)).map(|site| site.rank).max();
    let free_bytes = device.free_bytes();
    let keep = memory::plan(&trunk.config, map, |layer, module| rank(layer, module).unwrap_or(0), kept_bytes_max, free_bytes);
    let keep = keep.map_err(|needed_bytes| Failure { error: DeviceError::OutOfMemory { needed_bytes, free_bytes }, torn: false })?;
    Pass::new(device, trunk, map, members).run(&keep)
}

/// Books a pass's losses on the member, or ends it.
fn settle<D: Device>(member: Member<'_, D>, losses: impl IntoIterator<Item = f32>) -> Result<Vec<SequenceLoss>, EngineError> {
    let losses = sequence_losses(member.batch, losses).map_err(|what| member.adapter.poison(&what))?;
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

fn check_batch(batch: &Batch, config: &ModelConfig) -> Result<(), EngineError> {
    if batch.sequences.is_empty() {
        return Err(EngineError::invalid("the batch is empty, expected at least one sequence"));
    }
    for (number, sequence) in batch.sequences.iter().enumerate() {
        sequence.check(config).map_err(|error| EngineError::invalid(format!("sequence {number}: {error}")))?;
    }
    Ok(())
}
