//! Typed parameters from the job's JSON object.
//!
//! Never guesses: an unknown, missing or ill-typed parameter is an error that names it.

use serde::de::value::MapDeserializer;
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::{Map, Value};

use crate::{Error, Result};

/// Parses a JSON object into parameters. A parameter that is `null` counts as absent. A struct refuses what it does not know,
/// with or without `#[serde(deny_unknown_fields)]` (structs inside it need the attribute).
///
/// ```
/// #[derive(serde::Deserialize)]
/// struct Params {
///     learning_rate: f64,
///     epochs: Option<u64>,
/// }
///
/// let params: Params = nodus_guest::parse_params(r#"{"learning_rate": 2e-4}"#).unwrap();
/// assert_eq!((params.learning_rate, params.epochs), (2e-4, None));
///
/// let error = nodus_guest::parse_params::<Params>(r#"{"lerning_rate": 2e-4}"#).err().unwrap();
/// assert_eq!(
///     error.to_string(),
///     "parameters: unknown parameter `lerning_rate`, did you mean `learning_rate`? Known are learning_rate, epochs",
/// );
/// ```
///
/// # Errors
/// [`Error::User`] that names the parameter and says what would be right.
pub fn parse_params<P: DeserializeOwned>(json: &str) -> Result<P> {
    let refuse = |error: serde_json::Error| Error::user(format!("parameters: {}", plain(&error.to_string())));
    match serde_json::from_str(json).map_err(refuse)? {
        Value::Object(fields) => P::deserialize(Fields(fields)).map_err(refuse),
        other => Err(Error::user(format!("parameters: found {}, expected a JSON object", kind(&other)))),
    }
}

/// The top-level object, as a source that knows which field it is at.
struct Fields(Map<String, Value>);

impl<'de> Deserializer<'de> for Fields {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        let present = self.0.into_iter().filter(|(_, value)| !value.is_null());
        visitor.visit_map(MapDeserializer::new(present.map(|(name, value)| (name.clone(), Field { name, value }))))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match self.0.keys().find(|name| !known.contains(&name.as_str())) {
            Some(name) => Err(Self::Error::custom(unknown(name, known))),
            None => self.deserialize_any(visitor),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _name: &'static str, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// One value, as a source whose errors begin with the field's name.
struct Field {
    name: String,
    value: Value,
}

impl IntoDeserializer<'_, serde_json::Error> for Field {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Hands each kind of request on to the value, and puts the field's name before what it refuses.
macro_rules! forward_with_name {
    ($($method:ident($($argument:ident: $type:ty),*))*) => {$(
        fn $method<V: Visitor<'de>>(self, $($argument: $type,)* visitor: V) -> Result<V::Value, Self::Error> {
            let name = self.name;
            self.value.$method($($argument,)* visitor).map_err(|error| Self::Error::custom(format!("{name}: {error}")))
        }
    )*};
}

type Names = &'static [&'static str];

impl<'de> Deserializer<'de> for Field {
    type Error = serde_json::Error;

