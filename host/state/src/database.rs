//! The connections: one that writes, a few that read.
//!
//! Never shows half a transaction: a writer commits or nothing happened, and a reader sees one moment.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, Transaction, TransactionBehavior};

use crate::error::{Result, StateError};
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
    /// Of what every request begins with.
    door: Mutex<Option<Connection>>,
    /// Whether it was seen to be broken.
    is_broken: AtomicBool,
    /// Whether the disk refused to write it, and is not said to be full.
    is_refused: AtomicBool,
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
    pub(crate) fn open(path: &Path, alone: impl FnOnce() -> Result<Option<File>>) -> Result<Self> {
        let mut writer = connect(path)?;
        migrate::migrate(&mut writer, alone)?;
        let (writer, readers, door) = (Mutex::new(writer), Mutex::default(), Mutex::default());
        let (is_broken, is_refused) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { path: path.to_owned(), writer, readers, returned: Condvar::new(), door, is_broken, is_refused })
    }

    /// One transaction that may write. Committed where `work` gives a value, rolled back where it gives an error.
    pub(crate) fn write<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut writer = lock(&self.writer);
        let work = || {
            let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let value = work(&transaction)?;
            transaction.commit()?;
            Ok(value)
        };
        self.noted(work())
    }

    /// Whether the disk refused what was to be written, and is not said to be full, and was not seen to take anything since.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused.load(Relaxed)
    }

    /// Tries to write something, though nothing changes by it. A row that is given what it has would not be written.
    pub(crate) fn try_again(&self) -> Result<()> {
        self.write(|transaction| {
            let same: i64 = transaction.pragma_query_value(None, "user_version", |row| row.get(0))?;
            Ok(transaction.pragma_update(None, "user_version", same)?)
        })?;
        self.is_refused.store(false, Relaxed);
        tracing::info!("the state's database is written again");
        Ok(())
    }

    /// Whether it was seen to be broken since it was opened.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken.load(Relaxed)
    }

    /// The first time that it is seen to be broken, or not to be written, it is said, and not with every request that meets it.
    fn noted<T>(&self, done: Result<T>) -> Result<T> {
        match &done {
            Err(StateError::Broken(source)) if !self.is_broken.swap(true, Relaxed) => {
                tracing::error!("the state's database is broken, and the service stands still: {source}");
            }
            Err(error @ StateError::Unwritten(source)) if !self.is_refused.swap(true, Relaxed) => {
                tracing::error!("{error}: {source}; it is tried again until it can be");
            }
            _ => {}
        }
        done
    }

    /// One view of the database.
    pub(crate) fn read<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut reader = self.reader()?;
        let done = reader.transaction().map_err(Into::into).and_then(|view| work(&view));
        lock(&self.readers).idle.push(reader);
        self.returned.notify_one();
        self.noted(done)
    }

    /// The same of something short that waits for no other reading: who asks is known, however long the answers to others take.
    pub(crate) fn read_at_door<T>(&self, work: impl FnOnce(&Transaction<'_>) -> Result<T>) -> Result<T> {
        let mut door = lock(&self.door);
        let reader = if let Some(reader) = door.as_mut() { reader } else { door.insert(reading(&self.path)?) };
        let view = reader.transaction()?;
        self.noted(work(&view))
    }

    fn reader(&self) -> Result<Connection> {
        let mut readers = lock(&self.readers);
        loop {
            if let Some(reader) = readers.idle.pop() {
                return Ok(reader);
            }
            if readers.made < READERS_MAX {
                let reader = reading(&self.path)?;
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

fn reading(path: &Path) -> Result<Connection> {
    let reader = connect(path)?;
    reader.pragma_update(None, "query_only", true)?;
    Ok(reader)
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

#[cfg(test)]
mod tests {
    use super::{Database, READERS_MAX};

    #[test]
    fn who_asks_is_known_while_all_readers_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("state.db"), || Ok(None)).unwrap();
        let (begun, begins) = std::sync::mpsc::channel();
        let (ends, end) = (std::sync::Barrier::new(READERS_MAX + 1), &database);
        std::thread::scope(|scope| {
            for _ in 0..READERS_MAX {
                let (begun, ends) = (begun.clone(), &ends);
                scope.spawn(move || {
                    end.read(|_| {
                        begun.send(()).unwrap();
                        ends.wait();
                        Ok(())
                    })
                    .unwrap();
                });
            }
            (0..READERS_MAX).for_each(|_| begins.recv().unwrap());
            let tokens: i64 =
                database.read_at_door(|view| Ok(view.query_row("SELECT count(*) FROM tokens", [], |row| row.get(0))?)).unwrap();
            assert_eq!(tokens, 0);
            ends.wait();
        });
    }
}
