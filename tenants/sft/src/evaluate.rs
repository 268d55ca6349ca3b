//! Held-out loss, the best adapter so far, and early stop.
//!
//! Never changes the adapter it looks at.

use nodus_guest::{Adapter, Batch, EarlyStopping, Error, Job, Result, Trunk};

use crate::params::Params;

/// The held-out data as one batch, where the job has some, and how its loss went.
pub(crate) struct HeldOut {
    batch: Option<Batch>,
    every: u64,
    losses: EarlyStopping,
    evaluated: Option<u64>,
}

impl HeldOut {
    /// Takes the job's held-out data.
    pub(crate) fn open(job: &Job, trunk: &Trunk, params: &Params) -> Result<Self> {
        let batch = match job.held_out(trunk, params.max_length)? {
            Some(data) if data.info().labelled_tokens == 0 => {
                return Err(Error::user("the held-out data has no labelled token: it has no loss"));
            }
            Some(data) => Some(data.all()?),
            None if params.evaluate_every > 0 => {
                let text = "but the job has no held-out data: submit it with some, or leave evaluate_every out";
                return Err(Error::user(format!("evaluate_every is {}, {text}", params.evaluate_every)));
            }
            None => None,
        };
        Ok(Self { batch, every: params.evaluate_every, losses: EarlyStopping::new(params.patience), evaluated: None })
    }

    /// Evaluates, once after each step, and keeps the adapter as `best` where it is the best so far. A job that is asked to stop meanwhile
    /// goes on without the loss.
    pub(crate) fn evaluate(&mut self, job: &Job, adapter: &Adapter, step: u64) -> Result<()> {
        let Some(batch) = self.batch.as_ref().filter(|_| self.evaluated != Some(step)) else {
            return Ok(());
        };
        let loss = match adapter.evaluate(batch) {
            Err(Error::Cancelled) => {
                job.info(format!("asked to stop: the evaluation after step {step} was left off"));
                return Ok(());
            }
            sums => sums?.mean(),
        };
        self.evaluated = Some(step);
        job.metric("held_out_loss", step, loss);
        if self.losses.observe(step, loss) {
            adapter.save("best")?;
        }
        Ok(())
    }

    /// Evaluates after every so many steps.
    pub(crate) fn evaluate_when_due(&mut self, job: &Job, adapter: &Adapter, step: u64) -> Result<()> {
        // No number is a multiple of 0.
        if step.is_multiple_of(self.every) { self.evaluate(job, adapter, step) } else { Ok(()) }
    }

    /// Whether as many evaluations as `patience` have brought no new best.
    pub(crate) fn is_out_of_patience(&self) -> bool {
        self.losses.should_stop()
    }

    /// Tells the owner which adapter was best.
    pub(crate) fn conclude(&self, job: &Job) {
        match self.losses.best() {
            Some((0, _)) if self.evaluated == Some(0) => job.info("the held-out loss was taken before training only"),
            Some((0, loss)) => job.warn(format!("the held-out loss never fell below {loss:.4}, where it began: `best` is the start")),
            Some((step, loss)) => job.info(format!("the held-out loss was best after step {step}, {loss:.4}: kept as `best`")),
            None => {}
        }
    }
}
