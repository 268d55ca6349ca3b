//! A job's own LoRA weights on the device: create or load, train, evaluate, save.
//!
//! Never moves weights or activations into the guest.

use crate::bindings::training::{self, Adamw, LoraConfig, LossSums, StepReport};
use crate::{Batch, Result, Trunk};

/// An adapter with its gradient and optimiser state.
///
/// Plain methods wait for their answer. The `start_` ones return at once with a pending answer, so that several adapters, or
/// several calls of one, are in flight together; calls of one adapter are carried out in the order they were made. One made behind a long
/// evaluation waits for it, as does one more than `calls-in-flight`.
#[derive(Debug)]
pub struct Adapter {
    handle: training::Adapter,
}

impl Adapter {
    /// A fresh adapter: A uniform in +-1/sqrt(in), B zero, so that it begins as the plain trunk. Its start depends on the job's
    /// seed and on how many adapters the job created before.
    ///
    /// # Errors
    /// `InvalidArgument` names the field; `QuotaExceeded` for `adapters` or `device-bytes`.
    pub fn create(trunk: &Trunk, config: &LoraConfig) -> Result<Self> {
        Ok(Self { handle: training::Adapter::create(trunk.handle(), config)? })
    }

    /// An adapter that was saved before, by this job or as one of its inputs, by its digest (`sha256:...`): weights and
    /// configuration, with a new optimiser state.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` where it does not fit the trunk; `QuotaExceeded`.
    pub fn load(trunk: &Trunk, digest: &str) -> Result<Self> {
        Ok(Self { handle: training::Adapter::load(trunk.handle(), digest)? })
    }

    /// The configuration it was created or loaded with.
    #[must_use]
    pub fn config(&self) -> LoraConfig {
        self.handle.config()
    }

    /// Adds the gradient of this batch to what is accumulated, and answers the batch's loss. Dropout is on.
    ///
    /// # Errors
    /// `QuotaExceeded` for `batch-tokens` or `activation-bytes`; `InvalidArgument` for a batch of another trunk; `NonFinite`.
    pub fn forward_backward(&self, batch: &Batch) -> Result<LossSums> {
        self.start_forward_backward(batch)?.wait()
    }

    /// One AdamW step on what is accumulated; clears it.
    ///
    /// # Errors
    /// `InvalidArgument` names the field, or says that nothing with a weight is accumulated; `NonFinite`.
    pub fn optim_step(&self, optimiser: &Adamw) -> Result<StepReport> {
        self.start_optim_step(optimiser)?.wait()
    }

    /// [`Adapter::forward_backward`] and [`Adapter::optim_step`] in one call.
    ///
    /// # Errors
    /// Those of both.
    pub fn train_step(&self, batch: &Batch, optimiser: &Adamw) -> Result<StepReport> {
        self.start_train_step(batch, optimiser)?.wait()
    }

    /// The loss of a batch of any size, without dropout and without any effect. Each call counts as one evaluation of the job.
    ///
    /// # Errors
    /// `InvalidArgument` for a batch of another trunk or without a weight; `QuotaExceeded` for `activation-bytes`; `NonFinite`; `Cancelled`
    /// where the job is asked to stop before a long one is through.
    pub fn evaluate(&self, batch: &Batch) -> Result<LossSums> {
        self.start_evaluate(batch)?.wait()
    }

    /// As [`Adapter::forward_backward`], without waiting.
    ///
    /// # Errors
    /// As there, as far as they are known at once.
    pub fn start_forward_backward(&self, batch: &Batch) -> Result<PendingLoss> {
        Ok(PendingLoss(self.handle.forward_backward(batch.handle())?))
    }

    /// As [`Adapter::optim_step`], without waiting.
    ///
    /// # Errors
    /// As there, as far as they are known at once.
    pub fn start_optim_step(&self, optimiser: &Adamw) -> Result<PendingStep> {
        Ok(PendingStep(self.handle.optim_step(*optimiser)?))
    }

    /// As [`Adapter::train_step`], without waiting.
    ///
    /// # Errors
    /// As there, as far as they are known at once.
    pub fn start_train_step(&self, batch: &Batch, optimiser: &Adamw) -> Result<PendingStep> {
        Ok(PendingStep(self.handle.train_step(batch.handle(), *optimiser)?))
    }

    /// As [`Adapter::evaluate`], without waiting.
    ///
    /// # Errors
    /// As there, as far as they are known at once.
    pub fn start_evaluate(&self, batch: &Batch) -> Result<PendingLoss> {
        Ok(PendingLoss(self.handle.evaluate(batch.handle())?))
    }

    /// Writes the weights as a PEFT adapter under this name (letters, digits, `-`, `_`, `.`; beginning with a letter, a digit or `_`; at
    /// most 64), in place of an earlier one, and answers its digest. The one named `adapter` is the job's result.
    ///
    /// # Errors
    /// `InvalidArgument` for the name; `NonFinite`; `QuotaExceeded` for `artifact-bytes` or `artifacts`.
    pub fn save(&self, name: &str) -> Result<String> {
        Ok(self.handle.save(name)?)
    }
}

/// A loss on its way. Dropping it does not take the call back.
#[derive(Debug)]
#[must_use = "the call goes on, but nobody would see its error"]
pub struct PendingLoss(training::PendingLoss);

impl PendingLoss {
    /// Waits for the loss.
    ///
    /// # Errors
    /// What the call met on the device: `NonFinite`, `QuotaExceeded` for `activation-bytes`; of an evaluation `Cancelled` too, where the job is
    /// asked to stop before it is through.
    pub fn wait(self) -> Result<LossSums> {
        Ok(self.0.wait()?)
    }
}

/// A step's report on its way. Dropping it does not take the call back.
#[derive(Debug)]
#[must_use = "the call goes on, but nobody would see its error"]
pub struct PendingStep(training::PendingStep);

impl PendingStep {
    /// Waits for the report.
    ///
    /// # Errors
    /// What the call met on the device: `NonFinite`, of a train step `QuotaExceeded` for `activation-bytes` too.
    pub fn wait(self) -> Result<StepReport> {
        Ok(self.0.wait()?)
    }
}

impl LossSums {
    /// The weighted mean loss in nats, rounded to float32; NaN where the weights sum to zero.
    #[must_use]
    pub fn mean(&self) -> f32 {
        (self.loss_sum / self.weight_sum) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_over_weights() {
        let sums = LossSums { loss_sum: 6.0, weight_sum: 4.0, labelled_tokens: 8, sequences: 2 };
        assert_eq!(sums.mean(), 1.5);
        assert!(LossSums { loss_sum: 0.0, weight_sum: 0.0, ..sums }.mean().is_nan());
    }
}
