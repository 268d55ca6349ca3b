//! Models of random weights in the shapes of known ones, for benchmarks: a recipe is stored, and the device makes the weights at load.
//!
//! Never stores a weight. The recipe's digest is the model's.

use clap::ValueEnum;
use nodus_kernels::DType;
use nodus_protocol::{Architecture, Digest, ModelConfig, Module, RopeScaling};
use serde::{Deserialize, Serialize};

use crate::cli::Dtype;

/// The recipe's file in a model's folder.
pub(crate) const FILE: &str = "recipe.json";
/// How the weights follow from the rest; another way gets another name.
const GENERATOR: &str = "philox-uniform-1";

/// A shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// Llama-3-8B.
    #[value(name = "llama-8b")]
    Llama8b,
    /// TinyLlama-1.1B.
    #[value(name = "llama-1.1b")]
    Llama1_1b,
    /// Llama-3.2-1B.
    #[value(name = "llama-1b")]
    Llama1b,
    /// Qwen2.5-0.5B.
    #[value(name = "qwen2.5-0.5b")]
    Qwen2_5_0_5b,
    /// SmolLM2-135M.
    #[value(name = "smollm2-135m")]
    SmolLm2_135m,
}

/// Everything that the weights are a function of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Recipe {
    generator: String,
    /// The sizes.
    pub(crate) config: ModelConfig,
    /// Of every weight.
    pub(crate) seed: u64,
    dtype: Stored,
}

/// The type that weights are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Stored {
    F32,
    Bf16,
}

impl Recipe {
    /// A recipe.
    pub(crate) fn new(shape: Shape, seed: u64, dtype: Dtype) -> Self {
        let dtype = match dtype {
            Dtype::F32 => Stored::F32,
            Dtype::Bf16 => Stored::Bf16,
        };
        Self { generator: GENERATOR.to_owned(), config: shape.config(), seed, dtype }
    }

    /// The type of the weights.
    pub(crate) fn dtype(&self) -> DType {
        match self.dtype {
            Stored::F32 => DType::F32,
            Stored::Bf16 => DType::BF16,
        }
    }

    /// Number of weights, biases and norms too.
    pub(crate) fn parameters(&self) -> u64 {
        let config = &self.config;
        let hidden = config.hidden_size;
        let biased = |module| config.qkv_bias && matches!(module, Module::QProj | Module::KProj | Module::VProj);
        let module = |module| config.module_out(module) * (config.module_in(module) + usize::from(biased(module)));
        let layer = Module::ALL.into_iter().map(module).sum::<usize>() + 2 * hidden;
        let tables = if config.tie_word_embeddings { 1 } else { 2 };
        (config.num_hidden_layers * layer + tables * config.vocab_size * hidden + hidden) as u64
    }

    /// As it is stored.
    ///
    /// # Errors
    /// None that can happen: it holds no map and no number that JSON lacks.
    pub(crate) fn text(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// What was stored, and its digest; none where it is no recipe of this version.
    pub(crate) fn read(text: &[u8]) -> Option<(Self, Digest)> {
        let recipe: Self = serde_json::from_slice(text).ok()?;
        (recipe.generator == GENERATOR).then(|| (recipe, Digest::of(text)))
    }
}

impl Shape {
    /// As its `config.json` has it.
    pub(crate) fn config(self) -> ModelConfig {
        let llama = ModelConfig {
            architecture: Architecture::Llama,
            hidden_size: 4096,
            intermediate_size: 14_336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: 128,
            vocab_size: 128_256,
            max_position_embeddings: 8192,
            rms_norm_eps: 1e-5,
            rope_theta: 500_000.0,
            rope_scaling: None,
            sliding_window: None,
            qkv_bias: false,
            tie_word_embeddings: false,
            eos_token_id: None,
            bos_token_id: None,
        };
        let small = ModelConfig { head_dim: 64, ..llama.clone() };
        match self {
            Self::Llama8b => llama,
            Self::Llama1_1b => ModelConfig {
                hidden_size: 2048,
                intermediate_size: 5632,
                num_hidden_layers: 22,
                num_key_value_heads: 4,
                vocab_size: 32_000,
                max_position_embeddings: 2048,
                rope_theta: 10_000.0,
                ..small
            },
            Self::Llama1b => ModelConfig {
                hidden_size: 2048,
                intermediate_size: 8192,
                num_hidden_layers: 16,
                max_position_embeddings: 131_072,
                rope_scaling: Some(RopeScaling::Llama3 {
                    factor: 32.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_position_embeddings: 8192,
                }),
                tie_word_embeddings: true,
                ..small
            },
            Self::Qwen2_5_0_5b => ModelConfig {
                architecture: Architecture::Qwen2,
                hidden_size: 896,
                intermediate_size: 4864,
                num_hidden_layers: 24,
                num_attention_heads: 14,
                num_key_value_heads: 2,
                vocab_size: 151_936,
                max_position_embeddings: 32_768,
                rms_norm_eps: 1e-6,
                rope_theta: 1_000_000.0,
                qkv_bias: true,
                tie_word_embeddings: true,
                ..small
            },
            Self::SmolLm2_135m => ModelConfig {
                hidden_size: 576,
                intermediate_size: 1536,
                num_hidden_layers: 30,
                num_attention_heads: 9,
                num_key_value_heads: 3,
                vocab_size: 49_152,
                rope_theta: 100_000.0,
                tie_word_embeddings: true,
                ..small
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;
    use nodus_kernels::DType;
    use nodus_protocol::Digest;

    use super::{Recipe, Shape};
    use crate::cli::Dtype;

    #[test]
    fn shapes_have_the_parameters_of_their_models() {
        let counts = [8_030_261_248, 1_100_048_384, 1_235_814_400, 494_032_768, 134_515_008];
        for (shape, count) in Shape::value_variants().iter().zip(counts) {
            assert_eq!(Recipe::new(*shape, 0, Dtype::Bf16).parameters(), count, "{shape:?}");
        }
    }

    #[test]
    fn a_recipe_is_what_its_text_says() {
        let recipe = Recipe::new(Shape::Llama1b, 7, Dtype::Bf16);
        let text = recipe.text().unwrap();
        assert_eq!(Recipe::read(text.as_bytes()).unwrap(), (recipe.clone(), Digest::of(text.as_bytes())));
        assert_eq!(recipe.dtype(), DType::BF16);
        assert!(Recipe::read(text.replace("-1\"", "-2\"").as_bytes()).is_none());
        assert_ne!(text, Recipe::new(Shape::Llama1b, 8, Dtype::Bf16).text().unwrap());
    }
}
