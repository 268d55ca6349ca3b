//! GGUF metadata to a `config.json`.
//!
//! Refuses by name whatever would change the computation and is not computed; what llama.cpp derives, it derives the same way.

use std::f64::consts::PI;

use serde_json::{Map, Value, json};

use super::dequantise::dequantise;
use super::reader::Gguf;
use crate::error::{FormatError, Place};

/// The architectures whose tensors are known here.
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// The name in `general.architecture`.
pub(super) fn architecture<'a>(gguf: &Gguf<'a>) -> Result<&'a str, FormatError> {
    let key = "general.architecture";
    let name = gguf.text(key)?.ok_or_else(|| gguf.wrong(key, "one of llama, qwen2, qwen3"))?;
    if !ARCHITECTURES.contains(&name) {
        return Err(gguf.unsupported(key, &format!("the architecture `{name}`"), "one of llama, qwen2, qwen3"));
    }
    if gguf.uint("split.count")?.unwrap_or(1) > 1 {
        return Err(gguf.unsupported("split.count", "a model in several files", "one file; llama.cpp's gguf-split --merge makes it"));
    }
    Ok(name)
}

/// The configuration under transformers' keys.
pub(super) fn config(gguf: &Gguf<'_>, architecture: &str) -> Result<Map<String, Value>, FormatError> {
    let key = |name: &str| format!("{architecture}.{name}");
    let uint = |name: &str| gguf.uint(&key(name));
    let needed = |name: &str| uint(name)?.ok_or_else(|| gguf.wrong(&key(name), "a whole number"));
    if uint("expert_count")?.unwrap_or(0) > 0 {
        return Err(gguf.unsupported(&key("expert_count"), "a mixture of experts", "a dense model"));
    }
    let (hidden, heads) = (needed("embedding_length")?, needed("attention.head_count")?);
    let head_dim = match uint("attention.key_length")? {
        Some(n) => n,
        None => hidden.checked_div(heads).ok_or_else(|| gguf.wrong(&key("attention.head_count"), "above 0"))?,
    };
    for name in ["attention.value_length", "rope.dimension_count"] {
        if uint(name)?.is_some_and(|n| n != head_dim) {
            return Err(gguf.unsupported(&key(name), &format!("another size than the head's {head_dim}"), "the whole head"));
        }
    }
    let window = uint("attention.sliding_window")?.filter(|n| *n > 0);
    if window.is_some() && architecture != "llama" {
        return Err(gguf.unsupported(&key("attention.sliding_window"), "a sliding window of a Qwen model", "none"));
    }
    let eps_key = key("attention.layer_norm_rms_epsilon");
    let eps = gguf.float(&eps_key)?.ok_or_else(|| gguf.wrong(&eps_key, "a number"))?;
    let theta = gguf.float(&key("rope.freq_base"))?.unwrap_or(10_000.0);
    let vocabulary = gguf.tensors.get("token_embd.weight").and_then(|t| t.shape.first().copied());
    let missing = || FormatError::invalid(gguf.file, Place::tensor("token_embd.weight"), "absent", "the embedding");
    let vocabulary = vocabulary.ok_or_else(missing)?;
    // llama.cpp stores Mistral as Llama; the window, where there is one, tells.
    let model_type = if window.is_some() { "mistral" } else { architecture };
    let mut config = Map::new();
    let mut set = |name: &str, value: Value| config.insert(name.to_owned(), value);
    set("architectures", json!([class(model_type)]));
    set("model_type", json!(model_type));
    set("vocab_size", json!(vocabulary));
    set("hidden_size", json!(hidden));
    set("intermediate_size", json!(needed("feed_forward_length")?));
    set("num_hidden_layers", json!(needed("block_count")?));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(uint("attention.head_count_kv")?.unwrap_or(heads)));
    set("head_dim", json!(head_dim));
    set("max_position_embeddings", json!(needed("context_length")?));
    set("rms_norm_eps", json!(shortest(eps)));
    set("rope_theta", json!(shortest(theta)));
    set("rope_scaling", rope_scaling(gguf, architecture, head_dim, theta)?);
    set("hidden_act", json!("silu"));
    set("tie_word_embeddings", json!(!gguf.tensors.contains_key("output.weight")));
    set("attention_bias", json!(false));
    match model_type {
        "llama" => set("mlp_bias", json!(false)),
        "mistral" => set("sliding_window", json!(window)),
        _ => set("use_sliding_window", json!(false)),
    };
    for (name, key) in [("bos_token_id", "tokenizer.ggml.bos_token_id"), ("eos_token_id", "tokenizer.ggml.eos_token_id")] {
        set(name, json!(gguf.uint(key)?));
    }
    set("torch_dtype", json!("float32"));
    Ok(config)
}

