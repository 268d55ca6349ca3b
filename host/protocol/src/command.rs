//! Commands to an engine and its replies.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{AdamW, AdapterWeights, Batch, JobState, LoraConfig};

/// A trunk that the engine holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TrunkSlot(pub u32);

/// A job, as the engine knows it: a number that its client chose, never a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct JobSlot(pub u32);

/// An adapter, numbered by its client within the job: the n-th that the job created or loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AdapterSlot {
    /// Whose.
    pub job: JobSlot,
    /// Which of the job's, from 0 in the order of creation.
    pub index: u32,
}

/// What an engine can be asked. Commands that name one adapter are carried out in the order they were sent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// A fresh adapter. Its start is a function of seed, `slot.index`, module and configuration alone. Answers `Done`.
    CreateAdapter {
        /// The slot to fill; it must be free.
        slot: AdapterSlot,
        /// On which trunk.
        trunk: TrunkSlot,
        /// Its shape; already validated by the client, checked again by the engine.
        config: LoraConfig,
        /// The job's seed.
        seed: u64,
        /// Jobs that name the same cohort may share trunk activations for equal batches. None shares nothing.
        cohort: Option<u64>,
    },
    /// An adapter with these weights, and a new optimiser state. Answers `Done`.
    LoadAdapter {
        /// The slot to fill; it must be free.
        slot: AdapterSlot,
        /// On which trunk.
        trunk: TrunkSlot,
        /// Configuration and weights.
        weights: Arc<AdapterWeights>,
        /// The job's seed (dropout draws from it).
        seed: u64,
        /// As in `CreateAdapter`.
        cohort: Option<u64>,
    },
    /// Adds a batch's gradient to what is accumulated. Answers `Loss`.
    ForwardBackward {
        /// Whose gradient.
        slot: AdapterSlot,
        /// On what.
        batch: Batch,
    },
    /// One AdamW step on what is accumulated. Answers `Step`.
    OptimStep {
        /// Whose step.
        slot: AdapterSlot,
        /// How.
        optimiser: AdamW,
    },
    /// `ForwardBackward`, then `OptimStep`. Answers `Step`.
    TrainStep {
        /// Whose step.
        slot: AdapterSlot,
        /// On what.
        batch: Batch,
        /// How.
        optimiser: AdamW,
    },
    /// A batch's loss without dropout, without any effect. Answers `Loss`.
    Evaluate {
        /// By which adapter.
        slot: AdapterSlot,
        /// On what.
        batch: Batch,
        /// The number of its first sequence, where it is a piece of a larger batch: errors count from there.
        first: usize,
    },
    /// The weights. Answers `Weights`.
    Export {
        /// Whose.
        slot: AdapterSlot,
    },
    /// Gives the adapter's memory back, zeroed. Answers `Done`. Calls still pending on it are carried out first.
    DropAdapter {
        /// Which.
        slot: AdapterSlot,
    },
    /// Reserves device memory for a job, in place of what was reserved for it: from here on its adapters and the activations of its batches
    /// must lie within these bounds, whatever other jobs hold. `QuotaExceeded`, with the numbers, where there is not as much beside what is
    /// reserved for others. Ends with `DropJob`. Answers `Done`.
    Reserve {
        /// For which.
        job: JobSlot,
        /// For weights, gradients and moments of all its adapters.
        adapter_bytes: u64,
        /// For the activations of its largest batch.
        activation_bytes: u64,
    },
    /// Everything that the engine holds of a job. Its client has no other command under way, else what is in it and what is not is left to
    /// chance. Answers `State`.
    Snapshot {
        /// Which.
        job: JobSlot,
    },
    /// Puts back what a `Snapshot` answered, of a job that holds nothing: what follows is as if nothing had come between. Answers `Done`.
    Restore {
        /// For which.
        job: JobSlot,
        /// On which trunk all its adapters are.
        trunk: TrunkSlot,
        /// As in `CreateAdapter`, for all of them.
        cohort: Option<u64>,
        /// What it held.
        state: Arc<JobState>,
    },
    /// Lets a job's passes go before those of others, without others in them; until `DropJob`. Answers `Done`.
    Prioritise {
        /// Which.
        job: JobSlot,
    },
    /// Gives up everything of a job: pending commands are answered `cancelled`-like (`DeviceLost` is never used for it) by
    /// dropping their reply, memory is given back, zeroed. Answers `Done`.
    DropJob {
        /// Which.
        job: JobSlot,
    },
    /// Has the engine's buffers take no more than so many bytes from now on; what it keeps beyond them, and nobody holds, is given back. The host's
    /// own, and of no job. Answers `Done`.
    Bound {
        /// Of all buffers: all but the weights.
        bytes: u64,
    },
}

/// The loss of one sequence; sums over its rows in order.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequenceLoss {
    /// Sum of weight times cross-entropy, in nats.
    pub loss_sum: f64,
    /// Sum of weights.
    pub weight_sum: f64,
    /// Rows with a weight above 0.
    pub labelled: u64,
}

/// Sums over sequences, added one by one in their order, so that any split of the work gives equal bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossSums {
    /// Sum of weight times cross-entropy, in nats.
    pub loss_sum: f64,
    /// Sum of weights.
    pub weight_sum: f64,
    /// Rows with a weight above 0.
    pub labelled: u64,
    /// Number of sequences.
    pub sequences: u64,
}

impl LossSums {
    /// Adds one more sequence.
    pub fn add(&mut self, sequence: &SequenceLoss) {
        self.loss_sum += sequence.loss_sum;
        self.weight_sum += sequence.weight_sum;
        self.labelled += sequence.labelled;
        self.sequences += 1;
    }

    /// Weighted mean loss, rounded to float32. NaN when the weights sum to zero.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the float32 is what is recorded and compared")]
    pub fn mean(&self) -> f32 {
        (self.loss_sum / self.weight_sum) as f32
    }
}

/// What an optimiser step did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// The adapter's step count after this step.
    pub step: u64,
    /// Sums since the step before.
    pub sums: LossSums,
    /// `sums.mean()`.
    pub loss: f32,
    /// Norm of the whole gradient after normalisation, before clipping.
    pub grad_norm: f32,
}

/// An engine's answer; which case belongs to which command is said at the command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// It is done.
    Done,
    /// The loss of each sequence of the batch, in order.
    Loss(Vec<SequenceLoss>),
    /// A step was taken.
    Step(StepReport),
    /// The weights.
    Weights(Box<AdapterWeights>),
    /// All that is held of a job.
    State(Box<JobState>),
}
