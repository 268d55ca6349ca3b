//! Whose fault an error is: the user's, or ours.
//!
//! Never decides what to do about one; `main` maps them to exit codes.

use std::fmt::Display;
use std::io;

use nodus_receipts::ledger::SealError;
use nodus_state::StateError;

use crate::text::nearest;

/// The user can put this right. One or two lines: what is wrong, where, and what would be right. Everything else inside an
/// `anyhow::Error` is ours.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub struct UserError {
    text: String,
    /// The name of a fault that the ledger enters.
    code: Option<&'static str>,
}

impl UserError {
    /// An error with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: None }
    }
}

/// A refusal that leaves a line in the ledger, under this name, which never changes.
pub(crate) fn refusal(code: &'static str, text: impl Into<String>) -> anyhow::Error {
    UserError { text: text.into(), code: Some(code) }.into()
}

/// How the ledger calls it, where it is to enter it.
pub(crate) fn refusal_code(error: &anyhow::Error) -> Option<&'static str> {
    error.downcast_ref::<UserError>().and_then(|error| error.code)
}

/// Shorthand for an `anyhow::Error` that is the user's to put right.
pub(crate) fn user(text: impl Into<String>) -> anyhow::Error {
    UserError::new(text).into()
}

/// The same error once more: of the user's all of it, of ours its words.
pub(crate) fn again(error: &anyhow::Error) -> anyhow::Error {
    error.downcast_ref::<UserError>().map_or_else(|| anyhow::anyhow!("{error:#}"), |error| error.clone().into())
}

/// How a program that did not fail ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It did what was asked.
    Done,
    /// The user interrupted it; what was kept has been said.
    Interrupted,
}

impl Ending {
    /// The exit code: 130 is what shells use for Ctrl-C.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Interrupted => 130,
        }
    }
}

/// The exit code of an error: 2 where the user can put it right, else 1.
#[must_use]
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if error.downcast_ref::<UserError>().is_some() { 2 } else { 1 }
}

/// Whether the disk took no writes: what failed can be done again once it does.
pub(crate) fn is_disk(error: &anyhow::Error) -> bool {
    let is_full = |error: &io::Error| {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        matches!(error.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem | FileTooLarge)
    };
    error.chain().any(|cause| {
        cause.downcast_ref::<StateError>().is_some_and(StateError::is_disk) || cause.downcast_ref::<io::Error>().is_some_and(is_full)
    })
}

/// Whether a tenant's quota has no room for what a job leaves, as it is told.
pub(crate) fn over_quota(error: &anyhow::Error) -> Option<String> {
    let refused =
        error.chain().find_map(|cause| cause.downcast_ref::<StateError>().filter(|cause| matches!(cause, StateError::Quota { .. })))?;
    Some(format!("there is no room for what the job leaves: {refused}; delete jobs, data sets or components, or have the quota raised"))
}

/// Whether the receipt that was to be sealed can never be: what failed fails again however often it is done.
pub(crate) fn is_unsealable(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.downcast_ref::<SealError>().is_some_and(SealError::is_lasting))
}

/// Whether all that failed is that nobody reads our output any more.
#[must_use]
pub fn is_reader_gone(error: &anyhow::Error) -> bool {
    error.root_cause().downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Most names that an error lists.
const NAMES_SHOWN_MAX: usize = 20;

/// What exists, for an error about `asked`, which does not: the nearest name, `there are: a, b`, or how to make one.
pub(crate) fn there_are<T: Display>(asked: &str, existing: &[T], how_to_add: &str) -> String {
    if existing.is_empty() {
        return format!("; there are none yet: {how_to_add}");
    }
    let names: Vec<String> = existing.iter().map(ToString::to_string).collect();
    let near = nearest(asked, &names.iter().map(String::as_str).collect::<Vec<_>>()).map(|near| format!(", did you mean `{near}`?"));
    let listed = names.iter().take(NAMES_SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = names.len().saturating_sub(NAMES_SHOWN_MAX);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    let (near, end) = near.map_or((String::new(), ";"), |near| (near, ""));
    format!("{near}{end} there are: {listed}{rest}")
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use nodus_state::StateError;

    use super::{exit_code, is_disk, there_are, user};

    #[test]
    fn the_users_fault_is_2_and_ours_1_also_under_context() {
        assert_eq!(exit_code(&user("bad")), 2);
        assert_eq!(exit_code(&Err::<(), _>(user("bad")).context("while importing").unwrap_err()), 2);
        assert_eq!(exit_code(&anyhow::anyhow!("disk")), 1);
    }

    #[test]
    fn a_disk_that_takes_no_writes_is_known_under_any_context() {
        let full =
            |kind: std::io::ErrorKind| Err::<(), _>(std::io::Error::from(kind)).context("writing log.txt").context("a job").unwrap_err();
        assert!(is_disk(&full(std::io::ErrorKind::StorageFull)) && is_disk(&full(std::io::ErrorKind::ReadOnlyFilesystem)));
        assert!(is_disk(&Err::<(), _>(StateError::Full).context("writing down what the job tells").unwrap_err()));
        assert!(!is_disk(&full(std::io::ErrorKind::NotFound)) && !is_disk(&StateError::StaleClaim.into()));
    }

    #[test]
    fn what_exists_is_listed() {
        assert_eq!(there_are("xyz", &["ab", "bc"], "run x"), "; there are: ab, bc");
        assert_eq!(there_are("jargn", &["jargon", "b"], "run x"), ", did you mean `jargon`? there are: jargon, b");
        assert_eq!(there_are::<&str>("a", &[], "run x"), "; there are none yet: run x");
        let many: Vec<u32> = (100..130).collect();
        assert!(there_are("x", &many, "run x").ends_with("118, 119 and 10 more"));
    }
}