fn class(model_type: &str) -> &'static str {
    match model_type {
        "mistral" => "MistralForCausalLM",
        "qwen2" => "Qwen2ForCausalLM",
        "qwen3" => "Qwen3ForCausalLM",
        _ => "LlamaForCausalLM",
    }
}

/// A float32 of the file as the shortest decimal that means it: 1e-5, not 9.999999747378752e-6.
#[expect(clippy::cast_possible_truncation, reason = "metadata floats are float32 in the file")]
fn shortest(x: f64) -> f64 {
    (x as f32).to_string().parse().unwrap_or(x)
}

fn rope_scaling(gguf: &Gguf<'_>, architecture: &str, head_dim: u64, theta: f64) -> Result<Value, FormatError> {
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    if let Some(name) = ["attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"].into_iter().find(|name| {
        let neutral = if *name == "yarn_log_multiplier" { 0.0 } else { 1.0 };
        matches!(gguf.float(&key(name)), Ok(Some(x)) if x != neutral)
    }) {
        return Err(gguf.unsupported(&key(name), "another attention factor than YaRN's own", "none"));
    }
    if gguf.tensors.contains_key("rope_freqs.weight") {
        return llama3(gguf, head_dim, theta);
    }
    let old = gguf.float(&format!("{architecture}.rope.scale_linear"))?;
    let factor = gguf.float(&key("factor"))?.or(old);
    let kind = gguf.text(&key("type"))?.unwrap_or(if factor.is_some_and(|f| f != 1.0) { "linear" } else { "none" });
    let factor = || factor.map(shortest).ok_or_else(|| gguf.wrong(&key("factor"), "a number"));
    match kind {
        "none" => Ok(Value::Null),
        "linear" => Ok(json!({"rope_type": "linear", "factor": factor()?})),
        "yarn" => {
            // Null where the file does not say: then the default is transformers' and llama.cpp's own.
            let beta = |name: &str| -> Result<_, FormatError> { Ok(gguf.float(&key(name))?.map(shortest)) };
            Ok(json!({"rope_type": "yarn", "factor": factor()?,
                "original_max_position_embeddings": gguf.uint(&key("original_context_length"))?,
                "beta_fast": beta("yarn_beta_fast")?, "beta_slow": beta("yarn_beta_slow")?}))
        }
        other => Err(gguf.unsupported(&key("type"), &format!("rope scaling `{other}`"), "one of none, linear, yarn")),
    }
}

/// llama.cpp keeps Llama 3's scaling as one divisor for each frequency (`convert_hf_to_gguf.py`). Its parameters are found
/// again by trying what Llama 3.1 to 3.3 use; divisors that they do not explain are refused.
fn llama3(gguf: &Gguf<'_>, head_dim: u64, theta: f64) -> Result<Value, FormatError> {
    const NAME: &str = "rope_freqs.weight";
    let unexplained = |what: &str| {
        let expected = "those of Llama 3 (low and high frequency factors 1 and 4, original context 8192)";
        Err(FormatError::unsupported(gguf.file, Place::tensor(NAME), what, expected))
    };
    let Some(tensor) = gguf.tensors.get(NAME) else { return Ok(Value::Null) };
    if tensor.shape.iter().product::<usize>() as u64 != head_dim / 2 {
        return unexplained("divisors of another number than half a head");
    }
    let mut found = Vec::new();
    dequantise(tensor.kind, tensor.data, &mut found);
    let factor = found.iter().copied().fold(1.0_f32, f32::max);
    if factor == 1.0 && found.iter().all(|x| *x == 1.0) {
        return Ok(Value::Null);
    }
    let (low, high, original) = (1.0, 4.0, 8192.0);
    for (i, found) in found.iter().enumerate() {
        let wavelength = 2.0 * PI * theta.powf(2.0 * i as f64 / head_dim as f64);
        let expected = if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            f64::from(factor)
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)
        };
        if (f64::from(*found) / expected - 1.0).abs() > 1e-4 || !found.is_finite() {
            return unexplained("divisors of the rotary frequencies");
        }
    }
    Ok(json!({"rope_type": "llama3", "factor": shortest(f64::from(factor)), "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": 8192}))
}
