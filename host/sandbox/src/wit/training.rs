//! `nodus:gpu/training`: the guest's calls become commands to the engine. Computes nothing itself.

use std::sync::Arc;

use nodus_protocol::{AdamW, Batch, Command, LoraConfig, Reply, Sequence};
use wasmtime::component::Resource;

use super::handles::{AdapterHandle, BatchHandle, PendingCall, PendingLoss, PendingStep, TrunkHandle};
use super::{Fault, convert, parse_digest};
use crate::adapters::{Accumulated, Adapter, Answer, Kind, device_bytes, parameters};
use crate::bindings::nodus::gpu::training as guest;
use crate::bindings::nodus::gpu::types::Error;
use crate::charge::Charge;
use crate::limits::{ARTIFACT_NAME_BYTES_MAX, EVALUATION_ROW_ALIGN, EVALUATION_ROWS_MAX};
use crate::services::{Event, Trunk};
use crate::state::State;

impl guest::Host for State {}

impl guest::HostPendingLoss for State {
    async fn wait(&mut self, pending: Resource<PendingLoss>) -> Result<guest::LossSums, Fault> {
        let PendingCall { adapter, call } = self.table.get(&pending)?.0;
        match self.wait_for(adapter, call).await? {
            Answer::Loss(sums) => Ok(convert::loss_sums(&sums)),
            Answer::Step(_) => Err(Fault::internal("a loss was answered by a step".into())),
            Answer::LeftOff => Err(Fault::Guest(Error::Cancelled)),
        }
    }

    fn drop(&mut self, pending: Resource<PendingLoss>) -> wasmtime::Result<()> {
        let PendingCall { adapter, call } = self.table.delete(pending)?.0;
        self.adapters.forget(adapter, call);
        Ok(())
    }
}

impl guest::HostPendingStep for State {
    async fn wait(&mut self, pending: Resource<PendingStep>) -> Result<guest::StepReport, Fault> {
        let PendingCall { adapter, call } = self.table.get(&pending)?.0;
        match self.wait_for(adapter, call).await? {
            Answer::Step(report) => Ok(convert::step_report(&report)),
            Answer::Loss(_) | Answer::LeftOff => Err(Fault::internal("a step was answered by a loss".into())),
        }
    }

    fn drop(&mut self, pending: Resource<PendingStep>) -> wasmtime::Result<()> {
        let PendingCall { adapter, call } = self.table.delete(pending)?.0;
        self.adapters.forget(adapter, call);
        Ok(())
    }
}

impl guest::HostAdapter for State {
    async fn create(&mut self, trunk: Resource<TrunkHandle>, config: guest::LoraConfig) -> Result<Resource<AdapterHandle>, Fault> {
        let trunk = self.table.get(&trunk)?.0.clone();
        let config = convert::lora_config(config, &trunk.config)?;
        let command = Command::CreateAdapter {
            slot: self.adapters.next_slot(),
            trunk: trunk.slot,
            config: config.clone(),
            seed: self.seed,
            cohort: self.adapters.cohort,
        };
        self.add_adapter(trunk, config, command).await
    }

    async fn load(&mut self, trunk: Resource<TrunkHandle>, artifact: String) -> Result<Resource<AdapterHandle>, Fault> {
        let trunk = self.table.get(&trunk)?.0.clone();
        let weights = self.services.load_artifact(&trunk, parse_digest(&artifact)?).await?;
        self.meter.answered();
        let config = weights.config.clone();
        config.validate(&trunk.config)?;
        let command = Command::LoadAdapter {
            slot: self.adapters.next_slot(),
            trunk: trunk.slot,
            weights,
            seed: self.seed,
            cohort: self.adapters.cohort,
        };
        self.add_adapter(trunk, config, command).await
    }

    fn config(&mut self, adapter: Resource<AdapterHandle>) -> wasmtime::Result<guest::LoraConfig> {
        let index = self.table.get(&adapter)?.index;
        let adapter = self.adapters.get(index).map_err(Fault::into_stop)?;
        Ok(convert::guest_lora_config(&adapter.config))
    }

    async fn forward_backward(
        &mut self,
        adapter: Resource<AdapterHandle>,
        batch: Resource<BatchHandle>,
    ) -> Result<Resource<PendingLoss>, Fault> {
        let adapter = self.table.get(&adapter)?.index;
        let (batch, gain, charge) = self.training_batch(adapter, &batch)?;
        let slot = self.adapters.get(adapter)?.slot;
        let commands = vec![Command::ForwardBackward { slot, batch }];
        let pending = self.call(adapter, Kind::ForwardBackward, commands, Some(charge), PendingLoss).await?;
        let accumulated = &mut self.adapters.get_mut(adapter)?.accumulated;
        *accumulated = accumulated.map(|accumulated| accumulated.plus(gain));
        Ok(pending)
    }

