//! The thread that writes a job's journal, so that the job waits for the disk only where it is answered faster than that takes.
//!
//! Never fails a job for a disk that refuses: what waits is tried again, and at the worst the job is no longer kept.

use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

use anyhow::{Context as _, anyhow};
use cap_std::fs::{Dir, File};
use nodus_protocol::{Digest, JobState};
use tokio::sync::{mpsc, oneshot};

use super::{REPLIES_BYTES_MAX, WAITING_BYTES_MAX, snapshot};

/// Words on their way to the thread.
const QUEUE: usize = 64;
/// Bytes that are written at once, while more come.
const BATCH_BYTES: usize = 64 << 10;

/// What is to be kept.
pub(super) enum Word {
    Frame(Vec<u8>),
    /// What the engine holds after so many calls; answered when it is on the disk, or is not going to be.
    Snapshot {
        calls: u64,
        state: Box<JobState>,
        done: oneshot::Sender<bool>,
    },
}

/// The thread.
pub(super) struct Keeper {
    words: mpsc::Sender<Word>,
    is_given_up: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Writes on from a place in the file.
    ///
    /// # Errors
    /// Ours: the system has no thread.
    pub(super) fn start(dir: Dir, file: File, good: u64, identity: Digest) -> anyhow::Result<Self> {
        let (words, inbox) = mpsc::channel(QUEUE);
        let is_given_up = Arc::new(AtomicBool::new(false));
        let desk = Desk { dir, file, good, identity, waiting: Vec::new(), is_failing: false, is_given_up: is_given_up.clone() };
        let thread = std::thread::Builder::new().name("journal".into()).spawn(move || desk.work(inbox));
        Ok(Self { words, is_given_up, thread: thread.context("starting a journal's thread")? })
    }

    pub(super) async fn keep(&self, word: Word) {
        // The thread ends only with this; a panic of it was reported, and nothing is kept any more.
        drop(self.words.send(word).await);
    }

    /// Whether the job is not kept any more.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Relaxed)
    }

    /// Waits until all is written that will be. Blocks.
    pub(super) fn end(self) {
        let Self { words, thread, .. } = self;
        drop(words);
        drop(thread.join());
    }
}

struct Desk {
    dir: Dir,
    file: File,
    /// Bytes of the file that are whole.
    good: u64,
    identity: Digest,
    /// Frames that are not in the file.
    waiting: Vec<u8>,
    is_failing: bool,
    is_given_up: Arc<AtomicBool>,
}

impl Desk {
    fn work(mut self, mut inbox: mpsc::Receiver<Word>) {
        while let Some(word) = inbox.blocking_recv() {
            if self.is_given_up.load(Relaxed) {
                continue;
            }
            match word {
                Word::Frame(frame) => {
                    self.waiting.extend_from_slice(&frame);
                    if inbox.is_empty() || self.waiting.len() >= BATCH_BYTES {
                        self.flush();
                    }
                }
                Word::Snapshot { calls, state, done } => {
                    let made = self.snapshot(calls, &state);
                    if let Err(error) = &made {
                        tracing::warn!("a job's snapshot could not be kept, and is made again later: {error:#}");
                    }
                    // Who asked may be gone.
                    done.send(made.is_ok()).ok();
                }
            }
        }
        self.flush();
    }

    fn snapshot(&mut self, calls: u64, state: &JobState) -> anyhow::Result<()> {
        if !self.flush() {
            return Err(anyhow!("the replies before it are not on the disk"));
        }
        self.file.sync_data().context("syncing a job's journal")?;
        snapshot::write(&self.dir, self.identity, calls, state)
    }

    /// Writes what waits; whether nothing waits any more.
    fn flush(&mut self) -> bool {
        match self.write() {
            Ok(()) => {
                self.good += self.waiting.len() as u64;
                self.waiting.clear();
                self.waiting.shrink_to(BATCH_BYTES);
                self.is_failing = false;
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!("a job's journal cannot be written, and is tried again: {error}");
                }
                // What is half-written takes room, and would be cut off anyway.
                drop(self.file.set_len(self.good));
            }
        }
        if self.good > REPLIES_BYTES_MAX || self.waiting.len() > WAITING_BYTES_MAX {
            self.give_up();
        }
        self.waiting.is_empty() && !self.is_given_up.load(Relaxed)
    }

    fn write(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        self.file.seek(SeekFrom::Start(self.good))?;
        self.file.write_all(&self.waiting)
    }

    /// From now on the job is not kept: interrupted, it is run again from its start.
    fn give_up(&mut self) {
        tracing::warn!(
            bytes = self.good + self.waiting.len() as u64,
            allowed = REPLIES_BYTES_MAX,
            "a job's journal is too long, or waits too long for the disk: interrupted, the job will begin anew"
        );
        self.is_given_up.store(true, Relaxed);
        self.waiting = Vec::new();
        let remove = || -> io::Result<()> {
            for entry in self.dir.entries()? {
                self.dir.remove_file(entry?.file_name())?;
            }
            Ok(())
        };
        if let Err(error) = remove() {
            tracing::warn!("a job's journal could not be removed: {error}");
        }
    }
}
