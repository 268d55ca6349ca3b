//! A job's parameters from the command line: a JSON file, then `--set key=value`, value by value.
//!
//! Knows no parameter's meaning but one: `init_adapter`, which names a PEFT folder of the user's.

use std::str::FromStr;

use serde_json::{Map, Value};

use crate::error::user;
use crate::text::escape;

/// The parameter that the command line turns from a path into a digest.
pub const INIT_ADAPTER: &str = "init_adapter";

/// One `--set key=value`. The value is JSON where it parses as JSON, else a string.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    key: String,
    value: Value,
}

impl Setting {
    /// Which parameter.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }
}

/// A `--set` without a key or without `=`.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a setting: expected key=value, for example rank=8")]
pub struct SettingError(String);

impl FromStr for Setting {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        match text.split_once('=') {
            Some((key, value)) if !key.trim().is_empty() => Ok(Self { key: key.trim().to_owned(), value: value_of(value) }),
            _ => Err(SettingError(escape(&text.chars().take(80).collect::<String>()))),
        }
    }
}

/// A value from the command line: JSON where it parses as JSON, else a string.
#[must_use]
pub fn value_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// Parameters in the one order that a job sees: keys sorted at every depth.
#[must_use]
pub fn sorted(mut parameters: Map<String, Value>) -> Map<String, Value> {
    parameters.values_mut().for_each(Value::sort_all_objects);
    parameters.sort_keys();
    parameters
}

/// The parameters: the file's object (empty without a file), each setting put over it in its order. Keys are sorted at every depth, so
/// that the order of writing never reaches the job.
///
/// # Errors
/// The user's, where the file is no JSON object.
pub fn merge(file: Option<(&str, &str)>, settings: &[Setting]) -> anyhow::Result<Map<String, Value>> {
    let mut merged = match file {
        None => Map::new(),
        Some((name, text)) => match serde_json::from_str(text) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return Err(user(format!("{name}: expected a JSON object of parameters, for example {{\"rank\": 8}}"))),
            Err(error) => {
                let hint = if name.ends_with(".toml") { "; a TOML file of jobs is given with --manifest" } else { "" };
                return Err(user(format!("{name}: not JSON: {error}{hint}")));
            }
        },
    };
    for setting in settings {
        merged.insert(setting.key.clone(), setting.value.clone());
    }
    Ok(sorted(merged))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Setting, merge};

    fn set(text: &str) -> Setting {
        text.parse().unwrap()
    }

    /// Found by fuzzing: read without care, `1e-34` is a float beside the right one, and another again where that is read from a receipt.
    #[test]
    fn numbers_are_the_nearest_floats_and_stay_them() {
        for text in ["1e-34", "2222222222222222222222222222222222222222222222222", "3e-4", "0.1", "1.7976931348623157e308", "5e-324"] {
            let (Value::Number(number), right) = (set(&format!("rate={text}")).value, text.parse::<f64>().unwrap()) else {
                panic!("{text}")
            };
            assert_eq!(number.as_f64().unwrap().to_bits(), right.to_bits(), "{text}");
            let again: f64 = serde_json::from_str(&number.to_string()).unwrap();
            assert_eq!(again.to_bits(), right.to_bits(), "{text} as {number}");
        }
    }

    #[test]
    fn values_are_json_else_strings() {
        for (text, expected) in [
            ("rank=8", json!(8)),
            ("learning_rate=2e-4", json!(2e-4)),
            ("rslora=true", json!(true)),
            ("max_length=null", Value::Null),
            ("targets=all-linear", json!("all-linear")),
            ("targets=[\"q_proj\",\"v_proj\"]", json!(["q_proj", "v_proj"])),
            ("layers={\"last\": 2}", json!({"last": 2})),
            ("schedule=\"cosine\"", json!("cosine")),
            ("note=a=b", json!("a=b")),
            ("note=", json!("")),
            ("rank=08", json!("08")),
        ] {
            assert_eq!(set(text).value, expected, "{text}");
        }
        for bad in ["", "rank", "=8", " =8"] {
            assert!(bad.parse::<Setting>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn settings_win_over_the_file_later_ones_over_earlier() {
        let merged = merge(Some(("p.json", r#"{"rank": 4, "alpha": 8}"#)), &[set("rank=8"), set("seed=1"), set("rank=16")]).unwrap();
        assert_eq!(serde_json::to_string(&merged).unwrap(), r#"{"alpha":8,"rank":16,"seed":1}"#);
        let nested = merge(None, &[set(r#"x={"b": [{"d": 1, "c": 2}], "a": 3}"#)]).unwrap();
        assert_eq!(serde_json::to_string(&nested).unwrap(), r#"{"x":{"a":3,"b":[{"c":2,"d":1}]}}"#);
        assert!(merge(None, &[]).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_no_object_is_refused_by_name() {
        for bad in ["[1]", "{", "7"] {
            let error = merge(Some(("p.json", bad)), &[]).unwrap_err();
            assert!(error.to_string().starts_with("p.json: "), "{error}");
            assert_eq!(crate::error::exit_code(&error), 2);
        }
    }
}
