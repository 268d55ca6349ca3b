//! Sequences to train on or to evaluate.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{EngineError, ModelConfig};

/// One sequence, already shifted: row i reads `tokens[i]`, is asked for `targets[i]`, and counts `weights[i]` in the loss.
/// The lists are of one length, at least 1; weights are finite, 0 or more. Only [`Sequence::new`] makes one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    weights: Vec<f32>,
}

impl Sequence {
    /// Checks the three lists against each other and against the trunk.
    ///
    /// # Errors
    /// `invalid-argument` that says which list is wrong, where, and what would be right.
    pub fn new(model: &ModelConfig, tokens: Vec<u32>, targets: Vec<u32>, weights: Vec<f32>) -> Result<Self, EngineError> {
        let sequence = Self { tokens, targets, weights };
        sequence.check(model)?;
        Ok(sequence)
    }

    /// The checks of [`Sequence::new`], for a sequence that was made for another trunk or came over a wire.
    ///
    /// # Errors
    /// As [`Sequence::new`].
    pub fn check(&self, model: &ModelConfig) -> Result<(), EngineError> {
        let Self { tokens, targets, weights } = self;
        let bad = |text: String| Err(EngineError::invalid(text));
        let rows = tokens.len();
        if rows == 0 {
            return bad("tokens is empty, expected at least one".into());
        }
        if targets.len() != rows || weights.len() != rows {
            return bad(format!("{rows} tokens, {} targets and {} weights, expected as many of each", targets.len(), weights.len()));
        }
        if rows > model.max_position_embeddings {
            return bad(format!("{rows} tokens, expected at most the trunk's context of {}", model.max_position_embeddings));
        }
        for (name, list) in [("tokens", tokens), ("targets", targets)] {
            if let Some((i, id)) = list.iter().enumerate().find(|(_, id)| **id as usize >= model.vocab_size) {
                return bad(format!("{name}[{i}] is {id}, expected below the vocabulary of {}", model.vocab_size));
            }
        }
        if let Some((i, weight)) = weights.iter().enumerate().find(|(_, w)| !w.is_finite() || **w < 0.0) {
            return bad(format!("weights[{i}] is {weight}, expected a finite number, 0 or more"));
        }
        Ok(())
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Number of rows with a weight above 0.
    #[must_use]
    pub fn labelled(&self) -> usize {
        self.weights.iter().filter(|w| **w > 0.0).count()
    }

    /// Input tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Next-token targets.
    #[must_use]
    pub fn targets(&self) -> &[u32] {
        &self.targets
    }

    /// Weight of each target in the loss.
    #[must_use]
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }
}

/// Sequences in an order that counts. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// The sequences; at least one.
    pub sequences: Vec<Arc<Sequence>>,
}

impl Batch {
    /// Number of rows in all sequences.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.rows()).sum()
    }

    /// Number of rows with a weight above 0.
    #[must_use]
    pub fn labelled(&self) -> usize {
        self.sequences.iter().map(|s| s.labelled()).sum()
    }
}
