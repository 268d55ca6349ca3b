//! Why a file was refused: which file, where in it, what was found and what would be right.
//!
//! Never holds a path of the host: a file is named as the folder it was found in names it.

use std::fmt;

/// Where in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The file as a whole.
    File,
    /// A tensor, by its name in the file.
    Tensor(String),
    /// A key of a configuration or of GGUF metadata.
    Key(String),
    /// A line, counted from 1.
    Line(u64),
}

/// Why a file was refused. All but `Read` and `Write` are the fault of whoever made or named the file.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// A file that must be there is not.
    #[error("{file} is missing, expected {expected}")]
    Missing {
        /// Its name in the folder.
        file: String,
        /// What it would hold.
        expected: String,
    },
    /// The operating system could not read it.
    #[error("{file} could not be read")]
    Read {
        /// Its name.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// The operating system could not write it.
    #[error("{file} could not be written")]
    Write {
        /// Its name.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not what it should be.
    #[error("{file}{place}: {found}, expected {expected}")]
    Invalid {
        /// Its name.
        file: String,
        /// Where in it.
        place: Place,
        /// What is there.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// It is well formed, but asks for something that is not computed here.
    #[error("{file}{place}: {what} is not supported, expected {expected}")]
    Unsupported {
        /// Its name.
        file: String,
        /// Where in it.
        place: Place,
        /// What it asks for.
        what: String,
        /// What is supported.
        expected: String,
    },
}

impl FormatError {
    pub(crate) fn invalid(file: &str, place: Place, found: impl fmt::Display, expected: impl fmt::Display) -> Self {
        Self::Invalid { file: file.into(), place, found: found.to_string(), expected: expected.to_string() }
    }

    pub(crate) fn unsupported(file: &str, place: Place, what: impl fmt::Display, expected: impl fmt::Display) -> Self {
        Self::Unsupported { file: file.into(), place, what: what.to_string(), expected: expected.to_string() }
    }
}

impl Place {
    pub(crate) fn key(name: impl Into<String>) -> Self {
        Self::Key(name.into())
    }

    pub(crate) fn tensor(name: impl Into<String>) -> Self {
        Self::Tensor(name.into())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => Ok(()),
            Self::Tensor(name) => write!(f, ", tensor `{}`", clip(name)),
            Self::Key(name) => write!(f, ", `{}`", clip(name)),
            Self::Line(number) => write!(f, ", line {number}"),
        }
    }
}

/// The beginning of a text from a file, on one line and without control characters, fit for a message.
pub(crate) fn clip(text: &str) -> String {
    const CHARS_MAX: usize = 120;
    let mut clipped = String::new();
    for c in text.chars().take(CHARS_MAX) {
        match c {
            '"' | '\'' | '\\' => clipped.push(c),
            c => clipped.extend(c.escape_debug()),
        }
    }
    if text.chars().nth(CHARS_MAX).is_some() {
        clipped.push_str("...");
    }
    clipped
}
