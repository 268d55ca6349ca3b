//! The host's books: the key it signs with, and the ledger of receipts, failed jobs and adapter bytes.
//!
//! Made at the first start, in the data folder. Never signs what it does not also enter.

use std::io::ErrorKind;
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::Digest;
use nodus_receipts::key::{KeyError, PRIVATE_KEY_FILE, PUBLIC_KEY_FILE};
use nodus_receipts::ledger::{BytesEvent, Entry, Event, LEDGER_FILE, LedgerError};
use nodus_receipts::{Follower, HostKey, KnownKeys, Ledger, PublicKey, Reader, SealedReceipt};

use crate::error::user;
use crate::machine::unix_ms;

/// Whose jobs those of the command line are.
pub(crate) const LOCAL: &str = "local";

/// The books, open for writing.
pub(crate) struct Books(Ledger);

/// A job as the ledger knows it.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    /// Of its own; equal jobs at two times have two.
    pub(crate) job: String,
    /// Whose.
    pub(crate) tenant: String,
    /// What a crash undid and is done again is entered once.
    pub(crate) again: Again,
}

/// Whether a job may come to its end more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// It does not.
    Never,
    /// Of the service, which runs it again until it has ended: in another attempt, or before a crash, it may have come to its end already.
    Attempt,
    /// Of a run, which somebody may have go on; whether this is one that does.
    Resumed(bool),
}

impl Account {
    /// Of the so-manieth job of a run.
    pub(crate) fn local(run: &str, number: usize, again: Again) -> Self {
        Self { job: format!("{run}-{number}"), tenant: LOCAL.to_owned(), again }
    }
}

/// A name for a run that begins now in this process, for its jobs to be known by.
pub(crate) fn fresh_run() -> String {
    format!("{}-{}", unix_ms(), std::process::id())
}

impl Books {
    /// Makes key and ledger where they are missing; reads neither otherwise.
    ///
    /// # Errors
    /// As [`Books::open`].
    pub(crate) fn prepare(dir: Dir) -> anyhow::Result<()> {
        let is_there = [PRIVATE_KEY_FILE, PUBLIC_KEY_FILE, LEDGER_FILE].iter().all(|file| dir.exists(file));
        if is_there { Ok(()) } else { Self::open(dir).map(drop) }
    }

    /// Opens them and checks every line of the ledger.
    ///
    /// # Errors
    /// The user's: the key's file is not as it must be. Ours: the disk refuses, or the ledger is corrupt.
    pub(crate) fn open(dir: Dir) -> anyhow::Result<Self> {
        let key = HostKey::open_or_create(&dir).map_err(key_fault)?;
        let ledger = Ledger::open(dir, key, unix_ms()).context("opening the host's ledger")?;
        for torn in ledger.torn() {
            tracing::warn!(line = torn.line, bytes = torn.bytes, fault = %torn.fault, "a crash tore the ledger's last line; it was cut off");
        }
        Ok(Self(ledger))
    }

