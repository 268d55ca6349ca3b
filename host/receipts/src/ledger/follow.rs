//! A ledger that is read again and again: of all of it only what was added since, and of a job its own entries.
//!
//! Never writes, and never believes a line that its writer may still take back: one that the disk did not take whole goes before the lock is
//! given up. So the end of the ledger is read under the same lock, shared. What comes before the longest torn line that there can be is read
//! without it, where it is much: nobody touches that any more, and a writer would wait for long.

use std::io::{BufReader, Read as _, Seek as _, SeekFrom};

use cap_std::fs::{Dir, File};

use super::entry::ENTRY_BYTES_MAX;
use super::error::{LedgerError, io, locking};
use super::index::{Index, JobEntries};
use super::scan::{Found, Position, Scanner};
use super::{LEDGER_FILE, LOCK_FILE};
use crate::files::{open_regular, shared};

/// What is read under the lock at most: some hundredths of a second.
const LOCKED_BYTES_MAX: u64 = 2 * TORN_BYTES_MAX;
/// What a writer may cut off the end, or have left there.
const TORN_BYTES_MAX: u64 = ENTRY_BYTES_MAX as u64;

/// A ledger that is followed.
#[derive(Debug)]
pub struct Follower {
    dir: Dir,
    position: Position,
    index: Index,
}

impl Follower {
    /// Follows the ledger in this folder, of which nothing was read yet.
    #[must_use]
    pub fn new(dir: Dir) -> Self {
        Self { dir, position: Position::start(), index: Index::default() }
    }

    /// Follows a ledger from where somebody has read it to.
    pub(super) fn from(dir: Dir, position: Position, index: Index) -> Self {
        Self { dir, position, index }
    }

    /// A job's entries from the so-manieth of them on, from 0. What was added to the ledger since the last time is read and checked before: the first
    /// time that is all of it.
    ///
    /// # Errors
    /// There is no ledger, it is corrupt, or it is shorter than it was; a process has been writing to it for long.
    pub fn entries(&mut self, job: &str, from: u64) -> Result<JobEntries, LedgerError> {
        let mut file = open_regular(&self.dir, LEDGER_FILE).map_err(io("opening", LEDGER_FILE))?;
        loop {
            let lock = shared(&self.dir, LOCK_FILE).map_err(locking)?;
            let (expected, found) = (self.position.offset, file.metadata().map_err(io("reading", LEDGER_FILE))?.len());
            if found < expected {
                return Err(LedgerError::Shortened { expected, found });
            }
            if found - expected <= LOCKED_BYTES_MAX {
                self.read_to(&mut file, found)?;
                break;
            }
            drop(lock);
            self.read_to(&mut file, found - TORN_BYTES_MAX)?;
        }
        self.index.entries(&self.dir, job, from)
    }

    /// Reads all lines that are whole before a place.
    fn read_to(&mut self, file: &mut File, end: u64) -> Result<(), LedgerError> {
        let begin = self.position.offset;
        file.seek(SeekFrom::Start(begin)).map_err(io("reading", LEDGER_FILE))?;
        let mut scanner = Scanner::new(BufReader::new(file.take(end - begin)), self.position);
        while let Found::Entry(entry) = scanner.next()? {
            self.index.note(&entry, self.position, scanner.position);
            self.position = scanner.position;
        }
        Ok(())
    }
}
