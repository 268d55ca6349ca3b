//! The loss of an adapter, or of the plain trunk, on the job's data, and on its held-out data where it has some.
//!
//! Never trains, and saves nothing.

use nodus_guest::{Adapter, Dataset, Error, Job, LoraConfig, Result, Trunk};
use serde::Deserialize;

/// Everything that can be set.
#[derive(Deserialize)]
struct Params {
    /// Digest of the adapter to evaluate; default: the plain trunk.
    init_adapter: Option<String>,
    /// Cuts each example to so many tokens; default: the model's context.
    max_length: Option<u32>,
}

fn evaluate(job: Job, params: Params) -> Result<()> {
    let trunk = job.trunk()?;
    let adapter = match &params.init_adapter {
        Some(digest) => Adapter::load(&trunk, digest)?,
        None => untrained(&trunk)?,
    };
    report(&job, &adapter, "loss", &job.train_data(&trunk, params.max_length)?)?;
    if let Some(held_out) = job.held_out(&trunk, params.max_length)? {
        report(&job, &adapter, "held_out_loss", &held_out)?;
    }
    Ok(())
}

/// A fresh adapter adds nothing, its B being zero: the smallest one stands for the plain trunk.
fn untrained(trunk: &Trunk) -> Result<Adapter> {
    let module = trunk.info().target_modules.first().ok_or("the model has no linear module")?;
    Adapter::create(trunk, &LoraConfig::new(1).targets([module]).last_layers(1))
}

fn report(job: &Job, adapter: &Adapter, name: &str, data: &Dataset) -> Result<()> {
    if data.info().labelled_tokens == 0 {
        return Err(Error::user(format!("{name}: the data has no labelled token, so it has no loss")));
    }
    let sums = adapter.evaluate(&data.all()?)?;
    let loss = sums.mean();
    job.metric(name, 0, loss);
    job.info(format!("{name} {loss:.4}, perplexity {:.2}, over {} labelled tokens", loss.exp(), sums.labelled_tokens));
    Ok(())
}

nodus_guest::job!(evaluate);
