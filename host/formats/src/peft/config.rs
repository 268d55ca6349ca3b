//! `adapter_config.json` to a [`LoraConfig`].
//!
//! Refuses by name what would change the computation and is not computed, unknown keys that are switched on included.

use nodus_protocol::{LayerSelection, LoraConfig, ModelConfig, Module};
use serde_json::{Map, Value};

use super::{CONFIG, pattern};
use crate::error::{FormatError, Place, clip};
use crate::json::{Object, parse as parse_json};

/// Keys that are read here, or that say nothing about the computation.
const KNOWN: [&str; 22] = [
    "peft_type",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "inference_mode",
    "auto_mapping",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "megatron_core",
    "qalora_group_size",
    "runtime_config",
    "loftq_config",
];

/// Parses the file's bytes for a model.
pub(super) fn parse(bytes: &[u8], model: &ModelConfig) -> Result<LoraConfig, FormatError> {
    let map = parse_json(CONFIG, bytes)?;
    let c = Object::new(CONFIG, &map);
    supported(c)?;
    let rank = c.required("r", c.size("r")?, "the rank")?;
    let alpha = c.required("lora_alpha", c.get("lora_alpha"), "a number above 0")?;
    let alpha = pattern::number(alpha).ok_or_else(|| c.wrong("lora_alpha", alpha, "a number above 0"))?;
    let dropout = c.get("lora_dropout").map_or(Some(0.0), pattern::number);
    let dropout = dropout.ok_or_else(|| c.wrong("lora_dropout", c.get("lora_dropout").unwrap_or(&Value::Null), "a number"))?;
    let (targets, layers) = targets(c, model)?;
    let empty = Map::new();
    let patterns = |key: &'static str| match c.get(key) {
        None => Ok(&empty),
        Some(Value::Object(map)) => Ok(map),
        Some(other) => Err(c.wrong(key, other, "an object")),
    };
    let config = LoraConfig {
        rank: u32::try_from(rank).unwrap_or(u32::MAX),
        alpha,
        rslora: c.bool("use_rslora")?.unwrap_or(false),
        dropout,
        targets,
        layers,
        overrides: pattern::overrides(patterns("rank_pattern")?, patterns("alpha_pattern")?, model)?,
    };
    config.validate(model).map_err(|e| {
        let (found, expected) = e.message.split_once(", expected ").unwrap_or((&e.message, "an adapter for this model"));
        FormatError::invalid(CONFIG, Place::File, found, expected)
    })?;
    Ok(config)
}

fn supported(c: Object<'_>) -> Result<(), FormatError> {
    let kind = c.required("peft_type", c.string("peft_type")?, "LORA")?;
    if kind != "LORA" {
        return Err(c.unsupported("peft_type", format!("the adapter type `{}`", clip(&kind)), "LORA"));
    }
    match c.string("task_type")?.as_deref() {
        None | Some("CAUSAL_LM") => {}
        Some(other) => return Err(c.unsupported("task_type", format!("the task `{}`", clip(other)), "CAUSAL_LM")),
    }
    match c.string("bias")?.as_deref() {
        None | Some("none") => {}
        Some(other) => return Err(c.unsupported("bias", format!("trained biases (`{}`)", clip(other)), "none")),
    }
    // Some initialisations change the base weights; an adapter that was saved beside them needs those.
    match c.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => {}
        Some(Value::String(how)) if ["gaussian", "eva", "orthogonal"].contains(&how.as_str()) => {}
        Some(other) => {
            let what = format!("an initialisation that changes the base weights ({})", clip(&other.to_string()));
            return Err(c.unsupported("init_lora_weights", what, "true, false, gaussian, eva or orthogonal"));
        }
    }
    for (key, value) in c.entries() {
        if !KNOWN.contains(&key.as_str()) && switched_on(value) {
            let what = format!("this feature of PEFT ({})", clip(&value.to_string()));
            return Err(c.unsupported(&clip(key), what, "null, false or nothing"));
        }
    }
    Ok(())
}

fn switched_on(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

fn targets(c: Object<'_>, model: &ModelConfig) -> Result<(Vec<Module>, LayerSelection), FormatError> {
    const KEY: &str = "target_modules";
    const EXPECTED: &str = "a list of module names, a regular expression, or `all-linear`";
    let layers = layers(c, model)?;
    let value = c.required(KEY, c.get(KEY), EXPECTED)?;
    let (targets, chosen) = match value {
        Value::String(all) if all == "all-linear" => (Module::ALL.to_vec(), LayerSelection::All),
        Value::String(expression) => pattern::expression(expression, model)?,
        Value::Array(names) if !names.is_empty() => {
            let names: Option<Vec<_>> = names.iter().map(|n| n.as_str().map(str::to_owned)).collect();
            pattern::names(&names.ok_or_else(|| c.wrong(KEY, value, EXPECTED))?, model)?
        }
        other => return Err(c.wrong(KEY, other, EXPECTED)),
    };
    match layers {
        None => Ok((targets, chosen)),
        Some(layers) if chosen == LayerSelection::All => Ok((targets, layers)),
        Some(_) => Err(c.unsupported("layers_to_transform", "a choice of layers beside target_modules that chooses layers too", "null")),
    }
}

/// `layers_to_transform`, a number or a list; an empty list means all.
fn layers(c: Object<'_>, model: &ModelConfig) -> Result<Option<LayerSelection>, FormatError> {
    const KEY: &str = "layers_to_transform";
    let Some(value) = c.get(KEY) else { return Ok(None) };
    let list = match value {
        Value::Array(list) => list.iter().collect(),
        one => vec![one],
    };
    let layer = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n < model.num_hidden_layers);
    let expected = format!("layers from 0 to {}", model.num_hidden_layers.saturating_sub(1));
    let mut layers = list.into_iter().map(|v| layer(v).ok_or_else(|| c.wrong(KEY, v, &expected))).collect::<Result<Vec<_>, _>>()?;
    layers.sort_unstable();
    layers.dedup();
    if layers.is_empty() {
        return Ok(None);
    }
    let pattern = match c.get("layers_pattern") {
        None => true,
        Some(Value::Array(list)) => list.is_empty() || list.iter().any(|p| p == "layers"),
        Some(one) => one == "layers",
    };
    if !pattern {
        let found = c.get("layers_pattern").unwrap_or(&Value::Null);
        return Err(c.wrong("layers_pattern", found, "`layers`; otherwise no module of this model matches"));
    }
    Ok(Some(pattern::selection(&layers, model.num_hidden_layers)))
}
