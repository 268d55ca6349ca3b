//! PEFT's patterns: which modules a name or a regular expression means.
//!
//! Python's expressions are run by the `regex` crate, whose time is linear in the text; look-around and back-references, which it
//! does not have, are refused.

use nodus_protocol::{LayerSelection, ModelConfig, Module, ModuleOverride};
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use super::{CONFIG, path};
use crate::error::{FormatError, Place, clip};

const PATTERN_BYTES_MAX: usize = 1 << 20;
const TARGETS: &str = "target_modules";
const LINEAR: &str = "linear modules of the layers: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";

/// A compiled expression: what may stand before the pattern, the pattern, and the end.
fn compile(key: &str, before: &str, pattern: &str) -> Result<Regex, FormatError> {
    RegexBuilder::new(&format!("^{before}(?:{pattern})$")).size_limit(PATTERN_BYTES_MAX).build().map_err(|_| {
        let what = format!("the regular expression `{}`", clip(pattern));
        FormatError::unsupported(CONFIG, Place::key(key), what, "one without look-around, back-references or excess")
    })
}

/// Every linear module of a model.
pub(super) fn modules(model: &ModelConfig) -> impl Iterator<Item = (usize, Module)> + use<> {
    (0..model.num_hidden_layers).flat_map(|layer| Module::ALL.into_iter().map(move |module| (layer, module)))
}

/// `target_modules` as one expression (`re.fullmatch` on the path).
pub(super) fn expression(pattern: &str, model: &ModelConfig) -> Result<(Vec<Module>, LayerSelection), FormatError> {
    let regex = compile(TARGETS, "", pattern)?;
    if let Some(name) = ["lm_head", "model.embed_tokens"].into_iter().find(|name| regex.is_match(name)) {
        return Err(FormatError::unsupported(CONFIG, Place::key(TARGETS), format!("an adapter on `{name}`"), LINEAR));
    }
    let chosen: Vec<_> = modules(model).filter(|(layer, module)| regex.is_match(&path(*layer, *module))).collect();
    if chosen.is_empty() {
        let found = format!("`{}`, which no linear module of the model matches", clip(pattern));
        return Err(FormatError::invalid(CONFIG, Place::key(TARGETS), found, "at least one matching module"));
    }
    product(&chosen, model)
}

/// `target_modules` as a list of names, each the end of a path on whole parts.
pub(super) fn names(names: &[String], model: &ModelConfig) -> Result<(Vec<Module>, LayerSelection), FormatError> {
    let simple: Option<Vec<Module>> = names.iter().map(|name| name.parse().ok()).collect();
    let ends: Vec<_> = names.iter().map(|name| ModuleOverride { module: name.clone(), rank: None, alpha: None }).collect();
    let is = |end: &ModuleOverride, (layer, module): (usize, Module)| end.matches(layer, module);
    if let Some(end) = ends.iter().find(|end| !modules(model).any(|m| is(end, m))) {
        return Err(FormatError::unsupported(CONFIG, Place::key(TARGETS), format!("an adapter on `{}`", clip(&end.module)), LINEAR));
    }
    if let Some(mut targets) = simple {
        let mut seen = Vec::new();
        targets.retain(|target| {
            !seen.contains(target) && {
                seen.push(*target);
                true
            }
        });
        return Ok((targets, LayerSelection::All));
    }
    let chosen: Vec<_> = modules(model).filter(|m| ends.iter().any(|end| is(end, *m))).collect();
    product(&chosen, model)
}

/// Chosen modules as targets times layers; they must be the same in each chosen layer.
fn product(chosen: &[(usize, Module)], model: &ModelConfig) -> Result<(Vec<Module>, LayerSelection), FormatError> {
    let mut layers: Vec<usize> = chosen.iter().map(|(layer, _)| *layer).collect();
    layers.dedup();
    let mut in_layers = chosen.chunk_by(|(a, _), (b, _)| a == b).map(|layer| layer.iter().map(|(_, module)| *module).collect::<Vec<_>>());
    let targets = in_layers.next().unwrap_or_default();
    if in_layers.any(|other| other != targets) {
        let what = "a choice of other modules in some layers than in others";
        return Err(FormatError::unsupported(CONFIG, Place::key(TARGETS), what, "the same modules in each chosen layer"));
    }
    Ok((targets, selection(&layers, model.num_hidden_layers)))
}

