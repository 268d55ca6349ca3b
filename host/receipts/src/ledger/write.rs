//! The writing side of the ledger.
//!
//! Never writes after a line that it has not checked, and never returns before the disk has what it wrote.

use std::collections::BTreeSet;
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom, Write as _};

use cap_std::fs::{Dir, File, OpenOptions, OpenOptionsExt as _};
use nodus_protocol::Digest;

use super::entry::{ENTRY_BYTES_MAX, Entry, EntryRef, Event, Line};
use super::error::{LedgerError, io, locking};
use super::follow::Follower;
use super::index::{Index, JobEntries};
use super::read::Reader;
use super::scan::{Found, Position, Scanner};
use super::{LEDGER_FILE, LOCK_FILE, TORN_FILE, TornTail};
use crate::files::{exclusive, sync_dir};
use crate::key::{HostKey, KeyId};

/// A host's ledger, open for writing.
#[derive(Debug)]
pub struct Ledger {
    pub(super) dir: Dir,
    pub(super) key: HostKey,
    position: Position,
    pub(super) last_receipt: Option<Digest>,
    keys: BTreeSet<KeyId>,
    pub(super) index: Index,
    torn: Vec<TornTail>,
}

/// The ledger's file while its lock is held.
pub(super) struct Locked {
    file: File,
    _lock: std::fs::File,
}

impl Ledger {
    /// Opens the ledger in this folder, made if it is missing, checks every line, and enters the key if it is new here.
    ///
    /// # Errors
    /// The folder refuses, another process holds the lock for long, or the ledger is corrupt.
    pub fn open(dir: Dir, key: HostKey, unix_ms: u64) -> Result<Self, LedgerError> {
        let mut ledger = Self {
            dir,
            key,
            position: Position::start(),
            last_receipt: None,
            keys: BTreeSet::new(),
            index: Index::default(),
            torn: Vec::new(),
        };
        let mut locked = ledger.lock()?;
        let keyid = ledger.key.public().id();
        if !ledger.keys.contains(&keyid) {
            ledger.add(&mut locked, unix_ms, Event::KeyCreated { keyid })?;
        }
        Ok(ledger)
    }

    /// Adds an entry at the time `unix_ms` (milliseconds since 1970 in UTC); its place. It is on the disk when this returns.
    ///
    /// # Errors
    /// The disk refuses, another process holds the lock for long, or the ledger is corrupt. After an error of the disk the entry may
    /// be there or not.
    pub fn append(&mut self, unix_ms: u64, event: Event) -> Result<EntryRef, LedgerError> {
        let mut locked = self.lock()?;
        self.add(&mut locked, unix_ms, event)
    }

    /// Adds several entries at one time, in order, in one write: a crash leaves the first few of them, each whole.
    ///
    /// # Errors
    /// As [`Ledger::append`], before or after some of them.
    pub fn append_all(&mut self, unix_ms: u64, events: Vec<Event>) -> Result<(), LedgerError> {
        let mut locked = self.lock()?;
        self.write(&mut locked, unix_ms, events).map(drop)
    }

    /// The last entry.
    ///
    /// # Errors
    /// As [`Ledger::append`].
    pub fn head(&mut self) -> Result<Option<EntryRef>, LedgerError> {
        self.lock()?;
        Ok(self.position.head())
    }

    /// The last receipt's digest. Another process may seal the next one as soon as this returns; [`Ledger::seal`] keeps it out.
    ///
    /// # Errors
    /// As [`Ledger::append`].
    pub fn last_receipt(&mut self) -> Result<Option<Digest>, LedgerError> {
        self.lock()?;
        Ok(self.last_receipt)
    }

    /// The torn lines that were cut off since this ledger was opened.
    #[must_use]
    pub fn torn(&self) -> &[TornTail] {
        &self.torn
    }

    /// The same ledger, for reading.
    ///
    /// # Errors
    /// The system has no file handle left.
    pub fn reader(&self) -> Result<Reader, LedgerError> {
        self.dir.try_clone().map(Reader::new).map_err(io("opening", LEDGER_FILE))
    }

    /// The same ledger, to be followed from where this one has read it to.
    ///
    /// # Errors
    /// The system has no file handle left.
    pub fn follower(&self) -> Result<Follower, LedgerError> {
        let dir = self.dir.try_clone().map_err(io("opening", LEDGER_FILE))?;
        Ok(Follower::from(dir, self.position, self.index.clone()))
    }

