//! An adapter folder to weights.
//!
//! Never leaves a tensor of the file unused or a module of the configuration without weights.

use std::collections::BTreeSet;

use cap_std::fs::Dir;
use nodus_protocol::{AdapterWeights, ModelConfig, ModuleWeights};

use super::{CONFIG, WEIGHTS, config, key};
use crate::error::{FormatError, Place};
use crate::files::{CONFIG_BYTES_MAX, map_optional, read as read_file};
use crate::json::Object;
use crate::safetensors::{TensorFile, to_f32};

/// The base model that an adapter's configuration names.
///
/// # Errors
/// The configuration is missing or malformed.
pub fn base(dir: &Dir) -> Result<Option<String>, FormatError> {
    let map = crate::json::parse(CONFIG, &read_file(dir, CONFIG, CONFIG_BYTES_MAX, "an adapter's configuration")?)?;
    Object::new(CONFIG, &map).string("base_model_name_or_path")
}

/// Reads a PEFT folder for a model. Weights stored in F16 or BF16 are widened to float32. Layers come back as the selection
/// that says them shortest: all, the last so many, or a list. Overrides come back with the same meaning, not always as the same
/// list: PEFT keeps ranks and alphas apart.
///
/// # Errors
/// What is missing, malformed or not supported, with file, tensor or key, and what was expected. A tensor that the configuration
/// does not explain is an error, as is one that is not finite.
pub fn read(dir: &Dir, model: &ModelConfig) -> Result<AdapterWeights, FormatError> {
    let config = config::parse(&read_file(dir, CONFIG, CONFIG_BYTES_MAX, "an adapter's configuration")?, model)?;
    let missing = || FormatError::Missing { file: WEIGHTS.into(), expected: "the adapter's weights".into() };
    let file = TensorFile::parse(WEIGHTS, map_optional(dir, WEIGHTS)?.ok_or_else(missing)?)?;
    let mut unused: BTreeSet<String> = file.names().collect();
    let mut modules = Vec::new();
    for (layer, module) in config.modules(model) {
        let rank = config.rank_of(layer, module) as usize;
        let mut tensor = |part: char, shape: [usize; 2]| {
            let key = key(layer, module, part);
            unused.remove(&key);
            let data = to_f32(&file.tensor(&key, &shape)?);
            match data.iter().position(|x| !x.is_finite()) {
                Some(i) => Err(FormatError::invalid(WEIGHTS, Place::tensor(key), format!("element {i} is not finite"), "finite weights")),
                None => Ok(data),
            }
        };
        let a = tensor('A', [rank, model.module_in(module)])?;
        let b = tensor('B', [model.module_out(module), rank])?;
        modules.push(ModuleWeights { layer, module, rank, a, b });
    }
    if let Some(name) = unused.first() {
        let expected = format!("only the lora_A and lora_B tensors that {CONFIG} asks for");
        return Err(FormatError::invalid(WEIGHTS, Place::tensor(name), "a tensor that would go unused", expected));
    }
    Ok(AdapterWeights { config, modules })
}
