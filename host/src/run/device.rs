//! The engine of a run: its thread, the models it holds, and what decides its bits.
//!
//! Knows no job.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use nodus_engine::plan::{attention_shape, matrices, widest};
use nodus_engine::{Counts, Engine, EngineHandle, JobBytes, Options};
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::cuda::{CudaDevice, Launching, WeightSharing, rows_max};
use nodus_kernels::{Device as _, DeviceError};
use nodus_protocol::{Client, Digest, EngineError, JobSlot, Module, TrunkSlot};
use nodus_sandbox::services::{Text, Trunk};

use super::choice::Chosen;
use super::inputs::{OpenModel, Weights};
use super::services::HostText;
use crate::cli::DeviceArgs;
use crate::error::user;
use crate::machine;
use crate::process::weights::Link;
use crate::text::escape;

/// Commands that may wait at the engine before their jobs must.
const ENGINE_QUEUE: usize = 256;

/// Names and values that decide the bits of a result.
pub(crate) type Class = BTreeMap<String, String>;

/// What an engine is set up with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rig<'a> {
    /// Where.
    pub(crate) chosen: &'a Chosen,
    /// As the user has it.
    pub(crate) args: DeviceArgs,
    /// Bytes of its buffers at most: all but the weights.
    pub(crate) buffer_bytes_max: u64,
    /// The class that it must be of, where a receipt says so.
    pub(crate) expected: Option<&'a Class>,
    /// Whom its weights are shared with: processes that hold the same one model.
    pub(crate) weights: Option<&'a Link>,
}

/// An engine, started.
pub(crate) struct Device {
    handle: EngineHandle,
    client: Client,
    slots: BTreeMap<Digest, TrunkSlot>,
    /// What the system adds to the device's class.
    beside: Option<(String, String)>,
}

/// An engine that has ended.
pub(crate) struct Spent {
    /// What it did.
    pub(crate) counts: Counts,
    /// What each job was given of the device's memory, and gave back.
    pub(crate) jobs: BTreeMap<JobSlot, JobBytes>,
    /// `DeviceLost` or `Internal` where it failed on the way.
    pub(crate) end: Result<(), EngineError>,
}

impl Device {
    /// Starts an engine that holds these models, each digest once. On a card the exactness gate has been run before anything else is.
    ///
    /// # Errors
    /// Ours: the machine has no device, or not the memory. The user's: the device is of another class than expected.
    pub(crate) fn start<'a>(models: impl Iterator<Item = &'a OpenModel>, rig: Rig<'_>) -> anyhow::Result<Self> {
        Self::start_with(models, rig, Launching::Best)
    }

    /// [`Device::start`], on a card with its launches brought there in this way: the same bits.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn start_with<'a>(models: impl Iterator<Item = &'a OpenModel>, rig: Rig<'_>, launching: Launching) -> anyhow::Result<Self> {
        let models: BTreeMap<Digest, &OpenModel> = models.map(|model| (model.digest, model)).collect();
        let given = rig.weights.map_or(Ok(None), Link::ask).context("asking for weights that others hold")?;
        let maker = rig.weights.filter(|_| given.is_none());
        let device = match rig.chosen {
            Chosen::Cpu => {
                let threads = machine::threads(rig.args.threads)?;
                let device = CpuDevice::with_memory_limit(threads, rig.buffer_bytes_max).context("starting the CPU device")?;
                Self::launch(device, &models, options(rig.args, Options::default()), maker)?
            }
            Chosen::Cuda(chosen) => {
                let mut device = chosen.open(rig.buffer_bytes_max)?;
                device.launch_by(launching);
                prove(&mut device, &models).context("running the exactness gate")?;
                let unshared = if maker.is_some() { WeightSharing::Make } else { WeightSharing::Own };
                device.hold_weights(given.map_or(unshared, WeightSharing::Given)).context("taking weights that others hold")?;
                let quarter = rig.buffer_bytes_max.min(device.free_bytes()) / 4;
                let rows = |model: &&OpenModel| rows_max(widest(&model.config), model.config.module_out(Module::QProj));
                let rows_max = models.values().map(rows).min().unwrap_or(0);
                let usual = Options { rows_max, kept_bytes_max: quarter, trunk_cache_bytes: quarter, ..Options::default() };
                let mut device = Self::launch(device, &models, options(rig.args, usual), maker)?;
                device.beside = chosen.driver();
                device
            }
        };
        for model in models.values() {
            rig.expected.map_or(Ok(()), |expected| refuse_other_class(expected, &device.class(model)))?;
        }
        Ok(device)
    }

    fn launch<D: nodus_kernels::Device>(
        device: D,
        models: &BTreeMap<Digest, &OpenModel>,
        options: Options,
        maker: Option<&Link>,
    ) -> anyhow::Result<Self> {
        let mut engine = Engine::new(device, options);
        let mut slots = BTreeMap::new();
        for (digest, model) in models {
            let slot = match &model.weights {
                Weights::Mapped(tensors) => engine.add_trunk(&model.config, tensors),
                Weights::Random { dtype, seed } => engine.add_random_trunk(&model.config, *dtype, *seed),
            };
            slots.insert(*digest, slot.with_context(|| format!("loading model `{}`", model.name))?);
        }
        let made = engine.share_weights().context("handing weights over")?;
        maker.map_or(Ok(()), |link| link.tell(made.as_ref())).context("handing weights over")?;
        let (client, handle) = engine.spawn(ENGINE_QUEUE).context("starting the engine's thread")?;
        Ok(Self { handle, client, slots, beside: None })
    }

    /// What decides the bits of its results on a model.
    pub(crate) fn class(&self, model: &OpenModel) -> Class {
        let class = self.slots.get(&model.digest).map_or(&[][..], |slot| self.handle.class(*slot));
        class.iter().chain(&self.beside).cloned().collect()
    }

    /// What it holds a model as.
    ///
    /// # Errors
    /// Ours: it was not started with this model.
    pub(crate) fn slot(&self, model: &OpenModel) -> anyhow::Result<TrunkSlot> {
        self.slots.get(&model.digest).copied().context("the engine does not hold the job's model")
    }

    /// A client of its own.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The thread, for what it counts.
    pub(crate) fn handle(&self) -> &EngineHandle {
        &self.handle
    }

    /// What it has done so far.
    pub(crate) fn counts(&self) -> Counts {
        self.handle.counts()
    }

    /// A model as jobs use it.
    ///
    /// # Errors
    /// Ours: it was not started with this model.
    pub(crate) fn trunk(&self, model: &OpenModel) -> anyhow::Result<Trunk> {
        let slot = self.slot(model)?;
        let text = model.text.clone().map(|text| Arc::new(HostText(text)) as Arc<dyn Text>);
        Ok(Trunk { config: model.config.clone(), digest: model.digest, engine: self.client.clone(), slot, text })
    }

    /// Waits until all that was asked of it is done.
    pub(crate) fn finish(self) -> Spent {
        let Self { handle, client, .. } = self;
        drop(client);
        let (end, counts, jobs) = handle.finish();
        Spent { counts, jobs, end }
    }
}