    /// A job's entries, in order, those of other processes among them; nothing else is read.
    ///
    /// # Errors
    /// As [`Ledger::append`].
    pub fn entries_of(&mut self, job: &str) -> Result<JobEntries, LedgerError> {
        self.lock()?;
        self.index.entries(&self.dir, job, 0)
    }

    /// Keeps other writers out until the result is dropped, and reads what they have added.
    pub(super) fn lock(&mut self) -> Result<Locked, LedgerError> {
        let lock = exclusive(&self.dir, LOCK_FILE).map_err(locking)?;
        let is_new = self.position.offset == 0;
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(is_new).mode(0o600);
        let mut file = self.dir.open_with(LEDGER_FILE, &options).map_err(io("opening", LEDGER_FILE))?;
        if is_new {
            sync_dir(&self.dir).map_err(io("creating", LEDGER_FILE))?;
        }
        self.catch_up(&mut file)?;
        Ok(Locked { file, _lock: lock })
    }

    fn catch_up(&mut self, file: &mut File) -> Result<(), LedgerError> {
        let expected = self.position.offset;
        let found = file.metadata().map_err(io("reading", LEDGER_FILE))?.len();
        if found < expected {
            return Err(LedgerError::Shortened { expected, found });
        }
        file.seek(SeekFrom::Start(expected)).map_err(io("reading", LEDGER_FILE))?;
        let mut scanner = Scanner::new(BufReader::new((&*file).take(found - expected)), self.position);
        loop {
            match scanner.next()? {
                Found::Entry(entry) => {
                    let start = std::mem::replace(&mut self.position, scanner.position);
                    self.note(&entry, start, scanner.position);
                }
                Found::Torn(torn, bytes) => {
                    self.cut(file, &bytes)?;
                    self.torn.push(torn);
                    return Ok(());
                }
                Found::End => return Ok(()),
            }
        }
    }

    fn note(&mut self, entry: &Entry, start: Position, end: Position) {
        self.index.note(entry, start, end);
        match entry.event {
            Event::KeyCreated { keyid } => {
                self.keys.insert(keyid);
            }
            Event::Receipt { receipt, .. } => self.last_receipt = Some(receipt),
            Event::AdapterBytes { .. } | Event::JobFailed { .. } => {}
        }
    }

    /// Keeps the torn line aside, then cuts it off.
    fn cut(&self, file: &File, bytes: &[u8]) -> Result<(), LedgerError> {
        let keep = || -> io::Result<()> {
            let mut aside = self.dir.open_with(TORN_FILE, OpenOptions::new().append(true).create(true).mode(0o600))?;
            aside.write_all(bytes)?;
            aside.write_all(b"\n")?;
            aside.sync_all()
        };
        keep().map_err(io("writing", TORN_FILE))?;
        file.set_len(self.position.offset).and_then(|()| file.sync_all()).map_err(io("cutting the torn line off", LEDGER_FILE))
    }

    pub(super) fn add(&mut self, locked: &mut Locked, unix_ms: u64, event: Event) -> Result<EntryRef, LedgerError> {
        self.write(locked, unix_ms, vec![event])?;
        Ok(EntryRef { sequence: self.position.sequence - 1, digest: self.position.previous })
    }

    fn write(&mut self, locked: &mut Locked, unix_ms: u64, events: Vec<Event>) -> Result<(), LedgerError> {
        let (mut position, mut bytes, mut entries) = (self.position, Vec::new(), Vec::new());
        for event in events {
            let line = Line { sequence: position.sequence, previous: position.previous, unix_ms, event };
            let encoded = line.encode().map_err(LedgerError::Json)?;
            if encoded.len() >= ENTRY_BYTES_MAX {
                return Err(LedgerError::TooLong { bytes: encoded.len() + 1 });
            }
            let start = position;
            let at = position.pass(&encoded);
            bytes.extend(encoded);
            bytes.push(b'\n');
            entries.push((Entry { at, previous: line.previous, unix_ms, event: line.event }, start, position));
        }
        if let Err(error) = locked.file.write_all(&bytes).and_then(|()| locked.file.sync_all()) {
            // Best effort, and the first error is the one to tell: what stays is read or cut off under the next lock. A follower waits until then.
            drop(locked.file.set_len(self.position.offset));
            return Err(io("writing", LEDGER_FILE)(error));
        }
        self.position = position;
        entries.iter().for_each(|(entry, start, end)| self.note(entry, *start, *end));
        Ok(())
    }
}
