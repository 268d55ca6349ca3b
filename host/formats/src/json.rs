//! A JSON object of a configuration file, read key by key with errors that name file and key.
//!
//! Knows no meaning of any key.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{FormatError, Place, clip};

/// One object, and what it is called in messages.
#[derive(Clone, Copy)]
pub(crate) struct Object<'a> {
    pub(crate) file: &'a str,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    pub(crate) fn new(file: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { file, prefix: "", map }
    }

    /// The object at a key; its keys are called `prefix` + key from here on. Null counts as absent.
    pub(crate) fn object(self, key: &str, prefix: &'a str) -> Result<Option<Self>, FormatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Self { file: self.file, prefix, map })),
            Some(other) => Err(self.wrong(key, other, "an object")),
        }
    }

    /// The value at a key; null counts as absent.
    pub(crate) fn get(self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Whether the key is there at all, be it null.
    pub(crate) fn has(self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn entries(self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.map.iter()
    }

    /// A whole number from 1 to 2^31 - 1: a size.
    pub(crate) fn size(self, key: &str) -> Result<Option<usize>, FormatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|n| (1..=i32::MAX as u64).contains(n)).and_then(|n| usize::try_from(n).ok());
        size.map(Some).ok_or_else(|| self.wrong(key, value, "a whole number from 1 to 2147483647"))
    }

    /// A finite number.
    pub(crate) fn number(self, key: &str) -> Result<Option<f64>, FormatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().filter(|x| x.is_finite()).map(Some).ok_or_else(|| self.wrong(key, value, "a finite number"))
    }

    /// A finite number above 0.
    pub(crate) fn positive(self, key: &str) -> Result<Option<f64>, FormatError> {
        match self.number(key)? {
            Some(x) if x <= 0.0 => Err(self.wrong(key, &Value::from(x), "a number above 0")),
            x => Ok(x),
        }
    }

    /// A finite number in a range, both ends included.
    pub(crate) fn between(self, key: &str, least: f64, most: f64) -> Result<Option<f64>, FormatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|x| (least..=most).contains(x));
        number.map(Some).ok_or_else(|| self.wrong(key, value, &format!("a number from {least} to {most}")))
    }

    pub(crate) fn bool(self, key: &str) -> Result<Option<bool>, FormatError> {
        self.typed(key, "true or false")
    }

    pub(crate) fn string(self, key: &str) -> Result<Option<String>, FormatError> {
        self.typed(key, "a string")
    }

    /// A value of a type that serde knows.
    pub(crate) fn typed<T: DeserializeOwned>(self, key: &str, expected: &str) -> Result<Option<T>, FormatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        serde_json::from_value(value.clone()).map(Some).map_err(|_| self.wrong(key, value, expected))
    }

    /// A value that must be there.
    pub(crate) fn required<T>(self, key: &str, value: Option<T>, expected: &str) -> Result<T, FormatError> {
        value.ok_or_else(|| FormatError::invalid(self.file, self.place(key), "absent", expected))
    }

    /// The value at this key is not what it should be.
    pub(crate) fn wrong(self, key: &str, found: &Value, expected: &str) -> FormatError {
        FormatError::invalid(self.file, self.place(key), clip(&found.to_string()), expected)
    }

    pub(crate) fn unsupported(self, key: &str, what: impl std::fmt::Display, expected: &str) -> FormatError {
        FormatError::unsupported(self.file, self.place(key), what, expected)
    }

    fn place(self, key: &str) -> Place {
        Place::key(format!("{}{key}", self.prefix))
    }
}

/// Parses a file that must hold one JSON object.
pub(crate) fn parse(file: &str, bytes: &[u8]) -> Result<Map<String, Value>, FormatError> {
    serde_json::from_slice(bytes).map_err(|e| FormatError::invalid(file, Place::File, format!("not a JSON object ({e})"), "a JSON object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_file_key_value_and_what_would_be_right() {
        let map = parse("config.json", br#"{"a": -1, "n": {"b": "x"}, "z": null}"#).unwrap();
        let object = Object::new("config.json", &map);
        let error = object.size("a").unwrap_err().to_string();
        assert_eq!(error, "config.json, `a`: -1, expected a whole number from 1 to 2147483647");
        let inner = object.object("n", "n.").unwrap().unwrap();
        assert_eq!(inner.number("b").unwrap_err().to_string(), "config.json, `n.b`: \"x\", expected a finite number");
        assert!(object.size("z").unwrap().is_none() && object.has("z"));
        assert!(parse("config.json", b"[1]").unwrap_err().to_string().starts_with("config.json: not a JSON object"));
    }
}
