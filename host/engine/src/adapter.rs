//! An adapter on the device: weights, gradient, moments, and where it stands.
//!
//! Never knows another adapter: everything here is one job's own.

use std::collections::BTreeMap;

use nodus_kernels::{Device, DeviceError, Dropout, LoraModule, Use, philox, stream_key, uniform};
use nodus_protocol::{
    AdapterSlot, AdapterWeights, Batch, EngineError, ErrorKind, LoraConfig, LossSums, ModelConfig, Module, ModuleWeights, TrunkSlot,
};

use crate::rows::Stage;

/// What a stream of random numbers is for; the first of the numbers that name it.
const STREAM_INIT: u64 = 1;
const STREAM_DROPOUT: u64 = 2;

/// An adapter on the device. The four buffers have one layout: module by module in the order of `LoraConfig::modules`, A then B.
pub(crate) struct Adapter<D: Device> {
    pub(crate) trunk: TrunkSlot,
    pub(crate) cohort: Option<u64>,
    pub(crate) sites: Sites,
    pub(crate) params: D::Buffer,
    pub(crate) grads: D::Buffer,
    pub(crate) moment1: D::Buffer,
    pub(crate) moment2: D::Buffer,
    /// Optimiser steps taken.
    pub(crate) steps: u64,
    /// Forward-backwards done; dropout draws by it.
    pub(crate) count: u64,
    /// Sums since the last step.
    pub(crate) sums: LossSums,
    /// Why no command on it succeeds any more.
    pub(crate) poison: Option<EngineError>,
    pub(crate) config: LoraConfig,
    pub(crate) seed: u64,
    pub(crate) index: u32,
}

/// Where the adapted modules lie in the flat buffers.
pub(crate) struct Sites {
    sites: BTreeMap<(usize, Module), LoraModule>,
    len: usize,
    /// The lowest stage that carries the adapter.
    pub(crate) cut: Stage,
}

impl Sites {
    pub(crate) fn new(config: &LoraConfig, model: &ModelConfig) -> Self {
        let (mut sites, mut len) = (BTreeMap::new(), 0);
        let mut cut = Stage::of(model.num_hidden_layers, Module::QProj);
        for (layer, module) in config.modules(model) {
            let (rank, inputs, outputs) = (config.rank_of(layer, module) as usize, model.module_in(module), model.module_out(module));
            let (a, b) = (len, len + rank * inputs);
            len = b + outputs * rank;
            cut = cut.min(Stage::of(layer, module));
            sites.insert((layer, module), LoraModule { a, b, rank, inputs, outputs, scale: config.scale_of(layer, module) });
        }
        Self { sites, len, cut }
    }

    /// Number of weights.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the weights.
    pub(crate) fn weight_bytes(&self) -> u64 {
        (self.len * size_of::<f32>()) as u64
    }

    /// Bytes of weights, gradient and moments.
    pub(crate) fn state_bytes(&self) -> u64 {
        4 * self.weight_bytes()
    }

    /// The module, where it carries the adapter.
    pub(crate) fn get(&self, layer: usize, module: Module) -> Option<LoraModule> {
        self.sites.get(&(layer, module)).copied()
    }

    fn iter(&self) -> impl Iterator<Item = (usize, Module, LoraModule)> {
        self.sites.iter().map(|((layer, module), site)| (*layer, *module, *site))
    }
}

impl<D: Device> Adapter<D> {
    /// A fresh adapter: A uniform in +-1/sqrt(in), B zero.
    pub(crate) fn create(
        device: &mut D,
        slot: AdapterSlot,
        (trunk, model): (TrunkSlot, &ModelConfig),
        config: &LoraConfig,
        seed: u64,
        cohort: Option<u64>,
    ) -> Result<Self, DeviceError> {
        let mut adapter = Self::blank(device, slot, (trunk, model), config, seed, cohort)?;
        for (layer, module, site) in adapter.sites.iter() {
            let key = stream_key(seed, &[STREAM_INIT, slot.index.into(), layer as u64, module as u64]);
            device.upload(&start_of_a(key, site.rank, site.inputs), &mut adapter.params, site.a)?;
        }
        Ok(adapter)
    }

