//! Rows of a data set as tokens of a model: which rows, how they are read, and what was read while somebody has it open.
//!
//! Knows no file: the bytes of the data set come from whoever has them.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nodus_formats::{FormatError, TextModel, data};
use nodus_protocol::{Digest, ModelConfig, Sequence};
use nodus_sandbox::services::{Dataset, Refusal};
use serde::{Deserialize, Serialize};

use super::services::refusal;
use crate::name::Name;

/// Which rows of which data set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    /// What the user calls the data set.
    pub(crate) name: Name,
    /// Over the whole data set's bytes.
    pub(crate) digest: Digest,
    /// Absent: all.
    pub(crate) rows: Option<data::Part>,
}

/// A model's digest and a maximum length.
pub(crate) type Key = (Digest, usize);

/// Examples, and how many of them were cut.
type Examples = (Vec<Arc<Sequence>>, u64);

/// Tokens of one part, by model and length. Keeps nothing that nobody has open.
#[derive(Debug, Default)]
pub(crate) struct Tokens(Mutex<BTreeMap<Key, Arc<Mutex<Kept>>>>);

/// Tokens that some job may still have open, and how many examples were cut.
#[derive(Debug, Default)]
struct Kept {
    examples: Weak<Vec<Arc<Sequence>>>,
    truncated: u64,
}

impl Part {
    /// Reads the part out of the whole data set.
    ///
    /// # Errors
    /// The format's, as the guest sees it.
    pub(crate) fn read(
        &self,
        whole: impl BufRead,
        config: &ModelConfig,
        text: Option<&TextModel>,
        max_length: usize,
    ) -> Result<Examples, Refusal> {
        let name = self.called();
        let mut examples = Vec::new();
        let seen = data::each(whole, &name, config, text, max_length, |line, example| {
            if self.has(line) {
                examples.push(Arc::new(example));
            }
        });
        let seen = seen.map_err(|error: FormatError| refusal(&error))?;
        if examples.is_empty() {
            let text = format!("{name}: no label within the first {max_length} tokens of any line of this part, expected at least one");
            return Err(Refusal::InvalidArgument(text));
        }
        let truncated = seen.cut_lines.iter().filter(|line| self.has(**line)).count() as u64;
        Ok((examples, truncated))
    }

    /// Whether a line, by its number from 1, is of the part.
    pub(crate) fn has(&self, line: u64) -> bool {
        let index = usize::try_from(line.saturating_sub(1)).unwrap_or(usize::MAX);
        self.rows.as_ref().is_none_or(|rows| rows.has(index))
    }

    /// As messages name it.
    pub(crate) fn called(&self) -> String {
        format!("data set `{}`", self.name)
    }
}

impl Tokens {
    /// The tokens that somebody has open, or those that `read` answers. Who asks while another reads waits for it and gets the same.
    ///
    /// # Errors
    /// Those of `read`.
    pub(crate) fn get(&self, key: Key, digest: Digest, read: impl FnOnce() -> Result<Examples, Refusal>) -> Result<Dataset, Refusal> {
        let slot = self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
        let mut kept = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(examples) = kept.examples.upgrade() {
            return Ok(Dataset { examples, truncated: kept.truncated, digest });
        }
        let (examples, truncated) = read()?;
        let examples = Arc::new(examples);
        *kept = Kept { examples: Arc::downgrade(&examples), truncated };
        Ok(Dataset { examples, truncated, digest })
    }

    /// The tokens that somebody has open.
    pub(crate) fn peek(&self, key: Key, digest: Digest) -> Option<Dataset> {
        let slot = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key)?.clone();
        let kept = slot.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Dataset { examples: kept.examples.upgrade()?, truncated: kept.truncated, digest })
    }
}
