//! What a check of a receipt found: each check with its outcome, and for a failure exactly what does not match.
//!
//! Never says "ok" of what was not looked at. Texts come from files of strangers: shown, they are escaped and cut.

use std::fmt;

use nodus_protocol::Digest;

use crate::key::KeyId;

/// What is checked, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckName {
    /// The file is a DSSE envelope.
    Envelope,
    /// The payload is said to be an in-toto statement.
    PayloadType,
    /// A known key signed it.
    Signature,
    /// The payload is the statement of a receipt.
    Statement,
    /// Every file that the receipt speaks of is there, with the same bytes.
    SubjectFiles,
    /// Every adapter's folder holds exactly the files that the receipt speaks of, with as many bytes.
    AdapterFiles,
    /// `losses.jsonl` has the losses that the receipt digests, one a step.
    Losses,
    /// `held_out.jsonl` has the receipt's evaluations, line by line.
    HeldOut,
    /// The ledger is whole, has this receipt, and has before it the receipt that it names and the key that signed it.
    Chain,
}

impl fmt::Display for CheckName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Envelope => "envelope",
            Self::PayloadType => "payload type",
            Self::Signature => "signature",
            Self::Statement => "statement",
            Self::SubjectFiles => "subject files",
            Self::AdapterFiles => "adapter files",
            Self::Losses => "losses",
            Self::HeldOut => "held-out losses",
            Self::Chain => "chain",
        })
    }
}

impl CheckName {
    /// What a file has beside what was looked at: nobody signed it.
    const fn unsigned(self) -> Option<&'static str> {
        match self {
            Self::Losses => Some("loss and loss_bits; no other column is signed"),
            Self::HeldOut => Some("adapter, step, loss and loss_bits; no other column is signed"),
            _ => None,
        }
    }
}

/// Something that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What: a file, a field, a line.
    pub name: String,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

impl Mismatch {
    pub(super) fn new(name: impl Into<String>, expected: impl ToString, found: impl ToString) -> Self {
        Self { name: name.into(), expected: expected.to_string(), found: found.to_string() }
    }
}

/// How a check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All is as it should be.
    Ok,
    /// Something is not; at least one mismatch.
    Failed(Vec<Mismatch>),
    /// It could not be looked at, and why.
    NotChecked(String),
}

impl Outcome {
    pub(super) fn of(mismatches: Vec<Mismatch>) -> Self {
        if mismatches.is_empty() { Self::Ok } else { Self::Failed(mismatches) }
    }

    pub(super) fn not_checked(why: &str) -> Self {
        Self::NotChecked(why.to_owned())
    }
}

/// A check and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Which.
    pub name: CheckName,
    /// How it ended.
    pub outcome: Outcome,
}

/// What [`verify`](super::verify()) found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The receipt's digest: over the bytes that were checked.
    pub receipt: Digest,
    /// The key that the envelope names, where it is an envelope.
    pub keyid: Option<KeyId>,
    /// All checks, each [`CheckName`] once and in order.
    pub checks: Vec<Check>,
}

impl Report {
    /// Whether no check failed. Checks that could not be made do not count: see [`Report::is_complete`].
    #[must_use]
    pub fn is_ok(&self) -> bool {
        !self.checks.iter().any(|check| matches!(check.outcome, Outcome::Failed(_)))
    }

    /// Whether every check was made.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        !self.checks.iter().any(|check| matches!(check.outcome, Outcome::NotChecked(_)))
    }

    /// How a check ended.
    #[must_use]
    pub fn outcome(&self, name: CheckName) -> Option<&Outcome> {
        self.checks.iter().find(|check| check.name == name).map(|check| &check.outcome)
    }

    pub(super) fn push(&mut self, name: CheckName, outcome: Outcome) {
        self.checks.push(Check { name, outcome });
    }
}

/// Characters of a foreign text that are shown.
const SHOWN_MAX: usize = 200;

fn shown(text: &str) -> String {
    let mut characters = text.chars();
    let mut short: String = characters.by_ref().take(SHOWN_MAX).flat_map(char::escape_debug).collect();
    if characters.next().is_some() {
        short.push_str(" ...");
    }
    short.replace("\\\"", "\"").replace("\\'", "'")
}

/// One line a check, and below a failed one each mismatch in one line.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Check { name, outcome } in &self.checks {
            match outcome {
                Outcome::Ok => match name.unsigned() {
                    Some(unsigned) => writeln!(f, "{name}: ok ({unsigned})")?,
                    None => writeln!(f, "{name}: ok")?,
                },
                Outcome::NotChecked(why) => writeln!(f, "{name}: not checked ({})", shown(why))?,
                Outcome::Failed(mismatches) => {
                    writeln!(f, "{name}: FAILED")?;
                    for Mismatch { name, expected, found } in mismatches {
                        writeln!(f, "  {}: expected {}, found {}", shown(name), shown(expected), shown(found))?;
                    }
                }
            }
        }
        Ok(())
    }
}
