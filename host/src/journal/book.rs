//! A job's journal as it is found when an attempt begins: what is to be answered from it, from where the engine goes on, and who writes on.
//!
//! Never mixes two device classes: bits are promised within one.

use std::collections::BTreeMap;
use std::io::{BufReader, Seek as _, SeekFrom, Write as _};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use cap_std::fs::{Dir, File, OpenOptions};
use nodus_protocol::{Digest, JobState};

use super::call;
use super::keeper::Keeper;
use super::record::{Entry, read};
use super::snapshot;

/// The replies.
const REPLIES: &str = "replies";
/// What the journal is of: in the first bytes of its file.
const IDENTITY_BYTES: usize = 32;

/// An open journal.
pub(crate) struct Book {
    pub(super) past: Past,
    pub(super) keeper: Keeper,
}

/// What was recorded and is not used up.
pub(super) struct Past {
    pub(super) entries: BTreeMap<u64, Entry>,
    /// For replies that are too large to keep at hand. Its own place in the file: another handle writes.
    pub(super) file: File,
    /// Calls before this one are answered from the journal.
    pub(super) calls: u64,
    /// What the engine held after them, until it has it again.
    pub(super) state: Option<Arc<JobState>>,
    /// How long the job has been at work, by the journal.
    pub(super) work_ms: u64,
}

impl Book {
    /// Opens what is in a job's folder, and cuts off what a sudden end tore. `identity` is of all that decides the job's bits. Blocks.
    ///
    /// # Errors
    /// The job was begun under another identity; what the operating system says.
    pub(crate) fn open(dir: Dir, identity: Digest) -> anyhow::Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = dir.open_with(REPLIES, options.read(true).write(true).create(true)).context("opening a job's journal")?;
        let file_bytes = file.metadata().context("looking at a job's journal")?.len();
        let start = IDENTITY_BYTES as u64;
        if file_bytes < start {
            file.set_len(0).and_then(|()| file.write_all(identity.as_bytes())).context("beginning a job's journal")?;
        }
        let mut reader = BufReader::new(&mut file);
        let begun = || "reading a job's journal";
        reader.seek(SeekFrom::Start(0)).with_context(begun)?;
        let mut found = [0; IDENTITY_BYTES];
        std::io::Read::read_exact(&mut reader, &mut found).with_context(begun)?;
        ensure!(
            found == *identity.as_bytes(),
            "the job was begun on another device class or by another version of the host, and its bits are promised within one only"
        );
        let (entries, good) = read(&mut reader, start, file_bytes.max(start)).with_context(begun)?;
        if good < file_bytes {
            tracing::warn!(bytes = file_bytes - good, "a sudden end tore a job's journal; the rest of it was cut off");
            file.set_len(good).context("cutting a job's journal")?;
        }
        let recorded = (0..).take_while(|call| entries.contains_key(call)).count() as u64;
        let found = snapshot::latest(&dir, identity, recorded)?;
        let (calls, state) = found.map_or((0, None), |(calls, state)| (calls, Some(Arc::new(state))));
        let work_ms = entries.values().map(|entry| entry.work_ms).max().unwrap_or(0);
        let reading = dir.open(REPLIES).context("opening a job's journal")?;
        let keeper = Keeper::start(dir, file, (good, entries.len() as u64), identity)?;
        Ok(Self { past: Past { entries, file: reading, calls, state, work_ms }, keeper })
    }
}

impl Book {
    /// Whether nothing was recorded.
    pub(super) fn is_new(&self) -> bool {
        self.past.entries.is_empty()
    }
}

impl Past {
    /// Whether all is used up but for adapters that were dropped: a job does not wait for that, and its end may come before or after.
    pub(super) fn is_over(&self) -> bool {
        self.entries.values().all(|entry| call::is_drop(entry.asked))
    }
}
