//! What can go wrong, and at whose door it lies.
//!
//! Never says what another tenant has: not there and not yours are one error.

use std::io;

use rusqlite::ErrorCode;

use crate::words::JobState;

/// A refusal, or a fault of the machine.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Not there, or somebody else's.
    #[error("there is no such {0}")]
    NotFound(&'static str),
    /// The name is taken by something else.
    #[error("the name `{0}` is taken already: expected another one, or remove what has it first")]
    Taken(String),
    /// The idempotency key came with another request before.
    #[error("the idempotency key was used for a different request: expected a new key, or the same request")]
    KeyReused,
    /// The job is not in a state that this can be done in.
    #[error("the job is {found}, expected it to be {expected}")]
    WrongState {
        /// What it is.
        found: JobState,
        /// What it would have to be.
        expected: &'static str,
    },
    /// The job was taken from whoever holds this claim.
    #[error("the claim on this job is stale: it ended or was claimed anew")]
    StaleClaim,
    /// A tenant's quota does not allow it.
    #[error("quota `{quota}` is {max}: {used} used, {asked} more asked for")]
    Quota {
        /// Which, by its name.
        quota: &'static str,
        /// The bound.
        max: u64,
        /// What is used of it.
        used: u64,
        /// What was asked for on top.
        asked: u64,
    },
    /// The members of a sweep have more of their own than is kept of one submission.
    #[error(
        "what the members of the sweep have of their own takes {bytes} bytes, expected at most {max}: shorter values, or fewer members"
    )]
    Sweep {
        /// What it takes.
        bytes: u64,
        /// What is kept at most.
        max: u64,
    },
    /// An upload that is to be gone on with is not as it is said to be.
    #[error("upload: {0}")]
    Upload(String),
    /// The disk has no room. Nothing was changed.
    #[error("the disk is full; nothing was changed")]
    Full,
    /// The folder cannot be written. Nothing was changed.
    #[error("the state's folder is read-only; nothing was changed")]
    ReadOnly,
    /// A later program wrote it.
    #[error("the state has version {found}, this program knows versions up to {known}: a newer program is needed")]
    Newer {
        /// Of the database.
        found: i64,
        /// The newest that is known.
        known: i64,
    },
    /// The file is another program's.
    #[error("the database in the state's folder is another program's")]
    Foreign,
    /// Another process has the folder.
    #[error("another process has the state's folder: the service runs already")]
    InUse,
    /// It was opened for rows alone.
    #[error("the state's folder is open for its rows alone, not for blobs")]
    RowsOnly,
    /// What is there does not agree.
    #[error("the state is damaged: {0}")]
    Damaged(String),
    /// Whatever else SQLite says.
    #[error("the state's database failed")]
    Database(#[source] rusqlite::Error),
    /// The operating system refused.
    #[error("{what} failed")]
    File {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// With our error.
pub type Result<T> = std::result::Result<T, StateError>;

impl StateError {
    /// Whether whoever asked can put it right.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::NotFound(_)
                | Self::Taken(_)
                | Self::KeyReused
                | Self::WrongState { .. }
                | Self::Quota { .. }
                | Self::Sweep { .. }
                | Self::Upload(_)
        )
    }

    /// Whether the disk takes no writes: what failed can be done again once it does.
    #[must_use]
    pub fn is_disk(&self) -> bool {
        let code = match self {
            Self::Full | Self::ReadOnly => return true,
            Self::Database(error) => error.sqlite_error_code(),
            _ => None,
        };
        matches!(code, Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen))
    }

    pub(crate) fn file(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => Self::ReadOnly,
            _ => Self::File { what, source },
        }
    }
}

impl From<rusqlite::Error> for StateError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => Self::Full,
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => Self::ReadOnly,
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Damaged(error.to_string()),
            _ => Self::Database(error),
        }
    }
}

impl From<serde_json::Error> for StateError {
    fn from(error: serde_json::Error) -> Self {
        Self::Damaged(format!("a row's JSON cannot be read: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::StateError;

    #[test]
    fn a_read_only_database_and_a_full_disk_have_words_of_their_own() {
        let connection = Connection::open_in_memory().unwrap();
        connection.execute_batch("CREATE TABLE t (x)").unwrap();
        connection.pragma_update(None, "query_only", true).unwrap();
        let error = connection.execute("INSERT INTO t VALUES (1)", []).unwrap_err();
        assert!(matches!(StateError::from(error), StateError::ReadOnly));
        let full = StateError::file("x")(std::io::ErrorKind::StorageFull.into());
        assert!(matches!(full, StateError::Full) && !full.is_refusal());
    }
}
