//! Weights to an adapter folder that PEFT and vLLM load without a word.
//!
//! Writes the same bytes for the same weights, and never an adapter that lacks a tensor or holds one that is empty or not finite.

use std::fmt::Write as _;

use nodus_protocol::{AdapterWeights, LayerSelection, LoraConfig, ModuleWeights};
use serde_json::{Map, Value, json};

use super::{AdapterFile, CONFIG, WEIGHTS, key};
use crate::error::{FormatError, Place, clip};
use crate::safetensors::to_bytes;

/// The files of an adapter: configuration, weights, README. `base_model_name` is what others know the base model by.
///
/// # Errors
/// Weights that nobody should get: none at all, of another shape than rank and module make, or not finite.
pub fn write(weights: &AdapterWeights, base_model_name: &str) -> Result<Vec<AdapterFile>, FormatError> {
    if weights.modules.is_empty() {
        return Err(FormatError::invalid(WEIGHTS, Place::File, "no modules", "at least one"));
    }
    let mut tensors = Vec::new();
    for module in &weights.modules {
        tensors.push(tensor(module, 'A', &module.a)?);
        tensors.push(tensor(module, 'B', &module.b)?);
    }
    let config = serde_json::to_vec_pretty(&config(weights, base_model_name));
    let config = config.map_err(|e| FormatError::invalid(CONFIG, Place::File, e, "numbers that JSON can hold"))?;
    Ok(vec![
        (CONFIG.into(), config),
        (WEIGHTS.into(), to_bytes(WEIGHTS, tensors)?),
        ("README.md".into(), readme(&weights.config, base_model_name).into_bytes()),
    ])
}

fn tensor<'a>(weights: &ModuleWeights, part: char, data: &'a [f32]) -> Result<(String, Vec<usize>, &'a [f32]), FormatError> {
    let name = key(weights.layer, weights.module, part);
    let invalid = |found: String, expected: &str| FormatError::invalid(WEIGHTS, Place::tensor(&name), found, expected);
    let other = data.len().checked_div(weights.rank).filter(|n| *n > 0 && n * weights.rank == data.len());
    let other =
        other.ok_or_else(|| invalid(format!("{} elements of rank {}", data.len(), weights.rank), "a multiple of the rank, not empty"))?;
    if let Some(i) = data.iter().position(|x| !x.is_finite()) {
        return Err(invalid(format!("element {i} is not finite"), "finite weights"));
    }
    let shape = if part == 'A' { vec![weights.rank, other] } else { vec![other, weights.rank] };
    Ok((name, shape, data))
}

/// The keys that PEFT writes and that describe the adapter; others have their defaults there.
fn config(weights: &AdapterWeights, base_model_name: &str) -> Value {
    let config = &weights.config;
    let pattern = |value: &dyn Fn(&nodus_protocol::ModuleOverride) -> Option<Value>| {
        let mut map = Map::new();
        for over in &config.overrides {
            if let Some(value) = value(over) {
                // Of two entries for one name the first counts.
                map.entry(over.module.clone()).or_insert(value);
            }
        }
        Value::Object(map)
    };
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "revision": null,
        "inference_mode": true,
        "r": config.rank,
        "lora_alpha": short(config.alpha),
        "use_rslora": config.rslora,
        "lora_dropout": short(config.dropout),
        "target_modules": config.targets.iter().map(|m| m.name()).collect::<Vec<_>>(),
        "layers_to_transform": layers(weights),
        "layers_pattern": null,
        "rank_pattern": pattern(&|over| over.rank.map(Value::from)),
        "alpha_pattern": pattern(&|over| over.alpha.map(short)),
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "modules_to_save": null,
        "use_dora": false,
    })
}

/// Null for all layers, else their numbers.
fn layers(weights: &AdapterWeights) -> Value {
    if weights.config.layers == LayerSelection::All {
        return Value::Null;
    }
    let mut layers: Vec<usize> = weights.modules.iter().map(|m| m.layer).collect();
    layers.sort_unstable();
    layers.dedup();
    json!(layers)
}

/// A float32 as the shortest decimal that means it, and whole numbers without a point, as PEFT writes `lora_alpha`.
#[expect(clippy::cast_possible_truncation, reason = "only whole numbers below 2^24 are cast")]
fn short(x: f32) -> Value {
    if x.fract() == 0.0 && x.abs() < 16_777_216.0 && x != 0.0 {
        return json!(x as i64);
    }
    json!(x.to_string().parse::<f64>().unwrap_or_else(|_| f64::from(x)))
}

fn readme(config: &LoraConfig, base_model_name: &str) -> String {
    let name = clip(base_model_name);
    let quoted = name.replace('\'', "''");
    let mut text = format!("---\nbase_model: '{quoted}'\nlibrary_name: peft\ntags: [lora, nodus]\n---\n\n# LoRA adapter for {name}\n\n");
    let targets: Vec<_> = config.targets.iter().map(|m| m.name()).collect();
    let scale = if config.rslora { "alpha / sqrt(rank)" } else { "alpha / rank" };
    let _ = writeln!(text, "Rank {}, alpha {}, scale {scale}, on {}. Trained by Nodus.", config.rank, config.alpha, targets.join(", "));
    if !config.overrides.is_empty() {
        text.push_str("\nSome modules have a rank or an alpha of their own. PEFT reads them; check that your server does (vLLM uses one scale for all modules).\n");
    }
    text
}
