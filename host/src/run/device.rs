//! The engine of a run: its thread, the models it holds, and what decides its bits.
//!
//! Knows no job.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use anyhow::Context as _;
use nodus_engine::{Counts, Engine, EngineHandle, JobBytes, Options};
use nodus_kernels::Device as _;
use nodus_kernels::cpu::CpuDevice;
use nodus_protocol::{Client, Digest, EngineError, JobSlot, TrunkSlot};
use nodus_sandbox::services::{Text, Trunk};

use super::inputs::OpenModel;
use super::services::HostText;
use crate::cli::DeviceArgs;
use crate::machine;

/// Commands that may wait at the engine before their jobs must.
const ENGINE_QUEUE: usize = 256;

/// Names and values that decide the bits of a result.
pub(crate) type Class = BTreeMap<String, String>;

/// What an engine is set up with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rig {
    /// As the user has it.
    pub(crate) args: DeviceArgs,
    /// Bytes of its buffers at most: all but the weights.
    pub(crate) buffer_bytes_max: u64,
}

/// An engine on the CPU, started.
pub(crate) struct Device {
    handle: EngineHandle,
    client: Client,
    slots: BTreeMap<Digest, TrunkSlot>,
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
    /// Starts an engine that holds these models, each digest once.
    ///
    /// # Errors
    /// Ours: the machine has no device, or not the memory.
    pub(crate) fn start<'a>(models: impl Iterator<Item = &'a OpenModel>, rig: Rig) -> anyhow::Result<Self> {
        let threads = machine::threads(rig.args.threads)?;
        let device = CpuDevice::with_memory_limit(threads, rig.buffer_bytes_max).context("starting the CPU device")?;
        let mut engine = Engine::new(device, options(rig.args));
        let mut slots = BTreeMap::new();
        for model in models {
            if let Entry::Vacant(place) = slots.entry(model.digest) {
                let slot = engine.add_trunk(&model.config, &model.tensors).with_context(|| format!("loading model `{}`", model.name))?;
                place.insert(slot);
            }
        }
        let (client, handle) = engine.spawn(ENGINE_QUEUE).context("starting the engine's thread")?;
        Ok(Self { handle, client, slots })
    }

    /// What decides the bits of its results.
    pub(crate) fn class(&self) -> Class {
        self.handle.class().iter().cloned().collect()
    }

    /// A model as jobs use it.
    ///
    /// # Errors
    /// Ours: it was not started with this model.
    pub(crate) fn trunk(&self, model: &OpenModel) -> anyhow::Result<Trunk> {
        let slot = *self.slots.get(&model.digest).context("the engine does not hold the job's model")?;
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

fn options(args: DeviceArgs) -> Options {
    let usual = Options::default();
    let Some(bytes) = args.trunk_cache else { return usual };
    Options { trunk_cache_bytes: bytes, trunk_cache_host_bytes: usual.trunk_cache_host_bytes.min(bytes), ..usual }
}

/// The class of the device that a run on this machine would use.
///
/// # Errors
/// Ours: the machine has no device.
pub(crate) fn class_here() -> anyhow::Result<Class> {
    Ok(CpuDevice::new(1).context("starting the CPU device")?.class().into_iter().collect())
}