    async fn optim_step(&mut self, adapter: Resource<AdapterHandle>, optimiser: guest::Adamw) -> Result<Resource<PendingStep>, Fault> {
        let adapter = self.table.get(&adapter)?.index;
        let optimiser = convert::adamw(optimiser)?;
        let known = usable(self.adapters.get(adapter)?)?;
        if known.accumulated.is_some_and(|accumulated| accumulated.sequences == 0) {
            return Err(Fault::invalid("nothing is accumulated, expected a forward-backward before optim-step"));
        }
        known.accumulated.map_or(Ok(()), check_weights)?;
        let command = Command::OptimStep { slot: known.slot, optimiser };
        self.step(adapter, optimiser, command, None).await
    }

    async fn train_step(
        &mut self,
        adapter: Resource<AdapterHandle>,
        batch: Resource<BatchHandle>,
        optimiser: guest::Adamw,
    ) -> Result<Resource<PendingStep>, Fault> {
        let adapter = self.table.get(&adapter)?.index;
        let optimiser = convert::adamw(optimiser)?;
        let (batch, gain, charge) = self.training_batch(adapter, &batch)?;
        let known = self.adapters.get(adapter)?;
        known.accumulated.map_or(Ok(()), |accumulated| check_weights(accumulated.plus(gain)))?;
        let command = Command::TrainStep { slot: known.slot, batch, optimiser };
        self.step(adapter, optimiser, command, Some(charge)).await
    }

    async fn evaluate(&mut self, adapter: Resource<AdapterHandle>, batch: Resource<BatchHandle>) -> Result<Resource<PendingLoss>, Fault> {
        let adapter = self.table.get(&adapter)?.index;
        let batch = self.table.get(&batch)?;
        let slot = usable_with(self.adapters.get(adapter)?, batch)?.slot;
        if batch.labelled == 0 {
            return Err(Fault::invalid("the batch has no row with a weight above 0, expected at least one: it has no loss"));
        }
        let evaluations = self.counts.evaluations.saturating_add(1);
        if evaluations > self.limits.evaluations {
            return Err(Fault::quota("evaluations", evaluations, self.limits.evaluations));
        }
        let (charge, data) = (batch.charge.clone(), batch.source);
        let pieces = split(&batch.batch.sequences, self.limits.batch_tokens.min(EVALUATION_ROWS_MAX));
        let mut first = 0;
        let piece = |sequences: Vec<Arc<Sequence>>| {
            let begin = first;
            first += sequences.len();
            Command::Evaluate { slot, batch: Batch { sequences }, first: begin }
        };
        let commands = pieces.into_iter().map(piece).collect();
        self.counts.evaluations = evaluations;
        self.call(adapter, Kind::Evaluate { data }, commands, Some(charge), PendingLoss).await
    }

    async fn save(&mut self, adapter: Resource<AdapterHandle>, name: String) -> Result<String, Fault> {
        check_name(&name)?;
        let index = self.table.get(&adapter)?.index;
        self.settle(index).await?;
        let adapter = usable(self.adapters.get(index)?)?;
        let (slot, step, trunk) = (adapter.slot, adapter.steps, adapter.trunk.clone());
        let bytes = adapter.parameters.saturating_mul(size_of::<f32>() as u64);
        self.check_artifact(&name, bytes)?;
        let reply = trunk.engine.call(Command::Export { slot }).await;
        self.meter.answered();
        let Reply::Weights(weights) = reply? else {
            return Err(Fault::internal("an export was answered by something else".into()));
        };
        let digest = self.services.save_artifact(&trunk, &name, &weights).await?;
        self.counts.artifacts.insert(name.clone(), bytes);
        self.tell(Event::Saved { adapter: index, step, name, digest });
        Ok(digest.to_string())
    }

    async fn drop(&mut self, adapter: Resource<AdapterHandle>) -> wasmtime::Result<()> {
        let index = self.table.delete(adapter)?.index;
        self.drop_adapter(index).await.map_err(Fault::into_stop)
    }
}

impl State {
    /// Has the engine make an adapter, within the job's limits.
    async fn add_adapter(&mut self, trunk: Trunk, config: LoraConfig, command: Command) -> Result<Resource<AdapterHandle>, Fault> {
        let needed = self.adapters.alive() + 1;
        if needed > self.limits.adapters {
            return Err(Fault::quota("adapters", needed, self.limits.adapters));
        }
        let needed = u64::from(self.adapters.next_slot().index) + 1;
        if needed > self.limits.adapters_made {
            return Err(Fault::quota("adapters-made", needed, self.limits.adapters_made));
        }
        let needed = self.adapters.device_bytes().saturating_add(device_bytes(parameters(&config, &trunk.config)));
        if needed > self.limits.device_bytes {
            return Err(Fault::quota("device-bytes", needed, self.limits.device_bytes));
        }
        // The handle first: without one the adapter would be out of reach.
        let handle = self.push(AdapterHandle { index: self.adapters.next_slot().index })?;
        self.adapters.will_use(&trunk.engine);
        let reply = trunk.engine.call(command).await;
        self.meter.answered();
        if let Err(error) = reply {
            self.table.delete(handle)?;
            return Err(error.into());
        }
        self.adapters.add(trunk, config);
        Ok(handle)
    }