    forward_with_name! {
        deserialize_any() deserialize_bool() deserialize_i8() deserialize_i16() deserialize_i32() deserialize_i64() deserialize_i128()
        deserialize_u8() deserialize_u16() deserialize_u32() deserialize_u64() deserialize_u128() deserialize_f32() deserialize_f64()
        deserialize_char() deserialize_str() deserialize_string() deserialize_bytes() deserialize_byte_buf() deserialize_option()
        deserialize_unit() deserialize_unit_struct(name: &'static str) deserialize_newtype_struct(name: &'static str)
        deserialize_seq() deserialize_tuple(len: usize) deserialize_tuple_struct(name: &'static str, len: usize) deserialize_map()
        deserialize_struct(name: &'static str, fields: Names) deserialize_enum(name: &'static str, variants: Names)
        deserialize_identifier() deserialize_ignored_any()
    }
}

/// Words of Rust and serde, and what they are called in JSON.
const WORDS: [(&str, &str); 22] = [
    ("missing field ", "missing parameter "),
    ("unknown field ", "unknown parameter "),
    ("duplicate field ", "given twice: parameter "),
    ("unknown variant ", "found "),
    ("invalid type: ", "found "),
    ("invalid value: ", "found "),
    ("invalid length ", "found a list of length "),
    ("found integer ", "found "),
    ("found floating point ", "found "),
    ("found boolean ", "found "),
    ("found string ", "found "),
    ("found sequence", "found a list"),
    ("found map", "found an object"),
    ("found unit value", "found null"),
    ("expected a sequence", "expected a list"),
    ("expected a map", "expected an object"),
    ("expected a boolean", "expected true or false"),
    ("expected usize", "expected a whole number, 0 or more"),
    ("expected u64", "expected a whole number, 0 or more"),
    ("expected i64", "expected a whole number"),
    ("expected f64", "expected a number"),
    ("expected f32", "expected a number"),
];

/// A message of serde's without its words for types.
fn plain(message: &str) -> String {
    let bounds = [("u8", 0, i128::from(u8::MAX)), ("u16", 0, i128::from(u16::MAX)), ("u32", 0, i128::from(u32::MAX))];
    let signed = [("i8", i8::MIN.into(), i8::MAX.into()), ("i16", i16::MIN.into(), i16::MAX.into()), ("i32", i32::MIN, i32::MAX.into())];
    let mut text = WORDS.iter().fold(message.to_owned(), |text, (from, to)| text.replacen(from, to, 1));
    for (kind, least, most) in bounds.into_iter().chain(signed) {
        let kind = format!("expected {kind}");
        if text.ends_with(&kind) {
            text.truncate(text.len() - kind.len());
            text.push_str(&format!("expected a whole number from {least} to {most}"));
        }
    }
    if let Some(at) = text.find("expected struct ") {
        text.truncate(at);
        text.push_str("expected an object");
    }
    text
}

fn unknown(name: &str, known: &[&str]) -> String {
    let nearest = known.iter().map(|k| (distance(name, k), k)).min().filter(|(d, k)| *d <= k.len().div_ceil(3));
    let hint = nearest.map_or(String::new(), |(_, k)| format!(", did you mean `{k}`?"));
    let list = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    let separator = if hint.is_empty() { ". " } else { " " };
    format!("unknown parameter `{name}`{hint}{separator}Known are {list}")
}

/// Levenshtein's distance: how many characters must be put in, left out or replaced.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cell, to) in row.iter_mut().zip(std::iter::once(None).chain(b.chars().map(Some))) {
            let Some(to) = to else {
                *cell = left;
                continue;
            };
            let best = (diagonal + usize::from(from != to)).min(left + 1).min(*cell + 1);
            (diagonal, left, *cell) = (*cell, best, best);
        }
    }
    row.last().copied().unwrap_or_default()
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Params {
        rank: u32,
        #[serde(default = "two")]
        scale: f32,
        names: Option<Vec<String>>,
        kind: Option<Kind>,
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        One,
        Two,
    }

    fn two() -> f32 {
        2.0
    }

    fn refused(json: &str) -> String {
        parse_params::<Params>(json).unwrap_err().to_string()
    }

    #[test]
    fn reads_what_is_there_and_null_is_absent() {
        let full = parse_params::<Params>(r#"{"rank": 8, "scale": 1, "names": ["a"], "kind": "two"}"#).unwrap();
        assert_eq!(full, Params { rank: 8, scale: 1.0, names: Some(vec!["a".into()]), kind: Some(Kind::Two) });
        let least = parse_params::<Params>(r#"{"rank": 8, "scale": null, "names": null}"#).unwrap();
        assert_eq!(least, Params { rank: 8, scale: 2.0, names: None, kind: None });
    }

    #[test]
    fn a_refusal_names_the_parameter() {
        assert_eq!(refused("{}"), "parameters: missing parameter `rank`");
        assert_eq!(refused(r#"{"rank": null}"#), "parameters: missing parameter `rank`");
        assert_eq!(refused(r#"{"rank": "8"}"#), "parameters: rank: found \"8\", expected a whole number from 0 to 4294967295");
        assert_eq!(refused(r#"{"rank": -1}"#), "parameters: rank: found `-1`, expected a whole number from 0 to 4294967295");
        assert_eq!(refused(r#"{"rank": 4.5}"#), "parameters: rank: found `4.5`, expected a whole number from 0 to 4294967295");
        assert_eq!(refused(r#"{"rank": 4, "scale": [1]}"#), "parameters: scale: found a list, expected a number");
        assert_eq!(refused(r#"{"rank": 1, "kind": "three"}"#), "parameters: kind: found `three`, expected `one` or `two`");
        assert_eq!(refused(r#"{"rank": 1, "names": [1]}"#), "parameters: names: found `1`, expected a string");
        assert_eq!(refused(r#"{"rank": 1, "names": {}}"#), "parameters: names: found an object, expected a list");
    }

    #[test]
    fn the_unknown_is_refused_with_what_is_near_or_known() {
        let near = "parameters: unknown parameter `rnak`, did you mean `rank`? Known are rank, scale, names, kind";
        assert_eq!(refused(r#"{"rank": 1, "rnak": 1}"#), near);
        let far = "parameters: unknown parameter `zzzzzzz`. Known are rank, scale, names, kind";
        assert_eq!(refused(r#"{"rank": 1, "zzzzzzz": null}"#), far);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        assert_eq!(refused("[1]"), "parameters: found a list, expected a JSON object");
        assert!(refused("{").starts_with("parameters: EOF"), "{}", refused("{"));
    }

    #[test]
    fn untyped_parameters_and_wrappers_work() {
        #[derive(serde::Deserialize)]
        struct Wrapped(Params);
        assert_eq!(parse_params::<Wrapped>(r#"{"rank": 3}"#).unwrap().0.rank, 3);
        assert_eq!(parse_params::<Value>(r#"{"x": 3}"#).unwrap(), serde_json::json!({"x": 3}));
    }

    #[test]
    fn distance_counts_edits() {
        for (a, b, edits) in
            [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("rank", "rank", 0), ("rnak", "rank", 2)]
        {
            assert_eq!(distance(a, b), edits, "{a} {b}");
        }
    }
}
