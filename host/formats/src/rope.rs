//! Rotary settings of a `config.json`, under their old keys (`rope_theta`, `rope_scaling`) and their new one (`rope_parameters`).
//!
//! Resolves what a file leaves open as transformers does (`modeling_rope_utils.py`); computes no frequency.

use nodus_protocol::RopeScaling;

use crate::error::FormatError;
use crate::json::Object;

const SUPPORTED: &str = "one of default, linear, llama3, yarn";

/// The base of the frequencies and their scaling.
pub(crate) fn parse(config: Object<'_>, context: usize) -> Result<(f64, Option<RopeScaling>), FormatError> {
    let new = config.object("rope_parameters", "rope_parameters.")?;
    let old = config.object("rope_scaling", "rope_scaling.")?;
    let theta = match new.map(|o| theta(o)).transpose()?.flatten() {
        Some(theta) => theta,
        None => theta(config)?.unwrap_or(10_000.0),
    };
    for object in [Some(config), new, old].into_iter().flatten() {
        whole_head(object)?;
    }
    let scaling = match new.or(old) {
        Some(rope) => scaling(rope, context)?,
        None => None,
    };
    Ok((theta, scaling))
}

/// The base of the frequencies; beyond these no position could be told from another.
fn theta(object: Object<'_>) -> Result<Option<f64>, FormatError> {
    object.between("rope_theta", 1.0, 1e12)
}

fn whole_head(object: Object<'_>) -> Result<(), FormatError> {
    match object.number("partial_rotary_factor")? {
        Some(part) if part != 1.0 => {
            Err(object.unsupported("partial_rotary_factor", format!("rotating {part} of a head"), "1, the whole head"))
        }
        _ => Ok(()),
    }
}

fn scaling(rope: Object<'_>, context: usize) -> Result<Option<RopeScaling>, FormatError> {
    // Settings by layer type are objects in place of the numbers.
    if let Some((key, _)) = rope.entries().find(|(_, v)| v.is_object()) {
        return Err(rope.unsupported(key, "a rotary setting for some layers only", "one for all layers"));
    }
    let kind = match rope.string("rope_type")? {
        Some(kind) => kind,
        None => rope.string("type")?.unwrap_or_else(|| "default".into()),
    };
    let float = |key, default: Option<f64>| -> Result<f32, FormatError> {
        let value = rope.positive(key)?.or(default);
        rope.required(key, value, "a number above 0").map(narrow)
    };
    let original = || -> Result<u32, FormatError> {
        let size = rope.size("original_max_position_embeddings")?.unwrap_or(context);
        Ok(u32::try_from(size).unwrap_or(u32::MAX))
    };
    match kind.as_str() {
        "default" => Ok(None),
        "linear" => Ok(Some(RopeScaling::Linear { factor: float("factor", None)? })),
        "llama3" => Ok(Some(RopeScaling::Llama3 {
            factor: float("factor", None)?,
            low_freq_factor: float("low_freq_factor", None)?,
            high_freq_factor: float("high_freq_factor", None)?,
            original_max_position_embeddings: original()?,
        })),
        "yarn" => {
            if rope.bool("truncate")? == Some(false) {
                return Err(rope.unsupported("truncate", "a correction range that is not rounded", "true"));
            }
            let original = original()?;
            let grown = context as f64 / f64::from(original);
            let factor = rope.positive("factor")?.unwrap_or(grown);
            Ok(Some(RopeScaling::Yarn {
                factor: narrow(factor),
                beta_fast: float("beta_fast", Some(32.0))?,
                beta_slow: float("beta_slow", Some(1.0))?,
                attention_factor: narrow(attention_factor(rope, factor)?),
                original_max_position_embeddings: original,
            }))
        }
        other => {
            let key = if rope.has("rope_type") { "rope_type" } else { "type" };
            Err(rope.unsupported(key, format!("rope scaling `{}`", crate::error::clip(other)), SUPPORTED))
        }
    }
}

fn attention_factor(rope: Object<'_>, factor: f64) -> Result<f64, FormatError> {
    let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
    if let Some(given) = rope.positive("attention_factor")? {
        return Ok(given);
    }
    Ok(match (rope.number("mscale")?, rope.number("mscale_all_dim")?) {
        (Some(m), Some(all)) if m != 0.0 && all != 0.0 => scale(m) / scale(all),
        _ => scale(1.0),
    })
}

#[expect(clippy::cast_possible_truncation, reason = "transformers computes frequencies in float32")]
fn narrow(x: f64) -> f32 {
    x as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::parse as json;

    fn of(text: &str) -> Result<(f64, Option<RopeScaling>), String> {
        let map = json("config.json", text.as_bytes()).unwrap();
        parse(Object::new("config.json", &map), 4096).map_err(|e| e.to_string())
    }

    #[test]
    fn old_and_new_keys_mean_the_same() {
        let old = of(r#"{"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}"#).unwrap();
        let new = of(r#"{"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4}}"#).unwrap();
        assert_eq!(old, new);
        assert_eq!(old, (5e5, Some(RopeScaling::Linear { factor: 4.0 })));
        assert_eq!(of("{}").unwrap(), (10_000.0, None));
        assert_eq!(of(r#"{"rope_theta": 7, "rope_scaling": null}"#).unwrap(), (7.0, None));
        assert_eq!(of(r#"{"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}"#).unwrap(), (7.0, None));
    }

    #[test]
    fn llama3_needs_its_factors() {
        let text = r#"{"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}}"#;
        let expected =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 };
        assert_eq!(of(text).unwrap().1, Some(expected));
        let error = of(&text.replace("low_freq_factor", "other")).unwrap_err();
        assert_eq!(error, "config.json, `rope_scaling.low_freq_factor`: absent, expected a number above 0");
    }

    #[test]
    fn yarn_resolves_its_attention_factor_as_transformers_does() {
        let attention = |text: &str| match of(text).unwrap().1 {
            Some(RopeScaling::Yarn { attention_factor, .. }) => attention_factor,
            other => panic!("{other:?}"),
        };
        let with = |more: &str| {
            attention(&format!(
                r#"{{"rope_scaling": {{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024{more}}}}}"#
            ))
        };
        assert_eq!(with(""), (0.1 * 4.0_f64.ln() + 1.0) as f32);
        assert_eq!(with(r#", "attention_factor": 1.5"#), 1.5);
        assert_eq!(with(r#", "mscale": 1.0, "mscale_all_dim": 1.0"#), 1.0);
        assert_eq!(
            with(r#", "mscale": 0.707, "mscale_all_dim": 1.0"#),
            ((0.0707 * 4.0_f64.ln() + 1.0) / (0.1 * 4.0_f64.ln() + 1.0)) as f32
        );
    }

    #[test]
    fn what_is_not_computed_is_refused_by_name() {
        let dynamic = of(r#"{"rope_scaling": {"type": "dynamic", "factor": 2}}"#).unwrap_err();
        assert_eq!(
            dynamic,
            "config.json, `rope_scaling.type`: rope scaling `dynamic` is not supported, expected one of default, linear, llama3, yarn"
        );
        assert!(of(r#"{"rope_parameters": {"rope_type": "longrope"}}"#).unwrap_err().contains("`longrope`"));
        assert!(of(r#"{"partial_rotary_factor": 0.5}"#).unwrap_err().contains("0.5 of a head"));
        assert!(of(r#"{"rope_parameters": {"full_attention": {"rope_type": "default"}}}"#).unwrap_err().contains("full_attention"));
        assert!(of(r#"{"rope_scaling": {"type": "linear", "factor": 0}}"#).unwrap_err().contains("above 0"));
    }
}