/// Layers in ascending order as the selection that says it shortest.
pub(super) fn selection(layers: &[usize], of: usize) -> LayerSelection {
    let short = |layer: usize| u32::try_from(layer).unwrap_or(u32::MAX);
    if layers.len() == of {
        return LayerSelection::All;
    }
    if layers.iter().rev().zip((0..of).rev()).all(|(layer, top)| *layer == top) {
        return LayerSelection::Last(short(layers.len()));
    }
    LayerSelection::Only(layers.iter().map(|layer| short(*layer)).collect())
}

/// `rank_pattern` and `alpha_pattern` as overrides: of each the first match counts, an expression on the end of the path.
pub(super) fn overrides(
    ranks: &Map<String, Value>,
    alphas: &Map<String, Value>,
    model: &ModelConfig,
) -> Result<Vec<ModuleOverride>, FormatError> {
    let mut list: Vec<ModuleOverride> = Vec::new();
    for (pattern, value) in ranks {
        let rank = value.as_u64().and_then(|n| u32::try_from(n).ok());
        let rank = Some(rank.ok_or_else(|| wrong("rank_pattern", pattern, value, "a whole number"))?);
        list.extend(resolve("rank_pattern", pattern, model)?.into_iter().map(|module| ModuleOverride { module, rank, alpha: None }));
    }
    // Ranks keep their order and alphas theirs, and a module that has both gets one entry where the orders allow.
    let mut from = 0;
    for (pattern, value) in alphas {
        let alpha = Some(number(value).ok_or_else(|| wrong("alpha_pattern", pattern, value, "a number"))?);
        for module in resolve("alpha_pattern", pattern, model)? {
            match list.iter_mut().enumerate().skip(from).find(|(_, o)| o.module == module && o.alpha.is_none()) {
                Some((i, entry)) => {
                    entry.alpha = alpha;
                    from = i + 1;
                }
                None => {
                    list.insert(from, ModuleOverride { module, rank: None, alpha });
                    from += 1;
                }
            }
        }
    }
    Ok(list)
}

/// The modules a pattern means: itself where it is a plain name, else the whole path of each module it matches.
fn resolve(key: &str, pattern: &str, model: &ModelConfig) -> Result<Vec<String>, FormatError> {
    // As in PEFT (`get_pattern_key`).
    let regex = compile(key, r"(?:.*\.)?", pattern)?;
    let matching: Vec<_> = modules(model).filter(|(layer, module)| regex.is_match(&path(*layer, *module))).collect();
    if matching.is_empty() {
        let found = format!("`{}`, which no linear module of the model matches", clip(pattern));
        return Err(FormatError::invalid(CONFIG, Place::key(key), found, "the end of a module's path"));
    }
    let plain = ModuleOverride { module: pattern.to_owned(), rank: None, alpha: None };
    if modules(model).filter(|(l, m)| plain.matches(*l, *m)).eq(matching.iter().copied()) {
        return Ok(vec![plain.module]);
    }
    Ok(matching.into_iter().map(|(layer, module)| path(layer, module)).collect())
}

#[expect(clippy::cast_possible_truncation, reason = "a scale is computed in float32")]
pub(super) fn number(value: &Value) -> Option<f32> {
    value.as_f64().map(|x| x as f32)
}

fn wrong(key: &str, pattern: &str, value: &Value, expected: &str) -> FormatError {
    FormatError::invalid(CONFIG, Place::key(format!("{key}.{}", clip(pattern))), clip(&value.to_string()), expected)
}
