//! What was recorded of a job and is not used up: read from its file as the job comes to it.
//!
//! Never holds more of it than calls were under way at once: a job may have millions of replies, and many jobs go on at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, Seek as _, SeekFrom};
use std::sync::Arc;

use cap_std::fs::File;
use nodus_protocol::JobState;

use super::call;
use super::record::{Entry, Frames};

/// Frames that are read together.
const READ_AHEAD: usize = 64;

/// A journal's frames, told once through.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    /// Calls from the first on without a gap.
    pub(super) recorded: u64,
    /// Replies.
    pub(super) replies: u64,
    /// Those that the job must ask for again.
    left: u64,
    /// How long the job has been at work.
    work_ms: u64,
    /// Up to where the file is whole.
    pub(super) good: u64,
}

impl Sum {
    /// Reads all of them.
    ///
    /// # Errors
    /// What the operating system says.
    pub(super) fn of(file: &mut File, start: u64, file_bytes: u64) -> io::Result<Self> {
        file.seek(SeekFrom::Start(start))?;
        let mut frames = Frames::new(BufReader::new(file), start, file_bytes);
        let (mut sum, mut early) = (Self::default(), BTreeSet::new());
        while let Some((call, entry)) = frames.next()? {
            sum.replies += 1;
            sum.left += u64::from(!call::is_drop(entry.asked));
            sum.work_ms = sum.work_ms.max(entry.work_ms);
            early.insert(call);
            while early.remove(&sum.recorded) {
                sum.recorded += 1;
            }
        }
        sum.good = frames.good;
        Ok(sum)
    }
}

/// What was recorded and is not used up.
pub(super) struct Past {
    /// Calls before this one are answered from the journal.
    pub(super) calls: u64,
    /// What the engine held after them, until it has it again.
    pub(super) state: Option<Arc<JobState>>,
    /// How long the job has been at work, by the journal.
    pub(super) work_ms: u64,
    /// Those that must be asked for again.
    left: u64,
    /// What was read and is not used up: calls are answered in another order than they are made.
    ahead: BTreeMap<u64, Entry>,
    /// What was not read; none while it is.
    frames: Option<Frames<BufReader<File>>>,
    /// For replies that are too large to keep at hand. Its own place in the file: others read and write.
    file: Arc<File>,
}

impl Past {
    /// Of a journal whose frames begin at `start`; the files are two handles with places of their own.
    ///
    /// # Errors
    /// What the operating system says.
    pub(super) fn new(sum: &Sum, (mut reading, file): (File, File), start: u64) -> io::Result<Self> {
        reading.seek(SeekFrom::Start(start))?;
        let frames = Some(Frames::new(BufReader::new(reading), start, sum.good));
        let Sum { left, work_ms, .. } = *sum;
        Ok(Self { calls: 0, state: None, work_ms, left, ahead: BTreeMap::new(), frames, file: Arc::new(file) })
    }

    /// What was recorded of a call, if anything was.
    ///
    /// # Errors
    /// What the operating system says.
    pub(super) async fn look(&mut self, call: u64) -> io::Result<Option<&Entry>> {
        while !self.ahead.contains_key(&call)
            && let Some(mut frames) = self.frames.take()
        {
            let read = move || -> io::Result<_> {
                let mut entries = Vec::new();
                for _ in 0..READ_AHEAD {
                    let Some(entry) = frames.next()? else { return Ok((entries, None)) };
                    entries.push(entry);
                }
                Ok((entries, Some(frames)))
            };
            let (entries, frames) = tokio::task::spawn_blocking(read).await.map_err(io::Error::other)??;
            self.ahead.extend(entries);
            self.frames = frames;
        }
        Ok(self.ahead.get(&call))
    }

    /// The same, used up.
    pub(super) fn take(&mut self, call: u64) -> Option<Entry> {
        let entry = self.ahead.remove(&call)?;
        self.left -= u64::from(!call::is_drop(entry.asked));
        Some(entry)
    }

    /// The bytes of a recorded reply.
    ///
    /// # Errors
    /// What the operating system says.
    pub(super) async fn reply(&self, entry: Entry) -> io::Result<Vec<u8>> {
        if let Some(reply) = entry.at_hand() {
            return Ok(reply);
        }
        let file = self.file.clone();
        let read = move || entry.reply(&mut file.try_clone()?);
        tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?
    }

    /// Whether all is used up but for adapters that were dropped: a job does not wait for that, and its end may come before or after.
    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    /// Whether nothing more is to be read of the file.
    pub(super) fn is_read(&self) -> bool {
        self.frames.is_none() && self.ahead.values().all(Entry::is_at_hand)
    }

    /// Entries in memory.
    #[cfg(test)]
    pub(super) fn at_hand(&self) -> usize {
        self.ahead.len()
    }
}
