//! Names that users give to models and data sets.
//!
//! A `Name` is always safe as a file name; nothing downstream checks again.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// 1 to 64 letters, digits, `-`, `_` and `.` (ASCII), not beginning with a dot or a dash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// A text that is no name.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no name: expected 1 to {max} letters, digits, `-`, `_` or `.`, the first a letter, a digit or `_`", max = Name::CHARS_MAX)]
pub struct NameError(String);

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
        if (1..=Self::CHARS_MAX).contains(&text.len()) && text.chars().all(good) && !text.starts_with(['.', '-']) {
            return Ok(Self(text.to_owned()));
        }
        Err(NameError(crate::text::escape(&text.chars().take(80).collect::<String>())))
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
        for bad in ["", ".", "..", ".hidden", "-rf", "a/b", "a\\b", "a b", "ä", "a\n", &"x".repeat(65)] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }
}
