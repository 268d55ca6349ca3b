//! The state's folder, open.
//!
//! Holds no rows in memory: what is asked for is read. What the disk does not take is no row.
//!
//! ```text
//! state.db      tenants, jobs, events, ... (SQLite, WAL: state.db-wal and state.db-shm beside it)
//! blobs/HE/HEX  content by SHA-256
//! partial/      uploads that broke off
//! tmp/          what is being written
//! serve.lock    held by the one process that serves
//! ```

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use cap_std::fs::Dir;
use rusqlite::Transaction;

use crate::access::{self, Access};
use crate::blobs::Blobs;
use crate::change::{Change, Listener};
use crate::database::Database;
use crate::error::{Result, StateError};
use crate::excuses::Excuses;

const DATABASE: &str = "state.db";

/// Everything that the service remembers. Shared between threads.
pub struct State {
    pub(crate) database: Database,
    pub(crate) blobs: Arc<Blobs>,
    pub(crate) excuses: Excuses,
    listeners: RwLock<Vec<Listener>>,
    _taken: Option<std::fs::File>,
}

impl State {
    /// Opens the state in a folder, and makes it where there is none.
    ///
    /// `path` is where `dir` is: SQLite opens its files by name.
    ///
    /// # Errors
    /// Another process has it, a newer program wrote it, an older one serves it, or the disk refuses.
    pub fn open(dir: Dir, path: &Path, access: Access) -> Result<Self> {
        let taken = access::take(&dir, access)?;
        let alone = || match access {
            Access::Whole => Ok(None),
            Access::Rows => access::take(&dir, Access::Whole).map_err(|error| match error {
                StateError::InUse => StateError::Older,
                error => error,
            }),
        };
        let database = Database::open(&path.join(DATABASE), alone)?;
        let blobs = Arc::new(Blobs::open(dir, access)?);
        Ok(Self { database, blobs, excuses: Excuses::default(), listeners: RwLock::default(), _taken: taken })
    }

    /// Keeps the database below so many bytes, beyond which everything that needs more is refused as on a full disk.
    ///
    /// # Errors
    /// The database's.
    pub fn bound_database(&self, bytes: u64) -> Result<()> {
        self.database.bound(bytes)
    }

    /// Whether the database was seen to be broken: nothing that needs it goes well before it was opened anew.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.database.is_broken()
    }

    /// Whether the disk refused what was to be written, by an I/O error: it may go well later, and loses nothing meanwhile.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.database.is_refused()
    }

    /// Where the disk refused what was to be written: tries to write something, so that it is known when it can be.
    ///
    /// # Errors
    /// It still does.
    pub fn try_again(&self) -> Result<()> {
        if self.is_refused() { self.database.try_again() } else { Ok(()) }
    }

    /// Whether the database can be read.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn is_ready(&self) -> Result<()> {
        self.database.read(|view| Ok(view.query_row("SELECT count(*) FROM tokens", [], |_| Ok(()))?))
    }

    /// Has every change told, from now on.
    pub fn listen(&self, listener: impl Fn(&Change) + Send + Sync + 'static) {
        self.listeners.write().unwrap_or_else(PoisonError::into_inner).push(Box::new(listener));
    }

    pub(crate) fn tell(&self, changes: &[Change]) {
        let listeners = self.listeners.read().unwrap_or_else(PoisonError::into_inner);
        for change in changes {
            listeners.iter().for_each(|listener| listener(change));
        }
    }

    /// A transaction whose changes are told once it is committed.
    pub(crate) fn change<T>(&self, work: impl FnOnce(&Transaction<'_>, &mut Vec<Change>) -> Result<T>) -> Result<T> {
        let mut changes = Vec::new();
        let value = self.database.write(|transaction| work(transaction, &mut changes))?;
        self.tell(&changes);
        Ok(value)
    }
}

/// Unix milliseconds.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
