//! `config.json` of a Hugging Face folder to a [`ModelConfig`], with the defaults of transformers' configuration classes.
//!
//! Refuses by name whatever would change the computation and is not computed here; never guesses a size.

use nodus_protocol::{Architecture, ModelConfig};
use serde_json::Value;

use crate::error::{FormatError, Place, clip};
use crate::json::{Object, parse as parse_json};
use crate::rope;

/// The file's name.
pub(crate) const FILE: &str = "config.json";

/// Longest context that is taken: tables of the rotary embedding have a row for each position.
const CONTEXT_MAX: usize = 1 << 20;

/// Parses the file's bytes.
pub(crate) fn parse(bytes: &[u8]) -> Result<ModelConfig, FormatError> {
    let map = parse_json(FILE, bytes)?;
    let c = Object::new(FILE, &map);
    let architecture = architecture(c)?;
    plain(c, architecture)?;
    let size = |key| c.required(key, c.size(key)?, "a whole number");
    let (hidden_size, heads) = (size("hidden_size")?, size("num_attention_heads")?);
    let max_position_embeddings = size("max_position_embeddings")?;
    if max_position_embeddings > CONTEXT_MAX {
        let expected = format!("at most {CONTEXT_MAX}");
        return Err(FormatError::invalid(FILE, Place::key("max_position_embeddings"), max_position_embeddings, expected));
    }
    let (rope_theta, rope_scaling) = rope::parse(c, max_position_embeddings)?;
    let num_hidden_layers = size("num_hidden_layers")?;
    let config = ModelConfig {
        architecture,
        hidden_size,
        intermediate_size: size("intermediate_size")?,
        num_hidden_layers,
        num_attention_heads: heads,
        num_key_value_heads: key_value_heads(c, architecture, heads)?,
        head_dim: head_dim(c, architecture, hidden_size, heads)?,
        vocab_size: size("vocab_size")?,
        max_position_embeddings,
        rms_norm_eps: rms_norm_eps(c)?,
        rope_theta,
        rope_scaling,
        sliding_window: sliding_window(c, architecture, num_hidden_layers)?,
        qkv_bias: architecture == Architecture::Qwen2,
        tie_word_embeddings: c.bool("tie_word_embeddings")?.unwrap_or(false),
        eos_token_id: token(c, "eos_token_id")?,
        bos_token_id: token(c, "bos_token_id")?,
    };
    check(&config)?;
    Ok(config)
}

/// A token id of `config.json` or `generation_config.json`; of a list the first.
pub(crate) fn token(c: Object<'_>, key: &str) -> Result<Option<u32>, FormatError> {
    let value = match c.get(key) {
        Some(Value::Array(list)) => list.first(),
        other => other,
    };
    let Some(value) = value else { return Ok(None) };
    value.as_u64().and_then(|id| u32::try_from(id).ok()).map(Some).ok_or_else(|| c.wrong(key, value, "a token id or a list of them"))
}

fn architecture(c: Object<'_>) -> Result<Architecture, FormatError> {
    let name = c.required("model_type", c.string("model_type")?, "one of llama, mistral, qwen2, qwen3")?;
    [Architecture::Llama, Architecture::Mistral, Architecture::Qwen2, Architecture::Qwen3]
        .into_iter()
        .find(|a| a.name() == name)
        .ok_or_else(|| c.unsupported("model_type", format!("the architecture `{}`", clip(&name)), "one of llama, mistral, qwen2, qwen3"))
}

/// Refuses what would change the computation.
fn plain(c: Object<'_>, architecture: Architecture) -> Result<(), FormatError> {
    let act = c.string("hidden_act")?.unwrap_or_else(|| "silu".into());
    if act != "silu" {
        return Err(c.unsupported("hidden_act", format!("the activation `{}`", clip(&act)), "silu"));
    }
    // Llama's and Qwen3's attention_bias puts a bias on o as well, which Qwen2, the one family with biases here, does not have.
    let bias = c.bool("attention_bias")?.unwrap_or(false);
    if bias && architecture != Architecture::Qwen2 {
        return Err(c.unsupported("attention_bias", "a bias on o_proj", "false"));
    }
    if c.bool("mlp_bias")?.unwrap_or(false) {
        return Err(c.unsupported("mlp_bias", "a bias in the MLP", "false"));
    }
    if c.get("quantization_config").is_some() {
        return Err(c.unsupported("quantization_config", "a quantised checkpoint", "plain F32, F16 or BF16 weights, or a GGUF file"));
    }
    Ok(())
}