    /// The batch to train on, and what it adds to what is accumulated.
    fn training_batch(&self, adapter: u32, batch: &Resource<BatchHandle>) -> Result<(Batch, Accumulated, Arc<Charge>), Fault> {
        let batch = self.table.get(batch)?;
        usable_with(self.adapters.get(adapter)?, batch)?;
        if batch.rows > self.limits.batch_tokens {
            return Err(Fault::quota("batch-tokens", batch.rows, self.limits.batch_tokens));
        }
        let gain = Accumulated { sequences: batch.batch.sequences.len() as u64, labelled: batch.labelled };
        Ok((batch.batch.clone(), gain, batch.charge.clone()))
    }

    async fn step(
        &mut self,
        adapter: u32,
        optimiser: AdamW,
        command: Command,
        charge: Option<Arc<Charge>>,
    ) -> Result<Resource<PendingStep>, Fault> {
        let kind = Kind::Step { learning_rate: optimiser.learning_rate };
        let pending = self.call(adapter, kind, vec![command], charge, PendingStep).await?;
        let accumulated = &mut self.adapters.get_mut(adapter)?.accumulated;
        *accumulated = accumulated.map(|_| Accumulated::default());
        Ok(pending)
    }

    /// Sends a call and gives the guest a handle for its answer.
    async fn call<T: Send + 'static>(
        &mut self,
        adapter: u32,
        kind: Kind,
        commands: Vec<Command>,
        charge: Option<Arc<Charge>>,
        handle: fn(PendingCall) -> T,
    ) -> Result<Resource<T>, Fault> {
        // The handle first: a call that was refused must have no effect.
        let reserved = self.push(())?;
        let call = self.submit(adapter, kind, commands, charge).await;
        self.table.delete(reserved)?;
        self.push(handle(PendingCall { adapter, call: call? }))
    }

    fn check_artifact(&self, name: &str, bytes: u64) -> Result<(), Fault> {
        let saved = &self.counts.artifacts;
        let names = saved.len() as u64 + u64::from(!saved.contains_key(name));
        if names > self.limits.artifacts {
            return Err(Fault::quota("artifacts", names, self.limits.artifacts));
        }
        let others = saved.iter().filter(|(other, _)| *other != name).map(|(_, bytes)| bytes).sum::<u64>();
        let needed = others.saturating_add(bytes);
        if needed > self.limits.artifact_bytes {
            return Err(Fault::quota("artifact-bytes", needed, self.limits.artifact_bytes));
        }
        Ok(())
    }
}

impl Accumulated {
    fn plus(self, gain: Self) -> Self {
        Self { sequences: self.sequences + gain.sequences, labelled: self.labelled + gain.labelled }
    }
}

fn usable(adapter: &Adapter) -> Result<&Adapter, Fault> {
    match &adapter.poison {
        Some(text) => Err(Fault::Guest(Error::NonFinite(text.clone()))),
        None => Ok(adapter),
    }
}

fn usable_with<'a>(adapter: &'a Adapter, batch: &BatchHandle) -> Result<&'a Adapter, Fault> {
    if adapter.trunk.digest != batch.trunk {
        return Err(Fault::invalid("the batch was made for another trunk than the adapter's"));
    }
    usable(adapter)
}

fn check_weights(accumulated: Accumulated) -> Result<(), Fault> {
    if accumulated.labelled > 0 {
        return Ok(());
    }
    Err(Fault::invalid("the weights of all rows since the last step sum to zero, expected at least one above 0"))
}

fn check_name(name: &str) -> Result<(), Fault> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if (1..=ARTIFACT_NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(good) && !name.starts_with('.') {
        return Ok(());
    }
    let shown: String = name.chars().take(ARTIFACT_NAME_BYTES_MAX).collect();
    Err(Fault::invalid(format!(
        "name is {shown:?}, expected 1 to {ARTIFACT_NAME_BYTES_MAX} letters, digits, `-`, `_` or `.`, not beginning with `.`"
    )))
}

/// Pieces of whole sequences, each of at most so many rows as a device may place them, or of one sequence.
fn split(sequences: &[Arc<Sequence>], rows_max: u64) -> Vec<Vec<Arc<Sequence>>> {
    let mut pieces: Vec<Vec<Arc<Sequence>>> = Vec::new();
    let mut rows = 0;
    for sequence in sequences {
        let more = (sequence.rows() as u64).next_multiple_of(EVALUATION_ROW_ALIGN);
        match pieces.last_mut() {
            Some(piece) if rows + more <= rows_max => {
                rows += more;
                piece.push(sequence.clone());
            }
            _ => {
                rows = more;
                pieces.push(vec![sequence.clone()]);
            }
        }
    }
    pieces
}
