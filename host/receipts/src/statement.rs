//! The fields of a receipt's statement that this crate reads: in-toto's Statement v1 and, of the predicate, what can be checked
//! against files and the ledger.
//!
//! Never the whole form of a predicate: what is not named here is signed and kept as it is.

use std::collections::BTreeSet;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

/// in-toto's Statement v1: <https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md>.
pub const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
/// The predicate whose fields are read.
pub const PREDICATE_TYPE: &str = "https://nodus.dev/receipt/v1";

/// Why a payload is no receipt.
#[derive(Debug, thiserror::Error)]
pub enum StatementError {
    /// Not the JSON of a statement.
    #[error("not an in-toto statement with a receipt: {0}")]
    Json(#[source] serde_json::Error),
    /// A statement of another kind.
    #[error("`{field}` is `{found}`; expected `{expected}`")]
    Type {
        /// `_type` or `predicateType`.
        field: &'static str,
        /// What a receipt has there.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// Two subjects of one name.
    #[error("the subject `{0}` is named twice")]
    SubjectTwice(String),
}

/// A SHA-256 digest as in-toto writes it: `{"sha256": "64 hexadecimal digits"}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Algorithms", try_from = "Algorithms")]
pub struct DigestSet(pub Digest);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Algorithms {
    sha256: String,
}

impl From<DigestSet> for Algorithms {
    fn from(set: DigestSet) -> Self {
        Self { sha256: set.0.hex() }
    }
}

impl TryFrom<Algorithms> for DigestSet {
    type Error = nodus_protocol::DigestParseError;

    fn try_from(algorithms: Algorithms) -> Result<Self, Self::Error> {
        format!("sha256:{}", algorithms.sha256).parse().map(Self)
    }
}

/// A signed statement's fields.
#[derive(Clone, Debug, Deserialize)]
pub struct Statement {
    /// The files that came out of the run.
    pub subject: Vec<Subject>,
    /// What is said of the run.
    pub predicate: Predicate,
}

/// A file that came out of the run.
#[derive(Clone, Debug, Deserialize)]
pub struct Subject {
    /// Its path below the run's folder.
    pub name: String,
    /// Over its bytes.
    pub digest: DigestSet,
}

/// The part of a predicate that is checked. What a statement leaves out is not checked.
#[derive(Clone, Debug, Deserialize)]
pub struct Predicate {
    /// The receipt before this one on the same host; `null` or left out in the first. See [`crate::envelope::receipt_digest`].
    #[serde(default)]
    pub previous_receipt: Option<DigestSet>,
    /// Optimiser steps of all adapters: the lines of `losses.jsonl`.
    #[serde(default)]
    pub steps: Option<u64>,
    /// SHA-256 over the `loss_bits` of every line of `losses.jsonl`, each with a newline.
    #[serde(default)]
    pub losses: Option<DigestSet>,
    /// Every line of `held_out.jsonl`, in order.
    #[serde(default)]
    pub held_out_losses: Option<Vec<Evaluation>>,
    /// The adapters: each a folder of the run's folder.
    #[serde(default)]
    pub artifacts: Option<Vec<Artifact>>,
    /// Bytes of the files of all adapters.
    #[serde(default)]
    pub adapter_bytes: Option<u64>,
}

/// One evaluation. In `held_out.jsonl` the first adapter's number is left out.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Evaluation {
    /// Which of the job's adapters, from 0.
    #[serde(default)]
    pub adapter: u32,
    /// Its step count at that time.
    pub step: u64,
    /// The float32's bits: `0x40b80d3c`.
    pub loss_bits: String,
}

/// One saved adapter.
#[derive(Clone, Debug, Deserialize)]
pub struct Artifact {
    /// The folder that holds its files.
    pub name: String,
    /// Bytes of its files.
    pub bytes: u64,
}

impl Statement {
    /// Reads a payload.
    ///
    /// # Errors
    /// It is no in-toto statement, or not one of a receipt.
    pub fn parse(payload: &[u8]) -> Result<Self, StatementError> {
        // The types first: of a statement of another kind, say just that.
        let Types { kind, predicate_type } = serde_json::from_slice(payload).map_err(StatementError::Json)?;
        for (field, expected, found) in [("_type", STATEMENT_TYPE, kind), ("predicateType", PREDICATE_TYPE, predicate_type)] {
            if found != expected {
                return Err(StatementError::Type { field, expected, found });
            }
        }
        let statement: Self = serde_json::from_slice(payload).map_err(StatementError::Json)?;
        let mut names = BTreeSet::new();
        match statement.subject.iter().find(|subject| !names.insert(subject.name.as_str())) {
            Some(subject) => Err(StatementError::SubjectTwice(subject.name.clone())),
            None => Ok(statement),
        }
    }

    /// The subjects' digests, in order.
    pub fn subjects(&self) -> impl Iterator<Item = Digest> {
        self.subject.iter().map(|subject| subject.digest.0)
    }
}

#[derive(Deserialize)]
struct Types {
    #[serde(rename = "_type")]
    kind: String,
    #[serde(rename = "predicateType")]
    predicate_type: String,
}
