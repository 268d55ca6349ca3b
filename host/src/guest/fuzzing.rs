//! What a guest process and its parent hear, for the fuzzer: bytes to words, and what the parent checks of them.
//!
//! Built by `cargo fuzz` alone.

use nodus_protocol::frame::{decode, encode};
use nodus_protocol::{Architecture, ModelConfig};
use nodus_sandbox::Limits;
use nodus_sandbox::services::Event;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::bounds::Bounds;
use super::compile::Compiled;
use super::words::{FromJob, Question, ToGuest, ToParent};

/// Reads bytes as everything that travels between the two processes.
///
/// # Panics
/// Something holds that must not.
pub fn words(data: &[u8]) {
    back_and_forth::<ToGuest>(data);
    back_and_forth::<Compiled>(data);
    let limits = Limits { log_bytes: 100, metrics: 2, progress_reports: 2, ..Limits::DEFAULT };
    let mut bounds = Bounds::new(limits);
    match back_and_forth::<ToParent>(data) {
        Some(ToParent::Of(_, FromJob::Event(event))) => {
            // What is bounded is refused some time.
            let told = (0..2000).take_while(|_| bounds.event(&event, 1).is_ok()).count();
            assert!(told < 2000 || matches!(event, Event::Step { .. } | Event::Evaluation { .. }), "{event:?}");
        }
        Some(ToParent::Of(_, FromJob::Ask(_, Question::Save(name, weights)))) => {
            if bounds.save(&name, &weights, &model()).is_ok() {
                assert!(weights.validate(&model()).is_ok());
            }
        }
        _ => {}
    }
}

/// What can be read can be written, and is then read as the same.
fn back_and_forth<T: Serialize + DeserializeOwned>(data: &[u8]) -> Option<T> {
    let value: T = decode(data).ok()?;
    let written = encode(&value).ok()?;
    let again: Option<T> = decode(&written).ok();
    assert_eq!(again.and_then(|again| encode(&again).ok()), Some(written), "it reads back as something else");
    Some(value)
}

fn model() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 8,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 4,
        vocab_size: 300,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        sliding_window: None,
        qkv_bias: false,
        tie_word_embeddings: true,
        eos_token_id: Some(2),
        bos_token_id: None,
    }
}
