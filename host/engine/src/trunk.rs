//! A frozen base model on the device.
//!
//! Never changes after it is loaded, and never knows who uses it.

use std::collections::BTreeMap;

use nodus_kernels::{AttentionShape, DType, Device, DeviceError, HostTensor, Numbers, Source, Use, stream_key};
use nodus_protocol::{Architecture, ModelConfig, Module};

use crate::plan::attention_shape;
use crate::{TrunkError, rope};

/// A frozen base model on the device.
pub(crate) struct Trunk<D: Device> {
    pub(crate) config: ModelConfig,
    pub(crate) embed: D::Weight,
    pub(crate) layers: Vec<Layer<D>>,
    pub(crate) norm: D::Weight,
    head: Option<D::Weight>,
    pub(crate) rope: D::Buffer,
}

/// One decoder layer.
pub(crate) struct Layer<D: Device> {
    pub(crate) input_norm: D::Weight,
    pub(crate) post_norm: D::Weight,
    pub(crate) q: Linear<D>,
    pub(crate) k: Linear<D>,
    pub(crate) v: Linear<D>,
    pub(crate) o: Linear<D>,
    pub(crate) gate: Linear<D>,
    pub(crate) up: Linear<D>,
    pub(crate) down: Linear<D>,
    /// RMS norms on each head of q and k (Qwen3).
    pub(crate) qk_norm: Option<(D::Weight, D::Weight)>,
}

/// y = W x + bias.
pub(crate) struct Linear<D: Device> {
    pub(crate) weight: D::Weight,
    pub(crate) bias: Option<D::Weight>,
}

impl<D: Device> Layer<D> {
    pub(crate) fn linear(&self, module: Module) -> &Linear<D> {
        match module {
            Module::QProj => &self.q,
            Module::KProj => &self.k,
            Module::VProj => &self.v,
            Module::OProj => &self.o,
            Module::GateProj => &self.gate,
            Module::UpProj => &self.up,
            Module::DownProj => &self.down,
        }
    }
}

impl<D: Device> Trunk<D> {
    /// Checks every tensor that the architecture needs against the configuration and hands it to the device.
    pub(crate) fn load(device: &mut D, config: &ModelConfig, tensors: &BTreeMap<String, HostTensor>) -> Result<Self, TrunkError> {
        Self::new(device, config, Tensors::Stored(tensors))
    }

    /// A trunk of random weights, a function of configuration, type and seed: each tensor's stream of numbers is named by seed and tensor.
    /// Matrices and biases are uniform with transformers' initial deviation, 0.02; norms lie near 1.
    pub(crate) fn random(device: &mut D, config: &ModelConfig, dtype: DType, seed: u64) -> Result<Self, TrunkError> {
        Self::new(device, config, Tensors::Random { dtype, seed })
    }

    fn new(device: &mut D, config: &ModelConfig, tensors: Tensors<'_>) -> Result<Self, TrunkError> {
        check_sizes(config)?;
        let hidden = config.hidden_size;
        let mut loader = Loader { device, config, tensors };
        let embed = loader.take("model.embed_tokens.weight", &[config.vocab_size, hidden])?;
        let layers = (0..config.num_hidden_layers).map(|layer| loader.layer(layer)).collect::<Result<_, _>>()?;
        let norm = loader.take("model.norm.weight", &[hidden])?;
        let head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.take("lm_head.weight", &[config.vocab_size, hidden])?),
        };
        let table = rope::table(config);
        let mut rope = device.alloc(Use::State, table.len())?;
        device.upload(&table, &mut rope, 0)?;
        Ok(Self { config: config.clone(), embed, layers, norm, head, rope })
    }

    /// The output head; the embedding where they are tied.
    pub(crate) fn head(&self) -> &D::Weight {
        self.head.as_ref().unwrap_or(&self.embed)
    }

    pub(crate) fn attention_shape(&self) -> AttentionShape {
        attention_shape(&self.config)
    }
}

/// Where a trunk's tensors come from.
#[derive(Clone, Copy)]
enum Tensors<'a> {
    Stored(&'a BTreeMap<String, HostTensor>),
    Random { dtype: DType, seed: u64 },
}

/// Half the width of a uniform distribution whose deviation is 0.02.
const RANDOM_RANGE: f32 = 0.034_641_016;

/// The numbers of a random tensor.
fn numbers(name: &str, seed: u64) -> Numbers {
    let ids: Vec<u64> = name.bytes().map(u64::from).collect();
    let centre = if name.ends_with("norm.weight") { 1.0 } else { 0.0 };
    Numbers { key: stream_key(seed, &ids), centre, range: RANDOM_RANGE }
}

struct Loader<'a, D: Device> {
    device: &'a mut D,
    config: &'a ModelConfig,
    tensors: Tensors<'a>,
}