fn key_value_heads(c: Object<'_>, architecture: Architecture, heads: usize) -> Result<usize, FormatError> {
    if let Some(n) = c.size("num_key_value_heads")? {
        return Ok(n);
    }
    // Null means as many as query heads; where the key is absent, each class has its own default.
    Ok(match architecture {
        _ if c.has("num_key_value_heads") => heads,
        Architecture::Llama => heads,
        Architecture::Mistral => 8,
        Architecture::Qwen2 | Architecture::Qwen3 => 32,
    })
}

fn head_dim(c: Object<'_>, architecture: Architecture, hidden: usize, heads: usize) -> Result<usize, FormatError> {
    if let Some(n) = c.size("head_dim")? {
        return Ok(n);
    }
    if architecture == Architecture::Qwen3 {
        return Ok(128);
    }
    if !hidden.is_multiple_of(heads) {
        let found = format!("{hidden}, which {heads} heads do not divide");
        return Err(FormatError::invalid(FILE, Place::key("hidden_size"), found, "an explicit head_dim"));
    }
    Ok(hidden / heads)
}

#[expect(clippy::cast_possible_truncation, reason = "the norm is computed in float32")]
fn rms_norm_eps(c: Object<'_>) -> Result<f32, FormatError> {
    Ok(c.between("rms_norm_eps", 1e-12, 1e-2)?.unwrap_or(1e-6) as f32)
}

fn sliding_window(c: Object<'_>, architecture: Architecture, layers: usize) -> Result<Option<usize>, FormatError> {
    let window = match c.size("sliding_window")? {
        None if !c.has("sliding_window") => Some(4096),
        window => window,
    };
    match architecture {
        Architecture::Llama => Ok(None),
        Architecture::Mistral => Ok(window),
        Architecture::Qwen2 | Architecture::Qwen3 if c.bool("use_sliding_window")? == Some(true) => qwen_window(c, window, layers),
        Architecture::Qwen2 | Architecture::Qwen3 => Ok(None),
    }
}

/// Qwen may slide in some layers only. All or none is supported, and resolved here.
fn qwen_window(c: Object<'_>, window: Option<usize>, layers: usize) -> Result<Option<usize>, FormatError> {
    let Some(window) = window else { return Ok(None) };
    let mixed = |key| Err(c.unsupported(key, "a sliding window in some layers only", "a window in all layers or in none"));
    if let Some(types) = c.typed::<Vec<String>>("layer_types", "a list of strings")? {
        let sliding = types.iter().filter(|t| *t == "sliding_attention").count();
        return match sliding {
            0 => Ok(None),
            n if n == types.len() => Ok(Some(window)),
            _ => mixed("layer_types"),
        };
    }
    // Layers below it do not slide.
    match c.typed::<usize>("max_window_layers", "a whole number")?.unwrap_or(28) {
        0 => Ok(Some(window)),
        n if n >= layers => Ok(None),
        _ => mixed("max_window_layers"),
    }
}

