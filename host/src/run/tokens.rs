//! Rows of a data set as tokens of a model: which rows, how they are read, and what was read while somebody has it open.
//!
//! Knows no file: the bytes of the data set come from whoever has them.

use std::collections::{BTreeMap, BTreeSet};
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
    /// Line numbers, from 1; absent: all.
    pub(crate) lines: Option<BTreeSet<u64>>,
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
        let mut examples = Vec::new();
        let truncated = self.each(whole, config, text, max_length, |example| examples.push(Arc::new(example)))?;
        Ok((examples, truncated))
    }

    /// The same, an example at a time: nothing of the data set is kept. How many were cut.
    ///
    /// # Errors
    /// As [`Part::read`].
    pub(crate) fn each(
        &self,
        whole: impl BufRead,
        config: &ModelConfig,
        text: Option<&TextModel>,
        max_length: usize,
        mut take: impl FnMut(Sequence),
    ) -> Result<u64, Refusal> {
        let name = format!("data set `{}`", self.name);
        let is_of_it = |line: &u64| self.lines.as_ref().is_none_or(|lines| lines.contains(line));
        let mut is_empty = true;
        let seen = data::each(whole, &name, config, text, max_length, |line, example| {
            if is_of_it(&line) {
                is_empty = false;
                take(example);
            }
        });
        let seen = seen.map_err(|error: FormatError| refusal(&error))?;
        if is_empty {
            let text = format!("{name}: no label within the first {max_length} tokens of any line of this part, expected at least one");
            return Err(Refusal::InvalidArgument(text));
        }
        Ok(seen.cut_lines.iter().filter(|line| is_of_it(line)).count() as u64)
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
