//! A ledger that is read again and again: of all of it only what was added since, and of a job its own entries.
//!
//! Never writes and never locks; a last line that is being written at that moment is there the next time.

use std::io::{BufReader, Read as _, Seek as _, SeekFrom};

use cap_std::fs::Dir;

use super::LEDGER_FILE;
use super::error::{LedgerError, io};
use super::index::{Index, JobEntries};
use super::scan::{Found, Position, Scanner};
use crate::files::open_regular;

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

    /// A job's entries from the so-manieth of them on, from 0. What was added to the ledger since the last time is read and checked before: the first
    /// time that is all of it.
    ///
    /// # Errors
    /// There is no ledger, it is corrupt, or it is shorter than it was.
    pub fn entries(&mut self, job: &str, from: u64) -> Result<JobEntries, LedgerError> {
        let mut file = open_regular(&self.dir, LEDGER_FILE).map_err(io("opening", LEDGER_FILE))?;
        let found = file.metadata().map_err(io("reading", LEDGER_FILE))?.len();
        let expected = self.position.offset;
        if found < expected {
            return Err(LedgerError::Shortened { expected, found });
        }
        file.seek(SeekFrom::Start(expected)).map_err(io("reading", LEDGER_FILE))?;
        let mut scanner = Scanner::new(BufReader::new(file.take(found - expected)), self.position);
        while let Found::Entry(entry) = scanner.next()? {
            self.index.note(&entry, self.position, scanner.position);
            self.position = scanner.position;
        }
        self.index.entries(&self.dir, job, from)
    }
}