fn check(config: &ModelConfig) -> Result<(), FormatError> {
    let bad = |key: &str, found: String, expected: &str| Err(FormatError::invalid(FILE, Place::key(key), found, expected));
    let (heads, kv) = (config.num_attention_heads, config.num_key_value_heads);
    if !heads.is_multiple_of(kv) {
        return bad(
            "num_key_value_heads",
            format!("{kv}, which does not divide the {heads} query heads"),
            "a divisor of num_attention_heads",
        );
    }
    if !config.head_dim.is_multiple_of(2) {
        return bad("head_dim", format!("{}, which is odd", config.head_dim), "an even number");
    }
    for (key, id) in [("eos_token_id", config.eos_token_id), ("bos_token_id", config.bos_token_id)] {
        if let Some(id) = id.filter(|id| *id as usize >= config.vocab_size) {
            return bad(key, id.to_string(), &format!("below the vocabulary of {}", config.vocab_size));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 128, "eos_token_id": [2, 3], "bos_token_id": 1, "torch_dtype": "bfloat16"}"#;

    fn with(changes: &str) -> Result<ModelConfig, String> {
        let mut map = parse_json(FILE, LLAMA.as_bytes()).unwrap();
        map.extend(parse_json(FILE, changes.as_bytes()).unwrap());
        parse(serde_json::to_string(&map).unwrap().as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let c = with("{}").unwrap();
        assert_eq!((c.head_dim, c.num_key_value_heads, c.rms_norm_eps), (16, 4, 1e-6));
        assert_eq!((c.eos_token_id, c.bos_token_id), (Some(2), Some(1)));
        assert!(!c.tie_word_embeddings && !c.qkv_bias && c.sliding_window.is_none());
        assert!(with(r#"{"model_type": "qwen2", "num_key_value_heads": 2}"#).unwrap().qkv_bias);
        assert_eq!(with(r#"{"model_type": "qwen3", "num_key_value_heads": 2}"#).unwrap().head_dim, 128);
        assert_eq!(with(r#"{"model_type": "mistral", "num_key_value_heads": null}"#).unwrap().num_key_value_heads, 4);
        assert_eq!(with(r#"{"head_dim": 32}"#).unwrap().head_dim, 32);
    }

    #[test]
    fn the_longest_context_is_taken() {
        assert_eq!(with(r#"{"max_position_embeddings": 1048576}"#).unwrap().max_position_embeddings, 1 << 20);
    }

    #[test]
    fn windows_are_all_or_none() {
        let mistral =
            |more: &str| with(&format!(r#"{{"model_type": "mistral", "num_key_value_heads": 2{more}}}"#)).map(|c| c.sliding_window);
        assert_eq!(mistral("").unwrap(), Some(4096));
        assert_eq!(mistral(r#", "sliding_window": null"#).unwrap(), None);
        assert_eq!(mistral(r#", "sliding_window": 12"#).unwrap(), Some(12));
        let qwen = |more: &str| {
            with(&format!(r#"{{"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 12{more}}}"#)).map(|c| c.sliding_window)
        };
        assert_eq!(qwen("").unwrap(), None);
        assert_eq!(qwen(r#", "use_sliding_window": true, "max_window_layers": 0"#).unwrap(), Some(12));
        assert_eq!(qwen(r#", "use_sliding_window": true, "max_window_layers": 4"#).unwrap(), None);
        assert!(qwen(r#", "use_sliding_window": true, "max_window_layers": 2"#).unwrap_err().contains("`max_window_layers`"));
        let types = r#", "use_sliding_window": true, "layer_types": ["sliding_attention", "full_attention"]"#;
        assert!(qwen(types).unwrap_err().contains("`layer_types`"));
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        for (change, expected) in [
            (r#"{"model_type": "gpt2"}"#, "the architecture `gpt2` is not supported"),
            (r#"{"hidden_act": "gelu"}"#, "the activation `gelu` is not supported"),
            (r#"{"attention_bias": true}"#, "a bias on o_proj is not supported"),
            (r#"{"mlp_bias": true}"#, "a bias in the MLP is not supported"),
            (r#"{"quantization_config": {"bits": 4}}"#, "a quantised checkpoint is not supported"),
            (r#"{"hidden_size": 0}"#, "`hidden_size`: 0"),
            (r#"{"hidden_size": null}"#, "`hidden_size`: absent"),
            (r#"{"hidden_size": 66}"#, "4 heads do not divide"),
            (r#"{"num_key_value_heads": 3}"#, "does not divide the 4 query heads"),
            (r#"{"rms_norm_eps": 1e-60}"#, "`rms_norm_eps`: 1e-60, expected a number from 0.000000000001 to 0.01"),
            (r#"{"rms_norm_eps": 5}"#, "`rms_norm_eps`: 5"),
            (r#"{"rope_theta": 1e300}"#, "`rope_theta`: 1e+300"),
            (r#"{"rope_theta": 0.5}"#, "`rope_theta`: 0.5, expected a number from 1 to 1000000000000"),
            (r#"{"max_position_embeddings": 1048577}"#, "`max_position_embeddings`: 1048577, expected at most 1048576"),
            (r#"{"head_dim": 3}"#, "`head_dim`: 3, which is odd"),
            (r#"{"eos_token_id": 256}"#, "`eos_token_id`: 256, expected below the vocabulary of 256"),
            (r#"{"eos_token_id": "</s>"}"#, "expected a token id or a list of them"),
            (r#"{"vocab_size": 1e400}"#, "not a JSON object"),
        ] {
            let error = if change.contains("e400") { parse(change.as_bytes()).unwrap_err().to_string() } else { with(change).unwrap_err() };
            assert!(error.starts_with("config.json") && error.contains(expected), "{change}: {error}");
        }
    }
}
