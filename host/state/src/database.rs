//! The connections: one that writes, a few that read.
//!
//! Never shows half a transaction: a writer commits or nothing happened, and a reader sees one moment.

use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};

use crate::error::Result;
use crate::migrate;

/// Readers at most; more wait.
const READERS_MAX: usize = 4;
/// How long a writer waits for another process (an operator's command).
const BUSY: Duration = Duration::from_secs(30);
/// Prepared statements that a connection keeps.
const STATEMENTS_MAX: usize = 128;

/// The database, open.
pub(crate) struct Database {
    path: PathBuf,
    writer: Mutex<Connection>,
    readers: Mutex<Readers>,
    returned: Condvar,
}

#[derive(Default)]
struct Readers {
    idle: Vec<Connection>,
    made: usize,
}

/// A panic in a transaction rolled it back; what the lock guards is sound.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Database {
    /// Opens or makes it, and brings it to this program's version.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut writer = connect(path)?;
        migrate::migrate(&mut writer)?;
        Ok(Self { path: path.to_owned(), writer: Mutex::new(writer), readers: Mutex::default(), returned: Condvar::new() })
    }

    /// One transaction that may write. Committed where `work` gives a value, rolled back where it gives an error.
    pub(crate) fn write<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut writer = lock(&self.writer);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let value = work(&transaction)?;
        transaction.commit()?;
        Ok(value)
    }

    /// One view of the database.
    pub(crate) fn read<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut reader = self.reader()?;
        let done = reader.transaction().map_err(Into::into).and_then(|view| work(&view));
        lock(&self.readers).idle.push(reader);
        self.returned.notify_one();
        done
    }

    fn reader(&self) -> Result<Connection> {
        let mut readers = lock(&self.readers);
        loop {
            if let Some(reader) = readers.idle.pop() {
                return Ok(reader);
            }
            if readers.made < READERS_MAX {
                let reader = connect(&self.path)?;
                reader.pragma_update(None, "query_only", true)?;
                readers.made += 1;
                return Ok(reader);
            }
            readers = self.returned.wait(readers).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Refuses to grow the file beyond so many bytes (it does not shrink what is there).
    pub(crate) fn bound(&self, bytes: u64) -> Result<()> {
        let writer = lock(&self.writer);
        let page: u64 = writer.pragma_query_value(None, "page_size", |row| row.get(0))?;
        writer.pragma_update_and_check(None, "max_page_count", (bytes / page.max(1)).max(1), |_| Ok(()))?;
        Ok(())
    }
}

fn connect(path: &Path) -> Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
    connection.pragma_update(None, "journal_mode", "wal")?;
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "trusted_schema", false)?;
    Ok(connection)
}
