//! Training data: the job's data sets, and batches of them or of the guest's own sequences.
//!
//! Never copies a data set into the guest unless it asks for an example.

use crate::bindings::data::{self, DatasetInfo, Example};
use crate::{Batches, Error, Result, Trunk};

/// A data set of the job, tokenised by the host for one trunk.
#[derive(Debug)]
pub struct Dataset {
    handle: data::Dataset,
    info: DatasetInfo,
}

impl Dataset {
    /// Opens a data set by the job's name for it, each example cut to `max_length` tokens (none: the trunk's context).
    /// [`Job::train_data`](crate::Job::train_data) and [`Job::held_out`](crate::Job::held_out) open the usual ones.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` for text without a tokenizer; `InvalidArgument` for a `max_length` below 2 or over the context.
    pub fn open(name: &str, trunk: &Trunk, max_length: impl Into<Option<u32>>) -> Result<Self> {
        let handle = data::Dataset::open(name, trunk.handle(), max_length.into())?;
        let info = handle.info();
        Ok(Self { handle, info })
    }

    /// Counts and digest.
    #[must_use]
    pub fn info(&self) -> &DatasetInfo {
        &self.info
    }

    /// Number of examples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.info.examples
    }

    /// Whether there is no example.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The examples with these indices, in this order; an index may repeat.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty list or an index outside the set.
    pub fn batch(&self, indices: &[u64]) -> Result<Batch> {
        Ok(Batch { handle: self.handle.batch(indices)? })
    }

    /// Every example in one batch, for [`Adapter::evaluate`](crate::Adapter::evaluate).
    ///
    /// # Errors
    /// `InvalidArgument` where the set is empty.
    pub fn all(&self) -> Result<Batch> {
        self.batch(&(0..self.len()).collect::<Vec<_>>())
    }

    /// Indices in batches of `size`, for one epoch and in order unless told otherwise.
    #[must_use]
    pub fn batches(&self, size: u64) -> Batches {
        Batches::new(self.len(), size)
    }

    /// One example's tokens, targets and weights.
    ///
    /// # Errors
    /// `InvalidArgument` for an index outside the set.
    pub fn example(&self, index: u64) -> Result<Example> {
        Ok(self.handle.example(index)?)
    }
}

/// A list of sequences of any lengths. Padding does not exist.
#[derive(Debug)]
pub struct Batch {
    handle: data::Batch,
}

impl Batch {
    /// A batch of the guest's own sequences for a trunk.
    ///
    /// # Errors
    /// `InvalidArgument` names the example and what is wrong with it; `QuotaExceeded` for `batch-tokens`.
    pub fn from_examples(trunk: &Trunk, examples: &[Example]) -> Result<Self> {
        Ok(Self { handle: data::Batch::from_examples(trunk.handle(), examples)? })
    }

    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> u32 {
        self.handle.sequences()
    }

    /// Number of rows (input tokens) in all sequences.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.handle.tokens()
    }

    /// Number of rows with a weight above 0.
    #[must_use]
    pub fn labelled_tokens(&self) -> u64 {
        self.handle.labelled_tokens()
    }

    pub(crate) fn handle(&self) -> &data::Batch {
        &self.handle
    }
}

/// ```
/// use nodus_guest::Example;
///
/// // A prompt of two tokens that are not learnt, and an answer of two that are.
/// let example = Example::shifted(&[5, 6, 7, 8], &[0.0, 0.0, 1.0, 1.0]).unwrap();
/// assert_eq!(example.tokens, [5, 6, 7]);
/// assert_eq!(example.targets, [6, 7, 8]);
/// assert_eq!(example.weights, [0.0, 1.0, 1.0]);
/// ```
impl Example {
    /// The n - 1 rows of a line of n tokens, each asked for the token after it; `weights[i]` belongs to `tokens[i]` as a target,
    /// so the first weight is unused. This is the only shift there is: the host does none.
    ///
    /// # Errors
    /// `InvalidArgument` for fewer than 2 tokens, or another number of weights than of tokens.
    pub fn shifted(tokens: &[u32], weights: &[f32]) -> Result<Self> {
        if tokens.len() != weights.len() {
            let text = format!("{} tokens and {} weights, expected as many of each", tokens.len(), weights.len());
            return Err(Error::InvalidArgument(text));
        }
        match (tokens, weights) {
            ([inputs @ .., _], [_, counted @ ..]) if !inputs.is_empty() => {
                Ok(Self { tokens: inputs.to_vec(), targets: tokens.iter().skip(1).copied().collect(), weights: counted.to_vec() })
            }
            _ => Err(Error::InvalidArgument(format!("{} tokens, expected at least 2", tokens.len()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_once() {
        let example = Example::shifted(&[1, 2], &[9.0, 0.5]).unwrap();
        assert_eq!(example, Example { tokens: vec![1], targets: vec![2], weights: vec![0.5] });
    }

    #[test]
    fn refuses_what_has_no_row() {
        assert_eq!(Example::shifted(&[1], &[1.0]).unwrap_err().to_string(), "1 tokens, expected at least 2");
        assert_eq!(Example::shifted(&[], &[]).unwrap_err().to_string(), "0 tokens, expected at least 2");
        let unequal = Example::shifted(&[1, 2, 3], &[1.0]).unwrap_err().to_string();
        assert_eq!(unequal, "3 tokens and 1 weights, expected as many of each");
    }
}
