//! What can go wrong, and at whose door it lies.
//!
//! Never says what another tenant has: not there and not yours are one error.

use std::io;

use rusqlite::{ErrorCode, ffi};

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
    /// It is to be brought to this program's version, and another process has the folder.
    #[error("the state is an older program's, and another process serves it: this program brings it up to date once that has ended")]
    Older,
    /// It was opened for rows alone.
    #[error("the state's folder is open for its rows alone, not for blobs")]
    RowsOnly,
    /// What is there does not agree.
    #[error("the state is damaged: {0}")]
    Damaged(String),
    /// The database cannot be read, or what it holds is none. Nothing that is tried again puts that right.
    #[error("the state's database is broken: expected it to be brought back, or put right, while the service does not run")]
    Broken(#[source] rusqlite::Error),
    /// The disk refuses what is written, and is not said to be full. Nothing was changed, and it may go well later.
    #[error("the state's database cannot be written: the disk refuses it with an I/O error; nothing was changed")]
    Unwritten(#[source] rusqlite::Error),
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
        matches!(self, Self::Full | Self::ReadOnly | Self::Unwritten(_))
    }

    pub(crate) fn file(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full,
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => Self::ReadOnly,
            _ => Self::File { what, source },
        }
    }
}

/// What SQLite says where a file took no write. A full disk has a code of its own, but a quota and a file's largest size do not, nor has a disk that is
/// full only when it is synced; what the system said can be asked for by unsafe code alone. Nothing was changed, and a write that failed for another
/// reason may go well as little and as much.
const UNWRITTEN: [i32; 9] = [
    ffi::SQLITE_IOERR_WRITE,
    ffi::SQLITE_IOERR_FSYNC,
    ffi::SQLITE_IOERR_DIR_FSYNC,
    ffi::SQLITE_IOERR_TRUNCATE,
    ffi::SQLITE_IOERR_DELETE,
    ffi::SQLITE_IOERR_SHMOPEN,
    ffi::SQLITE_IOERR_SHMSIZE,
    ffi::SQLITE_CANTOPEN,
    ffi::SQLITE_CANTOPEN_DIRTYWAL,
];
/// And where a file cannot be read, or what was read is not what was written.
const UNREAD: [i32; 4] = [ffi::SQLITE_IOERR_READ, ffi::SQLITE_IOERR_SHORT_READ, ffi::SQLITE_IOERR_CORRUPTFS, ffi::SQLITE_IOERR_DATA];

fn extended(error: &rusqlite::Error) -> Option<i32> {
    error.sqlite_error().map(|error| error.extended_code)
}

impl From<rusqlite::Error> for StateError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => Self::Full,
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => Self::ReadOnly,
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Broken(error),
            _ if extended(&error).is_some_and(|code| UNREAD.contains(&code)) => Self::Broken(error),
            _ if extended(&error).is_some_and(|code| UNWRITTEN.contains(&code)) => Self::Unwritten(error),
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
    use rusqlite::{Connection, ffi};

    use super::{StateError, UNREAD, UNWRITTEN};

    /// A disk that takes no writes may take them later; what cannot be read is not there later either.
    #[test]
    fn what_cannot_be_written_is_the_disks_and_what_cannot_be_read_is_broken() {
        let of = |code| StateError::from(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None));
        for code in [ffi::SQLITE_FULL, ffi::SQLITE_READONLY, ffi::SQLITE_READONLY_DIRECTORY] {
            assert!(of(code).is_disk(), "{code}");
        }
        for code in UNWRITTEN {
            let error = of(code);
            assert!(error.is_disk() && !error.is_refusal() && !error.to_string().contains("full"), "{code}: {error}");
        }
        for code in UNREAD.into_iter().chain([ffi::SQLITE_CORRUPT, ffi::SQLITE_CORRUPT_INDEX, ffi::SQLITE_NOTADB]) {
            assert!(matches!(of(code), StateError::Broken(_)) && !of(code).is_disk() && !of(code).is_refusal(), "{code}");
        }
        for code in [ffi::SQLITE_BUSY, ffi::SQLITE_CONSTRAINT, ffi::SQLITE_IOERR_NOMEM, ffi::SQLITE_IOERR_LOCK] {
            assert!(matches!(of(code), StateError::Database(_)) && !of(code).is_disk(), "{code}");
        }
    }

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