    /// Enters what became of adapters' bytes, each (adapter, event, bytes); nothing where there are none.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(crate) fn enter(&mut self, account: &Account, events: impl Iterator<Item = (u32, BytesEvent, u64)>) -> anyhow::Result<()> {
        let event = |(adapter, event, bytes)| {
            let Account { job, tenant, .. } = account.clone();
            Event::AdapterBytes { job, tenant, adapter, event, bytes }
        };
        let events: Vec<Event> = events.filter(|(_, _, bytes)| *bytes > 0).map(event).collect();
        if events.is_empty() {
            return Ok(());
        }
        self.0.append_all(unix_ms(), events).context("writing to the host's ledger")
    }

    /// Enters that a job was refused, or ended without a receipt; `code` says why, and never changes. A job of the service ends once; a run that is cut
    /// off, for one reason after another, has a line of each.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(crate) fn fail(&mut self, account: &Account, code: &str) -> anyhow::Result<()> {
        let Account { job, tenant, again } = account.clone();
        let is_there = |found: &str| again == Again::Attempt || found == code;
        if matches!(again, Again::Attempt | Again::Resumed(true)) && self.failure(&job, is_there)?.is_some() {
            return Ok(());
        }
        self.0.append_all(unix_ms(), vec![Event::JobFailed { job, tenant, code: code.to_owned() }]).context("writing to the host's ledger")
    }

    /// The code that a job of the service was entered with as one that ended without a receipt: what was said there is final.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(crate) fn failed(&mut self, job: &str) -> anyhow::Result<Option<String>> {
        self.failure(job, |_| true)
    }

    /// The first code of a job's failures that is one of those that are wanted.
    fn failure(&mut self, job: &str, is_wanted: impl Fn(&str) -> bool) -> anyhow::Result<Option<String>> {
        for entry in self.0.entries_of(job)? {
            match entry.context("reading the host's ledger")?.event {
                Event::JobFailed { code, .. } if is_wanted(&code) => return Ok(Some(code)),
                _ => {}
            }
        }
        Ok(None)
    }

    /// The same books, for who reads of single jobs again and again: what was read of the ledger is not read once more.
    ///
    /// # Errors
    /// Ours: the system has no file handle left.
    pub(crate) fn follower(&self) -> anyhow::Result<Follower> {
        self.0.follower().context("opening the host's ledger once more")
    }

    /// Signs and enters a receipt; `statement` is given the digest of the one before. Of a job that is run again after a crash it is the
    /// receipt that was entered before the crash.
    ///
    /// # Errors
    /// Ours.
    pub(crate) fn seal(
        &mut self,
        account: &Account,
        statement: impl FnOnce(Option<Digest>) -> Result<Vec<u8>, serde_json::Error>,
    ) -> anyhow::Result<SealedReceipt> {
        let Account { job, tenant, again } = account;
        let sealed = match again {
            Again::Never => self.0.seal(unix_ms(), job, tenant, statement),
            Again::Attempt | Again::Resumed(_) => self.0.seal_once(unix_ms(), job, tenant, statement),
        };
        sealed.context("signing the receipt")
    }

    /// What became of a job is where it belongs for good: in the service's state, or the place of a run's results.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(crate) fn settle(&self, job: &str) -> anyhow::Result<()> {
        self.0.settle(job).context("settling a receipt")
    }

    /// Jobs that have a receipt which may not be there.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(crate) fn unsettled(&self) -> anyhow::Result<Vec<String>> {
        self.0.unsettled().context("looking for receipts that are not settled")
    }
}

/// The ledger of a folder, for reading.
pub(crate) fn reader(dir: Dir) -> Option<Reader> {
    dir.exists(LEDGER_FILE).then(|| Reader::new(dir))
}

/// The same ledger, for who reads of single jobs again and again.
pub(crate) fn follower(dir: Dir) -> Follower {
    Follower::new(dir)
}

/// A job's entries from the so-manieth on, as many as are wanted, and whether there are more; none where there is no ledger.
///
/// # Errors
/// Ours: the ledger is corrupt, or cannot be read.
pub(crate) fn entries_of(ledger: &Mutex<Follower>, job: &str, from: u64, count_max: usize) -> anyhow::Result<(Vec<Entry>, bool)> {
    const READING: &str = "reading the host's ledger";
    // What was read before a panic was read.
    let found = ledger.lock().unwrap_or_else(PoisonError::into_inner).entries(job, from);
    let mut found = match found {
        Err(LedgerError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok((Vec::new(), false)),
        found => found.context(READING)?,
    };
    let entries = found.by_ref().take(count_max).collect::<Result<_, _>>().context(READING)?;
    Ok((entries, found.next().transpose().context(READING)?.is_some()))
}

/// This host's own public key; none where it has none yet.
///
/// # Errors
/// The user's: the file is there and no key.
pub(crate) fn public_key(dir: &Dir) -> anyhow::Result<Option<PublicKey>> {
    let Ok(text) = dir.read_to_string(PUBLIC_KEY_FILE) else { return Ok(None) };
    PublicKey::from_pem(&text).map(Some).map_err(|error| user(format!("{PUBLIC_KEY_FILE} of the data folder: {error}")))
}

/// [`public_key`], as those whose signatures are believed.
///
/// # Errors
/// The user's: the file is there and no key.
pub(crate) fn own_key(dir: &Dir) -> anyhow::Result<Option<KnownKeys>> {
    Ok(public_key(dir)?.map(|key| [key].into_iter().collect()))
}

/// Who can put a key's fault right.
fn key_fault(error: KeyError) -> anyhow::Error {
    match &error {
        KeyError::Io { .. } | KeyError::Random(_) => anyhow::Error::from(error).context("opening the host's key"),
        _ => user(format!("the host's key: {error}")),
    }
}
