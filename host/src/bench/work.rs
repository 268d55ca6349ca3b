//! The jobs of a measurement, the same in every arm: a function of few numbers, so that every process makes them for itself.
//!
//! Knows no arm.

use std::sync::Arc;

use nodus_kernels::philox;
use nodus_protocol::{
    AdamW, AdapterSlot, Batch, Command, Digest, EngineError, JobSlot, LayerSelection, LoraConfig, ModelConfig, Module, Normalisation,
    Sequence, TrunkSlot,
};
use serde::{Deserialize, Serialize};

/// What keys the counter-based generator here, beside the measurement's seed.
const TOKENS: u64 = 0x6265_6e63_6800;

/// Whether jobs have anything in common but the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    /// Members of one sweep: same data, same start, another learning rate each.
    Sweep,
    /// Strangers: other data, another seed and another rank each.
    Tenants,
}

/// All jobs of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Work {
    pub(super) kind: Kind,
    pub(super) model: String,
    pub(super) layers: LayerSelection,
    pub(super) jobs: u32,
    pub(super) sequences: usize,
    pub(super) length: usize,
    /// Positions of each sequence with a label, the last ones.
    pub(super) labelled: usize,
    pub(super) batches: u32,
    pub(super) epochs: u32,
    /// Steps before the clock starts, on data of their own; each batch is taken twice.
    pub(super) warmup: u32,
    pub(super) rank: u32,
    pub(super) seed: u64,
}

impl Work {
    /// Steps of a job that are measured.
    pub(super) fn steps(&self) -> u32 {
        self.batches * self.epochs
    }

    /// Positions that all jobs train on in their measured steps: the unit of work.
    pub(super) fn positions(&self) -> u64 {
        u64::from(self.jobs) * u64::from(self.steps()) * (self.sequences * self.length) as u64
    }

    /// The same of the steps before.
    pub(super) fn warmup_positions(&self) -> u64 {
        u64::from(self.jobs) * u64::from(self.warmup) * (self.sequences * self.length) as u64
    }

    /// A job's learning rate: of members of a sweep from 1e-4 up, each an eighth more than the one before.
    pub(super) fn learning_rate(&self, job: u32) -> f32 {
        match self.kind {
            Kind::Sweep => 1e-4 * 1.125_f32.powi(i32::try_from(job).unwrap_or(i32::MAX)),
            Kind::Tenants => 1e-4,
        }
    }

    /// A job's rank: of strangers the whole, half and a quarter of what was asked for in turn.
    pub(super) fn rank(&self, job: u32) -> u32 {
        match self.kind {
            Kind::Sweep => self.rank,
            Kind::Tenants => (self.rank >> (job % 3)).max(1),
        }
    }

    /// What a job's adapter starts from.
    pub(super) fn adapter_seed(&self, job: u32) -> u64 {
        self.seed.wrapping_add(u64::from(self.owner(job)))
    }

    /// Whose data, start and cohort a job has: members of a sweep share one's, a stranger has its own. So has the job in the foreground,
    /// whose number comes after all others.
    fn owner(&self, job: u32) -> u32 {
        if self.kind == Kind::Sweep && job < self.jobs { 0 } else { job }
    }

    /// The job's adapter; `shares` where it may use what others of its sweep, or itself before, have computed.
    pub(super) fn create(&self, job: u32, trunk: TrunkSlot, shares: bool) -> Command {
        let config = LoraConfig {
            rank: self.rank(job),
            alpha: 2.0 * f32::from(u16::try_from(self.rank(job)).unwrap_or(u16::MAX)),
            rslora: false,
            dropout: 0.0,
            targets: Module::ALL.into(),
            layers: self.layers.clone(),
            overrides: Vec::new(),
        };
        let cohort = u64::from(self.owner(job));
        Command::CreateAdapter { slot: slot(job), trunk, config, seed: self.adapter_seed(job), cohort: shares.then_some(cohort) }
    }

    /// A job's step, counted from the first that is not measured.
    ///
    /// # Errors
    /// The batch does not fit the model.
    pub(super) fn step(&self, model: &ModelConfig, job: u32, step: u32) -> Result<Command, EngineError> {
        let optimiser = AdamW {
            learning_rate: self.learning_rate(job),
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: None,
            normalisation: Normalisation::WeightSum,
        };
        Ok(Command::TrainStep { slot: slot(job), batch: self.batch(model, job, self.batch_of(step))?, optimiser })
    }

    /// The number of a step's batch: those of warm-up come after all that are measured.
    fn batch_of(&self, step: u32) -> u32 {
        if step < self.warmup { self.batches + step / 2 } else { (step - self.warmup) % self.batches }
    }

    fn batch(&self, model: &ModelConfig, job: u32, number: u32) -> Result<Batch, EngineError> {
        let owner = self.owner(job);
        let vocabulary = u32::try_from(model.vocab_size).unwrap_or(u32::MAX);
        let sequence = |sequence: u32| {
            let token = |position: u32| {
                let [word, ..] = philox(TOKENS ^ self.seed, [position, sequence, owner, number]);
                word % vocabulary
            };
            let tokens: Vec<u32> = (0..=u32::try_from(self.length).unwrap_or(u32::MAX)).map(token).collect();
            let weights = (0..self.length).map(|i| if i + self.labelled < self.length { 0.0 } else { 1.0 }).collect();
            let (inputs, targets) = (tokens.iter().take(self.length).copied().collect(), tokens.iter().skip(1).copied().collect());
            Sequence::new(model, inputs, targets, weights).map(Arc::new)
        };
        let sequences = (0..u32::try_from(self.sequences).unwrap_or(u32::MAX)).map(sequence).collect::<Result<_, _>>()?;
        Ok(Batch { sequences })
    }

    /// Digest of what a job is measured on, in order.
    ///
    /// # Errors
    /// A batch does not fit the model.
    pub(super) fn data_digest(&self, model: &ModelConfig, job: u32) -> Result<Digest, EngineError> {
        let mut bytes = Vec::new();
        for number in 0..self.batches {
            for sequence in self.batch(model, job, number)?.sequences {
                sequence.tokens().iter().for_each(|token| bytes.extend(token.to_le_bytes()));
                sequence.weights().iter().for_each(|weight| bytes.extend(weight.to_le_bytes()));
            }
        }
        Ok(Digest::of(&bytes))
    }

    /// As tables call it.
    pub(super) fn title(&self) -> String {
        let layers = match &self.layers {
            LayerSelection::Last(last) => format!("top {last}"),
            _ => "all layers".to_owned(),
        };
        let what = match self.kind {
            Kind::Sweep => "members of a sweep",
            Kind::Tenants => "unrelated tenants",
        };
        let labels = if self.labelled == self.length { "all labelled".to_owned() } else { format!("{} labelled", self.labelled) };
        let epochs = if self.epochs == 1 { "one epoch".to_owned() } else { format!("{} epochs", self.epochs) };
        let Self { jobs, model, sequences, length, batches, .. } = self;
        format!("{jobs} {what}, {model}, {layers}, {sequences}x{length} ({labels}), {batches} batches, {epochs}")
    }
}

/// A job's only adapter.
pub(super) fn slot(job: u32) -> AdapterSlot {
    AdapterSlot { job: JobSlot(job), index: 0 }
}
