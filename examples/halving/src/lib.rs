//! A tenant's own idea: successive halving (Jamieson and Talwalkar, 2016) over learning rates. Every round trains all adapters that are
//! left on the same batches, then drops the worse half by held-out loss; the last one is the job's result.
//!
//! Never waits for one adapter before it starts the next: their calls are in flight together.

use nodus_guest::{AdamW, Adapter, Batch, Error, Job, LoraConfig, PendingLoss, PendingStep, Result};

/// All are required but `max_length`.
#[derive(serde::Deserialize)]
struct Params {
    learning_rates: Vec<f32>,
    steps_per_round: usize,
    batch_size: u64,
    max_length: Option<u32>,
}

fn train(job: Job, params: Params) -> Result<()> {
    let trunk = job.trunk()?;
    let data = job.train_data(&trunk, params.max_length)?;
    let held_out = job.held_out(&trunk, params.max_length)?.ok_or_else(|| Error::user("give the job held-out data to choose by"))?.all()?;
    let lora = LoraConfig::new(8).alpha(16.0).targets(["q_proj", "v_proj"]);
    let start = |rate: &f32| Ok((*rate, Adapter::create(&trunk, &lora)?));
    let mut runners = params.learning_rates.iter().map(start).collect::<Result<Vec<_>>>()?;
    let mut batches = data.batches(params.batch_size).endless().shuffle(job.seed());
    for round in 1.. {
        for indices in batches.by_ref().take(params.steps_per_round) {
            let batch = data.batch(&indices)?;
            let step = |(rate, adapter): &(f32, Adapter)| adapter.start_train_step(&batch, &AdamW::new(*rate));
            let pending = runners.iter().map(step).collect::<Result<Vec<_>>>()?;
            pending.into_iter().map(PendingStep::wait).collect::<Result<Vec<_>>>()?;
        }
        let Some(losses) = losses(&runners, &held_out)? else { break };
        runners = better_half(&job, round, runners, &losses);
        if runners.len() <= 1 || job.should_stop() {
            break;
        }
    }
    let (rate, winner) = runners.first().ok_or_else(|| Error::user("learning_rates is empty, expected at least one"))?;
    let how = if runners.len() == 1 { "won" } else { "is kept: the job was asked to stop before one had won" };
    job.info(format!("learning rate {rate} {how}"));
    winner.save("adapter")?;
    Ok(())
}

/// Each runner's held-out loss; none where the job was asked to stop meanwhile.
fn losses(runners: &[(f32, Adapter)], held_out: &Batch) -> Result<Option<Vec<f32>>> {
    let pending = runners.iter().map(|(_, adapter)| adapter.start_evaluate(held_out)).collect::<Result<Vec<_>>>()?;
    match pending.into_iter().map(PendingLoss::wait).collect::<Result<Vec<_>>>() {
        Err(Error::Cancelled) => Ok(None),
        sums => Ok(Some(sums?.iter().map(|sums| sums.mean()).collect())),
    }
}

/// The runners whose held-out loss is in the lower half, best first.
fn better_half(job: &Job, round: u64, runners: Vec<(f32, Adapter)>, losses: &[f32]) -> Vec<(f32, Adapter)> {
    let mut ranked: Vec<(f32, (f32, Adapter))> = losses.iter().copied().zip(runners).collect();
    ranked.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    for (loss, (rate, _)) in &ranked {
        job.metric(&format!("held_out_loss/{rate}"), round, *loss);
    }
    ranked.truncate(ranked.len().div_ceil(2));
    ranked.into_iter().map(|(_, runner)| runner).collect()
}

nodus_guest::job!(train);