    /// One that is all zeros.
    pub(crate) fn blank(
        device: &mut D,
        slot: AdapterSlot,
        (trunk, model): (TrunkSlot, &ModelConfig),
        config: &LoraConfig,
        seed: u64,
        cohort: Option<u64>,
    ) -> Result<Self, DeviceError> {
        let sites = Sites::new(config, model);
        let mut zeros = || device.alloc(Use::State, sites.len);
        Ok(Self {
            trunk,
            cohort,
            params: zeros()?,
            grads: zeros()?,
            moment1: zeros()?,
            moment2: zeros()?,
            sites,
            steps: 0,
            count: 0,
            sums: LossSums::default(),
            poison: None,
            config: config.clone(),
            seed,
            index: slot.index,
        })
    }

    /// Puts weights that `AdapterWeights::validate` has passed in place of the fresh ones.
    pub(crate) fn fill(&mut self, device: &mut D, weights: &AdapterWeights) -> Result<(), DeviceError> {
        for (module, (_, _, site)) in weights.modules.iter().zip(self.sites.iter()) {
            device.upload(&module.a, &mut self.params, site.a)?;
            device.upload(&module.b, &mut self.params, site.b)?;
        }
        Ok(())
    }

    /// The weights as they are.
    pub(crate) fn weights(&self, device: &mut D) -> Result<AdapterWeights, DeviceError> {
        self.read(device, &self.params)
    }

    /// The gradient accumulated since the last step, not normalised, in the weights' places.
    pub(crate) fn gradients(&self, device: &mut D) -> Result<AdapterWeights, DeviceError> {
        self.read(device, &self.grads)
    }

    fn read(&self, device: &mut D, flat: &D::Buffer) -> Result<AdapterWeights, DeviceError> {
        let mut modules = Vec::new();
        for (layer, module, site) in self.sites.iter() {
            let (mut a, mut b) = (vec![0.0; site.rank * site.inputs], vec![0.0; site.outputs * site.rank]);
            device.download(flat, site.a, &mut a)?;
            device.download(flat, site.b, &mut b)?;
            modules.push(ModuleWeights { layer, module, rank: site.rank, a, b });
        }
        Ok(AdapterWeights { config: self.config.clone(), modules })
    }

    /// What the next forward-backward drops from the input of a module.
    pub(crate) fn dropout(&self, layer: usize, module: Module) -> Option<Dropout> {
        let ids = [STREAM_DROPOUT, self.index.into(), layer as u64, module as u64, self.count];
        let probability = self.config.dropout;
        (probability > 0.0).then(|| Dropout { key: stream_key(self.seed, &ids), probability })
    }

    /// The sums after this batch, were it added.
    pub(crate) fn weight_sum_with(&self, batch: &Batch) -> f64 {
        let labelled = batch.sequences.iter().flat_map(|sequence| sequence.weights());
        self.sums.weight_sum + labelled.map(|weight| f64::from(*weight)).sum::<f64>()
    }

    /// Ends the adapter: this and every later command on it answers with the error returned.
    pub(crate) fn poison(&mut self, what: &str) -> EngineError {
        let error = EngineError::new(ErrorKind::NonFinite, format!("step {}: {what}", self.steps + 1));
        self.poison.insert(error).clone()
    }

    /// As [`Self::poison`], where an evaluation found it: the next step is not to blame.
    pub(crate) fn poison_evaluated(&mut self, what: &str) -> EngineError {
        let error = EngineError::new(ErrorKind::NonFinite, format!("evaluation after step {}: {what}", self.steps));
        self.poison.insert(error).clone()
    }
}

/// A's start, uniform in +-1/sqrt(in): number i of the matrix is word i % 4 of counter i / 4.
fn start_of_a(key: u64, rank: usize, inputs: usize) -> Vec<f32> {
    let bound = 1.0 / (inputs as f32).sqrt();
    let words = (0..).flat_map(|counter| philox(key, [counter, 0, 0, 0]));
    words.take(rank * inputs).map(|word| (2.0 * uniform(word) - 1.0) * bound).collect()
}