/// Shows the device exact for these models, or finds what must run otherwise.
fn prove(device: &mut CudaDevice, models: &BTreeMap<Digest, &OpenModel>) -> Result<(), DeviceError> {
    let configs = || models.values().map(|model| &*model.config);
    configs().try_for_each(|config| device.plan_matrices(&matrices(config)))?;
    let shapes: Vec<_> = configs().map(attention_shape).collect();
    let began = Instant::now();
    let report = device.prove(&shapes)?;
    tracing::info!(verdict = report.verdict(), seconds = began.elapsed().as_secs_f64(), "the exactness gate");
    Ok(())
}

fn options(args: DeviceArgs, usual: Options) -> Options {
    let Some(bytes) = args.trunk_cache else { return usual };
    Options { trunk_cache_bytes: bytes, trunk_cache_host_bytes: usual.trunk_cache_host_bytes.min(bytes), ..usual }
}

/// Refuses a device of another class than a receipt's.
///
/// # Errors
/// The user's, with what is different.
pub(crate) fn refuse_other_class(expected: &Class, here: &Class) -> anyhow::Result<()> {
    if expected == here {
        return Ok(());
    }
    let names: BTreeSet<&String> = expected.keys().chain(here.keys()).collect();
    let shown = |class: &Class, name: &String| class.get(name).map_or("nothing".to_owned(), |value| format!("`{}`", escape(value)));
    let differences = names.into_iter().filter(|name| expected.get(*name) != here.get(*name));
    let lines =
        differences.map(|name| format!("{}: the receipt's is {}, here it is {}", escape(name), shown(expected, name), shown(here, name)));
    Err(user(format!(
        "the job ran on another device class, and bits are promised within one class only\n{}",
        lines.collect::<Vec<_>>().join("\n")
    )))
}

#[cfg(test)]
mod tests {
    use super::{Class, refuse_other_class};
    use crate::error::exit_code;

    #[test]
    fn another_class_is_refused_with_what_is_different() {
        let class = |values: &[(&str, &str)]| -> Class { values.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect() };
        let receipt = class(&[("backend", "cuda"), ("plan", "12ab"), ("precision", "bf16")]);
        assert!(refuse_other_class(&receipt, &receipt.clone()).is_ok());
        let error = refuse_other_class(&receipt, &class(&[("backend", "cpu"), ("cpu", "one"), ("precision", "bf16")])).unwrap_err();
        let text = error.to_string();
        assert_eq!(exit_code(&error), 2);
        for expected in
            ["another device class", "backend: the receipt's is `cuda`, here it is `cpu`", "cpu: the receipt's is nothing", "plan"]
        {
            assert!(text.contains(expected), "{text}");
        }
        assert!(!text.contains("bf16"), "{text}");
    }
}
