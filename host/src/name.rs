//! Names that users give to models and data sets, manifests to jobs, and guests to adapters: one rule for all.
//!
//! A `Name` is always safe as a file name; nothing downstream checks again.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Files and folders that the host, or the format of an adapter, has in the same folders.
const RESERVED: [&str; 12] = [
    "receipt.json",
    "losses.jsonl",
    "held_out.jsonl",
    "metrics.jsonl",
    "log.txt",
    "summary.json",
    "summary.csv",
    "nodus.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "readme.md",
    "inputs",
];

/// 1 to 64 letters, digits, `-`, `_` and `.` (ASCII), beginning with a letter, a digit or `_`, ending with no dot, and no name of a file that
/// the host itself writes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// A text that cannot be a name.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// Of other characters, or too long.
    #[error(
        "`{0}` cannot be a name: expected 1 to {max} letters, digits, `-`, `_` or `.`, the first a letter, a digit or `_`, the last no `.`",
        max = Name::CHARS_MAX
    )]
    Form(String),
    /// A file of the host's is called so.
    #[error("`{0}` cannot be a name, since a file of the host's is called so: expected another one")]
    Reserved(String),
}

impl Name {
    /// Longest name.
    pub const CHARS_MAX: usize = 64;

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !(1..=Self::CHARS_MAX).contains(&text.len()) || !text.chars().all(good) || text.starts_with(['.', '-']) || text.ends_with('.') {
            return Err(NameError::Form(crate::text::escape(&text.chars().take(80).collect::<String>())));
        }
        if RESERVED.iter().any(|file| file.eq_ignore_ascii_case(text)) {
            return Err(NameError::Reserved(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::Name;

    #[test]
    fn only_names_that_are_safe_as_file_names_pass() {
        for good in ["a", "SmolLM2-135M", "v1.0_x", &"x".repeat(64)] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for bad in ["", ".", "..", ".hidden", "-rf", "a/b", "a\\b", "a b", "ä", "a\n", "a.", &"x".repeat(65)] {
            let error = bad.parse::<Name>().unwrap_err().to_string();
            assert!(error.contains("cannot be a name: expected 1 to 64 letters, digits"), "{error}");
        }
        for reserved in ["README.md", "losses.jsonl", "Receipt.JSON", "nodus.json"] {
            assert!(reserved.parse::<Name>().unwrap_err().to_string().contains("a file of the host's"), "{reserved}");
        }
    }
}
