//! Why the ledger cannot be read or written.
//!
//! Never hides which line is wrong.

use std::io;

use super::LOCK_FILE;
use super::entry::{ENTRY_BYTES_MAX, Fault};
use crate::envelope::EnvelopeError;
use crate::statement::StatementError;

/// Why the ledger cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The folder or a file in it cannot be used.
    #[error("{action} {file}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file of the folder.
        file: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// Another process holds the lock.
    #[error("another process has been writing to the ledger for longer than 30 seconds; is one stopped?")]
    Busy,
    /// A line is not what was written.
    #[error("line {line} of the ledger: {fault}")]
    Corrupt {
        /// Its number, from 1.
        line: u64,
        /// What is wrong with it.
        fault: Fault,
    },
    /// Entries that were there are gone.
    #[error("the ledger has {found} bytes, but had {expected} when this process last saw it: lines were cut off its end")]
    Shortened {
        /// Bytes that were there.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The entry's line would be too long.
    #[error("the entry would take {bytes} bytes; a line has at most {ENTRY_BYTES_MAX}")]
    TooLong {
        /// What it would take.
        bytes: usize,
    },
    /// The entry cannot be written as JSON.
    #[error("the entry cannot be written as JSON: {0}")]
    Json(#[source] serde_json::Error),
}

/// Why no receipt was sealed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The ledger's.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The caller could not make the statement.
    #[error("the statement could not be made: {0}")]
    Builder(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// What the caller made is no receipt.
    #[error(transparent)]
    Statement(#[from] StatementError),
    /// The statement does not name the receipt before it.
    #[error("the statement names {found} as the receipt before it; the ledger has {expected}")]
    Previous {
        /// What the ledger has: a digest, or `none`.
        expected: String,
        /// What the statement says.
        found: String,
    },
    /// The envelope would be too large.
    #[error(transparent)]
    Envelope(#[from] EnvelopeError),
}

impl SealError {
    /// Whether the receipt is what is wrong: sealed again, it would be refused again.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::Ledger(LedgerError::TooLong { .. } | LedgerError::Json(_)) | Self::Statement(_) | Self::Envelope(_))
    }
}

pub(super) fn io(action: &'static str, file: &'static str) -> impl FnOnce(io::Error) -> LedgerError {
    move |source| LedgerError::Io { action, file, source }
}

/// Why the lock is not had.
pub(super) fn locking(error: io::Error) -> LedgerError {
    match error.kind() {
        io::ErrorKind::WouldBlock => LedgerError::Busy,
        _ => io("locking", LOCK_FILE)(error),
    }
}
