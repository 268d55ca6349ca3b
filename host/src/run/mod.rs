//! One local run, told once, top-down: bytes become a component, names become inputs, a job becomes an outcome, an outcome a receipt.
//!
//! Never publishes an adapter of a job that did not end well.

mod conclude;
mod inputs;
mod output;
mod progress;
mod record;
mod recorder;
mod services;
mod stop;

use std::collections::BTreeMap;
use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use nodus_engine::{Engine, EngineHandle, Options};
use nodus_kernels::cpu::CpuDevice;
use nodus_protocol::{Client, JobSlot, TrunkSlot};
use nodus_sandbox::services::{Text, Trunk};
use nodus_sandbox::{JobEnd, JobSpec, Limits, Sandbox, SandboxOptions, StopFlag, ValidComponent};

use crate::cli::RunArgs;
use crate::error::Ending;
use crate::paths::Paths;
use crate::store::Store;

use conclude::Outcome;
use inputs::Inputs;
use output::Output;
use progress::Progress;
use record::Record;
use recorder::{Listener, Recorder};
use services::{HostText, RunServices};

/// Commands that may wait at the engine before the job must.
const ENGINE_QUEUE: usize = 256;

/// Runs a component on this machine and leaves its results in `args.out`.
///
/// # Errors
/// The user's: a refusal, or the job failed. Ours: the machine.
pub fn run(store: &Store, paths: Paths, args: &RunArgs, is_terminal: bool, out: &mut dyn Write) -> anyhow::Result<Ending> {
    Output::refuse_taken(paths, &args.out)?;
    let sandbox = Sandbox::new(SandboxOptions::default())?;
    let component = inputs::component(paths, &args.component, &sandbox)?;
    let mut inputs = Inputs::open(store, paths, args)?;
    let device = Device::start(&mut inputs, args.threads)?;
    let output = Output::create(paths, &args.out)?;
    let outcome = train(&sandbox, &component, &inputs, device, &output, args.seed, is_terminal)?;
    conclude::conclude(&component, args, &inputs, &outcome, &output, out)
}

/// The engine's thread, the model it holds, and what decides its bits.
struct Device {
    handle: EngineHandle,
    trunk: Trunk,
    class: BTreeMap<String, String>,
}

impl Device {
    /// Starts an engine on the CPU that holds the run's model.
    fn start(inputs: &mut Inputs, threads: Option<NonZeroUsize>) -> anyhow::Result<Self> {
        let threads = match threads {
            Some(threads) => threads,
            None => std::thread::available_parallelism().context("counting the CPU's threads")?,
        };
        let device = CpuDevice::new(threads.get()).context("starting the CPU device")?;
        let mut engine = Engine::new(device, Options::default());
        let slot = engine.add_trunk(&inputs.config, &std::mem::take(&mut inputs.tensors)).context("loading the model")?;
        let (client, handle) = engine.spawn(ENGINE_QUEUE).context("starting the engine's thread")?;
        let class = handle.class().iter().cloned().collect();
        Ok(Self { handle, trunk: trunk(inputs, client, slot), class })
    }
}

fn trunk(inputs: &Inputs, engine: Client, slot: TrunkSlot) -> Trunk {
    let text = inputs.text.clone().map(|text| Arc::new(HostText(text)) as Arc<dyn Text>);
    Trunk { config: inputs.config.clone(), digest: inputs.digest, engine, slot, text }
}

/// Runs the job to its end, or to the second Ctrl-C.
fn train(
    sandbox: &Sandbox,
    component: &ValidComponent,
    inputs: &Inputs,
    device: Device,
    output: &Output,
    seed: u64,
    is_terminal: bool,
) -> anyhow::Result<Outcome> {
    let stop = StopFlag::default();
    let progress = if is_terminal { Progress::bar() } else { Progress::lines(Box::new(std::io::stderr())) };
    let (listener, recorder) = Recorder::start(Record::create(output)?, progress, stop.clone())?;
    let params = serde_json::to_string(&inputs.parameters)?;
    let spec = JobSpec { params, seed, job: JobSlot(0), limits: Limits::DEFAULT, stop: stop.clone(), cohort: None };
    let services = services(inputs, device.trunk, output, listener.clone())?;
    let started_unix_ms = unix_ms();
    let end = block_on(sandbox, component, spec, services, listener)?;
    let figures = recorder.finish()?;
    let engine = device.handle.join();
    Ok(Outcome { end, figures, class: device.class, engine, is_stopped: stop.is_requested(), started_unix_ms })
}

fn services(inputs: &Inputs, trunk: Trunk, output: &Output, listener: Listener) -> anyhow::Result<RunServices> {
    Ok(RunServices {
        trunk,
        text: inputs.text.clone(),
        base: inputs.model_name.to_string(),
        train: inputs.train.clone(),
        held_out: inputs.held_out.clone(),
        given: inputs.adapters.iter().cloned().collect(),
        output: output.dir().try_clone().context("opening the results' folder")?,
        saved: BTreeMap::new(),
        listener,
    })
}

/// The job's end; none where a second Ctrl-C cut it off.
fn block_on(
    sandbox: &Sandbox,
    component: &ValidComponent,
    spec: JobSpec,
    services: RunServices,
    listener: Listener,
) -> anyhow::Result<Option<JobEnd>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().context("starting the runtime")?;
    let interrupted = stop::second_interrupt(spec.stop.clone(), listener);
    Ok(runtime.block_on(async {
        tokio::select! {
            end = component.run(sandbox, spec, Box::new(services)) => Some(end),
            () = interrupted => None,
        }
    }))
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