impl<D: Device> Loader<'_, D> {
    fn take(&mut self, name: &str, expected: &[usize]) -> Result<D::Weight, TrunkError> {
        match self.tensors {
            Tensors::Random { dtype, seed } => Ok(self.device.random(expected, dtype, numbers(name, seed))?),
            Tensors::Stored(tensors) => Ok(self.device.load(stored(tensors, name, expected)?)?),
        }
    }

    /// Weights that are used together: a name and a shape each.
    fn take_together<'p>(&mut self, parts: &'p [(String, Vec<usize>)]) -> Result<Vec<D::Weight>, TrunkError> {
        let tensors = self.tensors;
        let source = |(name, shape): &'p (String, Vec<usize>)| match tensors {
            Tensors::Random { dtype, seed } => Ok(Source::Random { shape, dtype, numbers: numbers(name, seed) }),
            Tensors::Stored(tensors) => stored(tensors, name, shape).map(Source::Stored),
        };
        let sources = parts.iter().map(source).collect::<Result<Vec<_>, TrunkError>>()?;
        Ok(self.device.load_together(&sources)?)
    }

    /// Modules that read the same x, as many as are named.
    fn linears<const N: usize>(&mut self, layer: usize, modules: [Module; N]) -> Result<[Linear<D>; N], TrunkError> {
        let path = |module: Module, what| format!("model.layers.{layer}.{}.{what}", module.path());
        let shape = |module| vec![self.config.module_out(module), self.config.module_in(module)];
        let weights: Vec<_> = modules.iter().map(|module| (path(*module, "weight"), shape(*module))).collect();
        let biased = self.config.qkv_bias && modules.iter().all(|module| matches!(module, Module::QProj | Module::KProj | Module::VProj));
        let biases: Vec<_> = modules.iter().map(|module| (path(*module, "bias"), vec![self.config.module_out(*module)])).collect();
        let mut weights = self.take_together(&weights)?.into_iter();
        let mut biases = if biased { self.take_together(&biases)? } else { Vec::new() }.into_iter();
        let mut linear = |_| Some(Linear { weight: weights.next()?, bias: biases.next() });
        let linears: Option<Vec<_>> = (0..N).map(&mut linear).collect();
        let fewer = || TrunkError::Device(DeviceError::Failed("fewer weights were loaded than asked for".into()));
        linears.and_then(|linears| linears.try_into().ok()).ok_or_else(fewer)
    }

    fn layer(&mut self, layer: usize) -> Result<Layer<D>, TrunkError> {
        let (hidden, head_dim) = (self.config.hidden_size, self.config.head_dim);
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let qk_norm = match self.config.architecture {
            Architecture::Qwen3 => {
                Some((self.take(&name("self_attn.q_norm"), &[head_dim])?, self.take(&name("self_attn.k_norm"), &[head_dim])?))
            }
            Architecture::Llama | Architecture::Mistral | Architecture::Qwen2 => None,
        };
        // The last layer's queries are of other rows than its keys.
        let last = layer + 1 == self.config.num_hidden_layers;
        let [k, v, q] = if last {
            let ([k, v], [q]) = (self.linears(layer, [Module::KProj, Module::VProj])?, self.linears(layer, [Module::QProj])?);
            [k, v, q]
        } else {
            self.linears(layer, [Module::KProj, Module::VProj, Module::QProj])?
        };
        let [o] = self.linears(layer, [Module::OProj])?;
        let [gate, up] = self.linears(layer, [Module::GateProj, Module::UpProj])?;
        let [down] = self.linears(layer, [Module::DownProj])?;
        let (input_norm, post_norm) =
            (self.take(&name("input_layernorm"), &[hidden])?, self.take(&name("post_attention_layernorm"), &[hidden])?);
        Ok(Layer { input_norm, post_norm, q, k, v, o, gate, up, down, qk_norm })
    }
}

/// A tensor of this shape.
fn stored<'t>(tensors: &'t BTreeMap<String, HostTensor>, name: &str, expected: &[usize]) -> Result<&'t HostTensor, TrunkError> {
    let tensor = tensors.get(name).ok_or_else(|| TrunkError::Missing { tensor: name.into(), expected: expected.into() })?;
    if tensor.shape() == expected {
        return Ok(tensor);
    }
    Err(TrunkError::Shape { tensor: name.into(), expected: expected.into(), found: tensor.shape().into() })
}

/// Sizes that no tensor's shape can give away.
fn check_sizes(config: &ModelConfig) -> Result<(), TrunkError> {
    let refuse = |text: String| Err(TrunkError::Config(text));
    let sizes = [
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.num_key_value_heads),
        ("vocab_size", config.vocab_size),
        ("max_position_embeddings", config.max_position_embeddings),
        ("sliding_window", config.sliding_window.unwrap_or(1)),
    ];
    if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return refuse(format!("{name} is 0, expected at least 1"));
    }
    let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
    if !heads.is_multiple_of(kv_heads) {
        return refuse(format!("num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads, {heads}"));
    }
    if config.head_dim == 0 || !config.head_dim.is_multiple_of(2) {
        return refuse(format!("head_dim is {}, expected an even number above 0", config.head_dim));
    }
    Ok(())
}
