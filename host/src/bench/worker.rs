//! One process of an arm: opens the model, warms up, waits for the line to go, and runs its jobs through the engine.
//!
//! Compares nothing; never counts its set-up as work.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_formats::peft;
use nodus_protocol::{Client, Command, EngineError, ModelConfig, Reply, TrunkSlot};
use tokio::sync::Barrier;

use super::words::{Done, JobDone, Order, Ready};
use super::work::slot;
use crate::app::Surroundings;
use crate::cli::DeviceArgs;
use crate::error::user;
use crate::name::Name;
use crate::process::weights::Link;
use crate::run::choice::choose;
use crate::run::device::{Device, Rig};
use crate::run::inputs::OpenModel;
use crate::run::sharing::Sharing;
use crate::store::{Store, digest_of, write_synced};

/// Runs what the first line of `orders` asks for.
///
/// # Errors
/// Ours: the engine, or the parent is gone.
pub(super) fn work(
    (store, surroundings, weights): (&Store, &Surroundings, Option<&Link>),
    (device, keep): (DeviceArgs, &Path),
    orders: &mut dyn BufRead,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let order: Order = serde_json::from_str(&line(orders)?).context("reading the order")?;
    let keep = surroundings.paths.open_dir(keep)?;
    let name: Name = order.work.model.parse().map_err(|error| user(format!("{error}")))?;
    let model = OpenModel::open(store, &name)?;
    let chosen = choose(store, surroundings, (device.device, device.dtype), std::iter::once(&model))?;
    let rig = Rig { chosen: &chosen, args: device, buffer_bytes_max: device.memory.unwrap_or(u64::MAX), expected: None, weights };
    let engine = Device::start_with(std::iter::once(&model), rig, order.variant.launching())?;
    let trunk = engine.trunk(&model)?;

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("starting the runtime")?;
    let jobs = Jobs { order: &order, model: &model.config, engine: &trunk.engine, trunk: trunk.slot };
    let (warmup, steps) = (order.work.warmup, order.work.steps());
    let (first, rest) = (jobs.commands(0..warmup, true)?, jobs.commands(warmup..warmup + steps, false)?);
    if let Some(urgent) = order.urgent {
        runtime.block_on(trunk.engine.call(Command::Prioritise { job: slot(urgent).job }))?;
    }
    let (warm, _) = runtime.block_on(jobs.run(first))?;
    let before = Sharing::of(&engine.counts());
    tell(out, &Ready { class: engine.class(&model) })?;
    line(orders).context("waiting for the line to go")?;

    let (measured, seconds) = runtime.block_on(jobs.run(rest))?;
    let sharing = Sharing::of(&engine.counts()).since(&before);
    let pairs = warm.into_iter().zip(measured);
    let ended = pairs.map(|(warm, measured)| runtime.block_on(jobs.conclude(&keep, warm, measured))).collect::<anyhow::Result<Vec<_>>>()?;
    drop(trunk);
    engine.finish().end.context("the engine failed")?;
    tell(out, &Done { seconds, jobs: ended, sharing })
}

fn line(orders: &mut dyn BufRead) -> anyhow::Result<String> {
    let mut line = String::new();
    anyhow::ensure!(orders.read_line(&mut line).context("reading from the parent")? > 0, "the parent is gone");
    Ok(line)
}

fn tell(out: &mut dyn Write, value: &impl serde::Serialize) -> anyhow::Result<()> {
    writeln!(out, "{}", serde_json::to_string(value)?).and_then(|()| out.flush()).context("telling the parent")
}

/// The jobs of this process.
struct Jobs<'a> {
    order: &'a Order,
    model: &'a ModelConfig,
    engine: &'a Client,
    trunk: TrunkSlot,
}

/// What one job answered in some of its steps: bits of loss and gradient norm, and milliseconds.
struct Steps {
    job: u32,
    bits: Vec<(u32, u32)>,
    ms: Vec<f64>,
}

/// A job's commands, in order.
type Commands = (u32, Vec<Command>);

impl Jobs<'_> {
    /// What every job asks in these steps, made before the clock starts: a tenant's batches are at hand.
    fn commands(&self, steps: std::ops::Range<u32>, is_first: bool) -> Result<Vec<Commands>, EngineError> {
        let Order { work, shares, jobs, .. } = self.order;
        let of = |job: u32| {
            let create = is_first.then(|| Ok(work.create(job, self.trunk, *shares)));
            let commands = create.into_iter().chain(steps.clone().map(|step| work.step(self.model, job, step)));
            Ok((job, commands.collect::<Result<_, _>>()?))
        };
        jobs.iter().map(|job| of(*job)).collect()
    }

    /// Runs all jobs at once, each job's own commands one after another; what they answered, and the seconds until the last did.
    async fn run(&self, jobs: Vec<Commands>) -> anyhow::Result<(Vec<Steps>, f64)> {
        let barrier = Arc::new(Barrier::new(jobs.len() + 1));
        let start = |commands| tokio::spawn(run_one(self.engine.clone(), commands, barrier.clone()));
        let tasks: Vec<_> = jobs.into_iter().map(start).collect();
        barrier.wait().await;
        let (began, mut all) = (Instant::now(), Vec::new());
        for task in tasks {
            all.push(task.await.context("a job's task panicked")??);
        }
        Ok((all, began.elapsed().as_secs_f64()))
    }

    /// Takes the adapter and keeps it under its digest.
    async fn conclude(&self, keep: &Dir, warm: Steps, measured: Steps) -> anyhow::Result<JobDone> {
        let Reply::Weights(weights) = self.engine.call(Command::Export { slot: slot(measured.job) }).await? else {
            anyhow::bail!("the engine answered an export with something else");
        };
        let files = peft::write(&weights, &self.order.work.model)?;
        let (_, bytes) = files.into_iter().find(|(name, _)| name.ends_with(".safetensors")).context("an adapter without weights")?;
        let (adapter, adapter_bytes) = digest_of(bytes.as_slice())?;
        let name = format!("{adapter}.safetensors");
        if !keep.exists(&name) {
            // Another process of the same arm may be at it with the same bytes.
            let own = format!("{name}.{}", std::process::id());
            write_synced(keep, &own, &bytes)?;
            keep.rename(&own, keep, &name).context("keeping an adapter")?;
        }
        let hexadecimal =
            |pick: fn(&(u32, u32)) -> u32| warm.bits.iter().chain(&measured.bits).map(|bits| format!("{:08x}", pick(bits))).collect();
        Ok(JobDone {
            job: measured.job,
            loss_bits: hexadecimal(|bits| bits.0),
            grad_norm_bits: hexadecimal(|bits| bits.1),
            adapter,
            adapter_bytes,
            step_ms: measured.ms,
        })
    }
}

async fn run_one(engine: Client, (job, commands): Commands, barrier: Arc<Barrier>) -> Result<Steps, EngineError> {
    barrier.wait().await;
    let (mut bits, mut ms) = (Vec::new(), Vec::new());
    for command in commands {
        let asked = Instant::now();
        if let Reply::Step(report) = engine.call(command).await? {
            bits.push((report.loss.to_bits(), report.grad_norm.to_bits()));
            ms.push(asked.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(Steps { job, bits, ms })
}
