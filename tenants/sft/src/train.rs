//! The training loop.
//!
//! Never saves `adapter` after an error: what is not finite is no result.

use nodus_guest::{AdamW, Adapter, Batch, Dataset, Error, Job, Result, StepReport, Trunk};

use crate::adapter;
use crate::evaluate::HeldOut;
use crate::params::Params;

/// The whole job.
pub(crate) fn train(job: Job, params: Params) -> Result<()> {
    let trunk = job.trunk()?;
    params.validate(trunk.info())?;
    let adapter = adapter::open(&trunk, &params)?;
    let mut held_out = HeldOut::open(&job, &trunk, &params)?;
    let data = open_data(&job, &trunk, &params)?;

    held_out.evaluate(&job, &adapter, 0)?;
    // The first evaluation may have been what was cut short.
    let taken = if job.should_stop() { 0 } else { train_steps(&job, &params, &adapter, &data, &mut held_out)? };
    if job.should_stop() {
        job.warn(format!("asked to stop: the adapter is kept as it was after step {taken}"));
    } else {
        held_out.evaluate(&job, &adapter, taken)?;
    }
    adapter.save("adapter")?;
    held_out.conclude(&job);
    Ok(())
}

/// Opens the training data, and tells the owner what was cut.
fn open_data(job: &Job, trunk: &Trunk, params: &Params) -> Result<Dataset> {
    let data = job.train_data(trunk, params.max_length)?;
    let info = data.info();
    if info.labelled_tokens == 0 {
        return Err(Error::user("the training data has no labelled token: there is nothing to learn"));
    }
    job.info(format!("{} examples, {} of {} tokens are labelled", info.examples, info.labelled_tokens, info.tokens));
    if info.truncated > 0 {
        job.warn(format!("{} of {} examples were cut to the maximum length", info.truncated, info.examples));
    }
    Ok(data)
}

/// Trains until the last step, a request to stop, or the end of patience; answers the number of the step it ended with.
fn train_steps(job: &Job, params: &Params, adapter: &Adapter, data: &Dataset, held_out: &mut HeldOut) -> Result<u64> {
    let batches = data.batches(params.batch_size).endless();
    let batches = if params.shuffle { batches.shuffle(job.seed()) } else { batches };
    let steps = batches.accumulate(params.gradient_accumulation);
    let total = params.total_steps(steps.per_epoch());
    let schedule = params.schedule(total);
    if params.warmup(total) > total {
        job.warn(format!("the run ends after {total} steps, before its warm-up of {}: the peak is never reached", params.warmup(total)));
    }

    job.progress(0, total);
    for (step, micro_batches) in (1..=total).zip(steps) {
        let batches = micro_batches.iter().map(|indices| data.batch(indices)).collect::<Result<Vec<_>>>()?;
        let optimiser = params.optimiser(schedule.at(step - 1));
        match train_step(adapter, &batches, &optimiser)? {
            Some(report) => {
                job.metric("loss", step, report.loss);
                job.metric("grad_norm", step, report.grad_norm);
                job.metric("learning_rate", step, optimiser.learning_rate);
            }
            None => job.warn(format!("step {step} was left out: its examples have no labelled token")),
        }
        job.progress(step, total);
        if job.should_stop() {
            return Ok(step);
        }
        held_out.evaluate_when_due(job, adapter, step)?;
        if held_out.is_out_of_patience() {
            job.info(format!("stopped early after step {step} of {total}: the held-out loss has stopped improving"));
            return Ok(step);
        }
    }
    Ok(total)
}

/// One optimiser step over the gradients of all micro-batches; none where nothing is labelled.
fn train_step(adapter: &Adapter, batches: &[Batch], optimiser: &AdamW) -> Result<Option<StepReport>> {
    let labelled: u64 = batches.iter().map(Batch::labelled_tokens).sum();
    let (Some((last, earlier)), 1..) = (batches.split_last(), labelled) else {
        return Ok(None);
    };
    for batch in earlier {
        adapter.forward_backward(batch)?;
    }
    adapter.train_step(last, optimiser).map(Some)
}
