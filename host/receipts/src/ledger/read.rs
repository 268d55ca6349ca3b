//! Reads a ledger: entry by entry, filtered, and summed up per tenant.
//!
//! Never writes and never locks, so a copy on a read-only disk will do; a line that is being written at that moment looks torn.

use std::collections::BTreeMap;
use std::io::{BufReader, Read as _, Take};

use cap_std::fs::{Dir, File};
use serde::Serialize;

use super::entry::{BytesEvent, Entry, EntryRef, Event, Kind};
use super::error::{LedgerError, io};
use super::scan::{Found, Position, Scanner};
use super::{LEDGER_FILE, TornTail};
use crate::files::open_regular;

/// A ledger to be read.
#[derive(Debug)]
pub struct Reader {
    dir: Dir,
}

/// Which entries are wanted; what is `None` does not matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Of this tenant.
    pub tenant: Option<String>,
    /// Of this job.
    pub job: Option<String>,
    /// Of this kind.
    pub kind: Option<Kind>,
    /// From this sequence number on.
    pub from: Option<u64>,
    /// Up to this sequence number, itself included.
    pub to: Option<u64>,
}

impl Filter {
    /// Whether this entry is wanted.
    #[must_use]
    pub fn matches(&self, entry: &Entry) -> bool {
        let wants = |wanted: &Option<String>, found| wanted.as_deref().is_none_or(|wanted| found == Some(wanted));
        wants(&self.tenant, entry.event.tenant())
            && wants(&self.job, entry.event.job())
            && self.kind.is_none_or(|kind| kind == entry.event.kind())
            && self.from.is_none_or(|from| from <= entry.at.sequence)
            && self.to.is_none_or(|to| entry.at.sequence <= to)
    }
}

/// Adapter bytes of one tenant, by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AdapterBytes {
    /// Reserved on the device.
    pub allocated: u128,
    /// Written to the device.
    pub written: u128,
    /// Read from the device and handed out.
    pub exported: u128,
    /// Overwritten with zeros on the device. Equal to `allocated` when no job of the tenant is left.
    pub zeroed: u128,
}

impl AdapterBytes {
    fn add(&mut self, event: BytesEvent, bytes: u64) {
        let sum = match event {
            BytesEvent::Allocated => &mut self.allocated,
            BytesEvent::Written => &mut self.written,
            BytesEvent::Exported => &mut self.exported,
            BytesEvent::Zeroed => &mut self.zeroed,
        };
        *sum += u128::from(bytes);
    }
}

/// What the wanted entries of a ledger amount to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The ledger's last entry, wanted or not.
    pub head: Option<EntryRef>,
    /// How many are wanted.
    pub entries: u64,
    /// Receipts among them.
    pub receipts: u64,
    /// Jobs among them that ended without one, or were refused.
    pub jobs_failed: u64,
    /// Adapter bytes among them, by tenant.
    pub adapter_bytes: BTreeMap<String, AdapterBytes>,
    /// A torn last line, which belongs to no entry.
    pub torn: Option<TornTail>,
}

impl Reader {
    /// Reads the ledger in this folder.
    #[must_use]
    pub fn new(dir: Dir) -> Self {
        Self { dir }
    }

    /// All entries, in order.
    ///
    /// # Errors
    /// There is no ledger.
    pub fn entries(&self) -> Result<Entries, LedgerError> {
        let file = open_regular(&self.dir, LEDGER_FILE).map_err(io("opening", LEDGER_FILE))?;
        let bytes = file.metadata().map_err(io("reading", LEDGER_FILE))?.len();
        let scanner = Scanner::new(BufReader::new(file.take(bytes)), Position::start());
        Ok(Entries { scanner, has_ended: false, torn: None })
    }

    /// The wanted entries, in order.
    ///
    /// # Errors
    /// There is no ledger.
    pub fn select(&self, filter: Filter) -> Result<impl Iterator<Item = Result<Entry, LedgerError>> + use<>, LedgerError> {
        Ok(self.entries()?.filter(move |entry| entry.as_ref().map_or(true, |entry| filter.matches(entry))))
    }

    /// Reads and checks the whole ledger, and sums up the wanted entries.
    ///
    /// # Errors
    /// There is no ledger, or it is corrupt.
    pub fn summary(&self, filter: &Filter) -> Result<Summary, LedgerError> {
        let mut summary = Summary::default();
        let mut entries = self.entries()?;
        for entry in &mut entries {
            let entry = entry?;
            if !filter.matches(&entry) {
                continue;
            }
            summary.entries += 1;
            match entry.event {
                Event::KeyCreated { .. } => {}
                Event::Receipt { .. } => summary.receipts += 1,
                Event::JobFailed { .. } => summary.jobs_failed += 1,
                Event::AdapterBytes { tenant, event, bytes, .. } => summary.adapter_bytes.entry(tenant).or_default().add(event, bytes),
            }
        }
        (summary.head, summary.torn) = (entries.head(), entries.torn);
        Ok(summary)
    }
}

/// The entries of a ledger, each checked against the one before. Ends after the first error.
pub struct Entries {
    scanner: Scanner<BufReader<Take<File>>>,
    has_ended: bool,
    torn: Option<TornTail>,
}

impl Entries {
    /// The last entry that was given.
    #[must_use]
    pub fn head(&self) -> Option<EntryRef> {
        self.scanner.position.head()
    }

    /// The torn last line, once it has been met.
    #[must_use]
    pub fn torn(&self) -> Option<&TornTail> {
        self.torn.as_ref()
    }
}

impl Iterator for Entries {
    type Item = Result<Entry, LedgerError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let found = self.scanner.next();
        self.has_ended = !matches!(found, Ok(Found::Entry(_)));
        match found {
            Ok(Found::Entry(entry)) => Some(Ok(entry)),
            Ok(Found::Torn(torn, _)) => {
                self.torn = Some(torn);
                None
            }
            Ok(Found::End) => None,
            Err(error) => Some(Err(error)),
        }
    }
}
