//! Cosines and sines of the rotary embedding, as transformers computes them (`modeling_rope_utils.py`).
//!
//! Knows no device: sizes in, numbers out. Every step is in float32 by `libm`, so that a table's bits are the same on every machine.

use std::f64::consts::PI;

use nodus_protocol::{ModelConfig, RopeScaling};

/// For each position of the trunk's context: `head_dim / 2` cosines, then as many sines.
pub(crate) fn table(config: &ModelConfig) -> Vec<f32> {
    let (frequencies, scale) = frequencies(config);
    let mut table = Vec::with_capacity(config.max_position_embeddings * frequencies.len() * 2);
    for position in 0..config.max_position_embeddings {
        let angle = |frequency: &f32| position as f32 * frequency;
        table.extend(frequencies.iter().map(|f| libm::cosf(angle(f)) * scale));
        table.extend(frequencies.iter().map(|f| libm::sinf(angle(f)) * scale));
    }
    table
}

/// One inverse frequency for each pair of features, and the factor on cosine and sine.
fn frequencies(config: &ModelConfig) -> (Vec<f32>, f32) {
    let dim = config.head_dim;
    let periods = (0..dim / 2).map(|i| libm::powf(config.rope_theta as f32, (2 * i) as f32 / dim as f32));
    match config.rope_scaling {
        None => (periods.map(|p| 1.0 / p).collect(), 1.0),
        Some(RopeScaling::Linear { factor }) => (periods.map(|p| 1.0 / p / factor).collect(), 1.0),
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }) => {
            let context = original_max_position_embeddings as f32;
            (periods.map(|p| llama3(1.0 / p, factor, low_freq_factor, high_freq_factor, context)).collect(), 1.0)
        }
        Some(RopeScaling::Yarn { factor, beta_fast, beta_slow, attention_factor, original_max_position_embeddings }) => {
            let context = f64::from(original_max_position_embeddings);
            let (low, high) = yarn_range(beta_fast, beta_slow, dim, config.rope_theta, context);
            let blend = |(i, period): (usize, f32)| {
                let kept = 1.0 - ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 / (factor * period)) * (1.0 - kept) + (1.0 / period) * kept
            };
            (periods.enumerate().map(blend).collect(), attention_factor)
        }
    }
}

/// Llama 3.1: low frequencies are slowed by `factor`, high ones kept, those between blended.
fn llama3(frequency: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let wavelength = 2.0 * std::f32::consts::PI / frequency;
    if wavelength > context / low {
        return frequency / factor;
    }
    if wavelength < context / high {
        return frequency;
    }
    let smooth = (context / wavelength - low) / (high - low);
    (1.0 - smooth) * frequency / factor + smooth * frequency
}

/// YaRN: the pairs of features between which frequencies are blended, from those that turn `beta_fast` to those that turn `beta_slow` times
/// within the original context.
fn yarn_range(beta_fast: f32, beta_slow: f32, dim: usize, theta: f64, context: f64) -> (f32, f32) {
    let pair = |turns: f32| dim as f64 * libm::log(context / (f64::from(turns) * 2.0 * PI)) / (2.0 * libm::log(theta));
    let low = libm::floor(pair(beta_fast)).max(0.0);
    let high = libm::ceil(pair(beta_slow)).min(dim as f64 - 1.0);
    (low as f32, if low == high { high as f32 + 0.001 } else { high as f32 })
}

#[cfg(test)]
mod tests {
    use nodus_protocol::{Architecture, ModelConfig, RopeScaling};

    use super::{frequencies, table};

    fn config(rope_theta: f64, rope_scaling: Option<RopeScaling>) -> ModelConfig {
        ModelConfig {
            architecture: Architecture::Llama,
            hidden_size: 32,
            intermediate_size: 32,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            head_dim: 16,
            vocab_size: 8,
            max_position_embeddings: 128,
            rms_norm_eps: 1e-5,
            rope_theta,
            rope_scaling,
            sliding_window: None,
            qkv_bias: false,
            tie_word_embeddings: true,
            eos_token_id: None,
            bos_token_id: None,
        }
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 2e-7 * expected.abs().max(0.1), "{found} instead of {expected}");
        }
    }

    /// Inverse frequencies of transformers 5.24.0's `LlamaRotaryEmbedding` for the same parameters.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let plain = [1.0, 0.316_227_76, 0.1, 0.031_622_78, 0.01, 0.003_162_277_9, 0.001, 0.000_316_227_8];
        assert_close(&frequencies(&config(1e4, None)).0, &plain);

        let linear = RopeScaling::Linear { factor: 4.0 };
        assert_close(&frequencies(&config(1e4, Some(linear))).0, &plain.map(|f| f / 4.0));

        let llama3 = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 64 };
        let expected =
            [1.0, 0.079_403_01, 0.004_700_754, 0.000_911_583_13, 0.000_176_776_68, 3.428_102_4e-5, 6.647_869_7e-6, 1.289_173_2e-6];
        assert_close(&frequencies(&config(5e5, Some(llama3))).0, &expected);

        let attention_factor = 1.138_629_4;
        let yarn =
            RopeScaling::Yarn { factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, attention_factor, original_max_position_embeddings: 64 };
        let expected = [1.0, 0.237_170_82, 0.049_999_997, 0.007_905_695, 0.0025, 0.000_790_569_47, 0.000_25, 7.905_695e-5];
        let (found, scale) = frequencies(&config(1e4, Some(yarn)));
        assert_close(&found, &expected);
        assert_eq!(scale.to_bits(), attention_factor.to_bits());
    }

    /// The row of position 7 of the same embedding.
    #[test]
    fn the_table_holds_cosines_then_sines_by_position() {
        let table = table(&config(1e4, None));
        assert_eq!(table.len(), 128 * 16);
        let expected = [
            0.753_902_26,
            -0.599_437_5,
            0.764_842_2,
            0.975_599_9,
            0.997_551,
            0.999_755,
            0.999_975_5,
            0.999_997_56, //
            0.656_986_6,
            0.800_421_6,
            0.644_217_67,
            0.219_556_1,
            0.069_942_85,
            0.022_134_136,
            0.006_999_943,
            0.002_213_592_6,
        ];
        assert_close(&table[7 * 16..8 * 16], &expected);
    }
}
