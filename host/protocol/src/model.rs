//! What a trunk is: the architecture and its sizes, by the names of transformers' `config.json`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A decoder family the engine can compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Llama and what shares its code: SmolLM, SmolLM2, TinyLlama.
    Llama,
    /// Mistral: Llama, perhaps with a sliding window.
    Mistral,
    /// Qwen2: Llama with biases on q, k and v.
    Qwen2,
    /// Qwen3: Llama with RMS norms on each head of q and k.
    Qwen3,
}

impl Architecture {
    /// The `model_type` of transformers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// How rotary frequencies are changed for contexts beyond the pre-trained one (transformers, `modeling_rope_utils.py`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Positions divided by `factor`.
    Linear {
        /// By how much the context grows.
        factor: f32,
    },
    /// Llama 3.1's piecewise scaling.
    Llama3 {
        /// By how much low frequencies are slowed.
        factor: f32,
        /// Wavelengths above context / this are slowed.
        low_freq_factor: f32,
        /// Wavelengths below context / this are kept.
        high_freq_factor: f32,
        /// The context it was pre-trained with.
        original_max_position_embeddings: u32,
    },
    /// YaRN (Peng et al., 2023).
    Yarn {
        /// By how much the context grows.
        factor: f32,
        /// Rotations above which frequencies are kept; 32 where the file does not say.
        beta_fast: f32,
        /// Rotations below which they are interpolated; 1 where the file does not say.
        beta_slow: f32,
        /// Scale on cosine and sine, already resolved (0.1 ln(factor) + 1 where the file does not say).
        attention_factor: f32,
        /// The context it was pre-trained with.
        original_max_position_embeddings: u32,
    },
}

/// The sizes of a trunk. Names are those of transformers' `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Which family.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; divides the number of query heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Number of tokens the embedding knows.
    pub vocab_size: usize,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Change of the rotary frequencies, if any.
    pub rope_scaling: Option<RopeScaling>,
    /// A row sees itself and this many rows less one before it; none: all before it.
    pub sliding_window: Option<usize>,
    /// Whether q, k and v add a bias.
    pub qkv_bias: bool,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// The end-of-sequence token, where the model names one.
    pub eos_token_id: Option<u32>,
    /// The beginning-of-sequence token, where the model names one.
    pub bos_token_id: Option<u32>,
}

impl ModelConfig {
    /// Width of what a module reads.
    #[must_use]
    pub fn module_in(&self, module: Module) -> usize {
        match module {
            Module::QProj | Module::KProj | Module::VProj | Module::GateProj | Module::UpProj => self.hidden_size,
            Module::OProj => self.num_attention_heads * self.head_dim,
            Module::DownProj => self.intermediate_size,
        }
    }

    /// Width of what a module writes.
    #[must_use]
    pub fn module_out(&self, module: Module) -> usize {
        match module {
            Module::QProj => self.num_attention_heads * self.head_dim,
            Module::KProj | Module::VProj => self.num_key_value_heads * self.head_dim,
            Module::GateProj | Module::UpProj => self.intermediate_size,
            Module::OProj | Module::DownProj => self.hidden_size,
        }
    }
}

/// A linear module of a decoder layer, in the order of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the variants are the field's own names")]
pub enum Module {
    QProj,
    KProj,
    VProj,
    OProj,
    GateProj,
    UpProj,
    DownProj,
}

/// A text that names no linear module.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no linear module: expected one of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj")]
pub struct UnknownModule(String);

impl Module {
    /// All of them; PEFT's `all-linear`.
    pub const ALL: [Self; 7] = [Self::QProj, Self::KProj, Self::VProj, Self::OProj, Self::GateProj, Self::UpProj, Self::DownProj];

    /// The name in transformers, for example `q_proj`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
        }
    }

    /// The path inside a decoder layer, for example `self_attn.q_proj`.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::QProj => "self_attn.q_proj",
            Self::KProj => "self_attn.k_proj",
            Self::VProj => "self_attn.v_proj",
            Self::OProj => "self_attn.o_proj",
            Self::GateProj => "mlp.gate_proj",
            Self::UpProj => "mlp.up_proj",
            Self::DownProj => "mlp.down_proj",
        }
    }
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Module {
    type Err = UnknownModule;

    fn from_str(name: &str) -> Result<Self, UnknownModule> {
        Self::ALL.into_iter().find(|m| m.name() == name).ok_or_else(|| UnknownModule(name.chars().take(80).collect()))
    }
}
