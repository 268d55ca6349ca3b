//! Walks over the lines of a ledger and checks each against the one before.
//!
//! Never changes a file. Calls only the last line torn, and only if a crash can have torn it; all else is corruption.

use std::io::{BufRead, Read as _};

use nodus_protocol::Digest;

use super::entry::{ENTRY_BYTES_MAX, Entry, EntryRef, Fault, Line, no_previous};
use super::error::{LedgerError, io};
use super::{LEDGER_FILE, TornTail};

/// How far a ledger has been read: everything before is whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    /// The next entry's number.
    pub(super) sequence: u64,
    /// The last entry's digest.
    pub(super) previous: Digest,
    /// Where the next line begins.
    pub(super) offset: u64,
}

impl Position {
    pub(super) fn start() -> Self {
        Self { sequence: 0, previous: no_previous(), offset: 0 }
    }

    /// The last entry.
    pub(super) fn head(&self) -> Option<EntryRef> {
        self.sequence.checked_sub(1).map(|sequence| EntryRef { sequence, digest: self.previous })
    }

    /// Goes past a line without its newline; the entry's place.
    pub(super) fn pass(&mut self, line: &[u8]) -> EntryRef {
        let at = EntryRef { sequence: self.sequence, digest: Digest::of(line) };
        *self = Self { sequence: self.sequence + 1, previous: at.digest, offset: self.offset + line.len() as u64 + 1 };
        at
    }
}

/// What is found next.
pub(super) enum Found {
    Entry(Entry),
    /// The last line, torn, and its bytes.
    Torn(TornTail, Vec<u8>),
    End,
}

/// Walks from a position on.
pub(super) struct Scanner<R> {
    reader: R,
    pub(super) position: Position,
}

impl<R: BufRead> Scanner<R> {
    /// `reader` stands at `position`.
    pub(super) fn new(reader: R, position: Position) -> Self {
        Self { reader, position }
    }

    pub(super) fn next(&mut self) -> Result<Found, LedgerError> {
        let mut line = Vec::new();
        let limit = ENTRY_BYTES_MAX as u64 + 1;
        self.reader.by_ref().take(limit).read_until(b'\n', &mut line).map_err(io("reading", LEDGER_FILE))?;
        if line.is_empty() {
            return Ok(Found::End);
        }
        let fault = match self.check(&line) {
            Ok(entry) => return Ok(Found::Entry(entry)),
            Err(fault) => fault,
        };
        let can_be_torn = matches!(fault, Fault::Incomplete | Fault::Checksum { .. } | Fault::NoNewline);
        if can_be_torn && self.reader.fill_buf().map_err(io("reading", LEDGER_FILE))?.is_empty() {
            let torn = TornTail { line: self.position.sequence + 1, bytes: line.len() as u64, fault };
            return Ok(Found::Torn(torn, line));
        }
        Err(LedgerError::Corrupt { line: self.position.sequence + 1, fault })
    }

    fn check(&mut self, line: &[u8]) -> Result<Entry, Fault> {
        if line.len() > ENTRY_BYTES_MAX {
            return Err(Fault::TooLong);
        }
        let (text, has_newline) = line.strip_suffix(b"\n").map_or((line, false), |text| (text, true));
        let Line { sequence, previous, unix_ms, event } = Line::decode(text)?;
        if sequence != self.position.sequence {
            return Err(Fault::Sequence { expected: self.position.sequence, found: sequence });
        }
        if previous != self.position.previous {
            return Err(Fault::Previous { expected: self.position.previous, found: previous });
        }
        if !has_newline {
            return Err(Fault::NoNewline);
        }
        Ok(Entry { at: self.position.pass(text), previous, unix_ms, event })
    }
}
