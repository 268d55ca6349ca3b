//! The thread that writes a job's journal, so that the job waits for the disk only where it is answered faster than that takes.
//!
//! Never fails a job for a disk that refuses: what waits is tried again, and at the worst the job is no longer kept.

use std::collections::BTreeMap;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;

use anyhow::{Context as _, anyhow};
use cap_std::fs::{Dir, File};
use nodus_protocol::{Digest, JobState};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use super::book::{IDENTITY_BYTES, REPLIES};
use super::space::Account;
use super::{REPLIES_BYTES_MAX, REPLIES_MAX, WAITING_BYTES_MAX, snapshot};

/// Words on their way to the thread.
const QUEUE: usize = 64;
/// Bytes of replies among them, in steps of 1 KiB; a longer one goes alone.
const QUEUE_KIB: u32 = 8 << 10;
/// Bytes that are written at once, while more come.
const BATCH_BYTES: usize = 64 << 10;

/// What is to be kept.
pub(super) enum Word {
    Frame(Vec<u8>, OwnedSemaphorePermit),
    /// What the engine holds after so many calls; answered when it is on the disk, or is not going to be.
    Snapshot {
        calls: u64,
        state: Box<JobState>,
        /// Room for it in memory, until then.
        room: Option<OwnedSemaphorePermit>,
        done: oneshot::Sender<bool>,
    },
}

/// The thread.
pub(super) struct Keeper {
    words: mpsc::Sender<Word>,
    room: Arc<Semaphore>,
    account: Account,
    is_given_up: Arc<AtomicBool>,
    is_read: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Keeper {
    /// Writes on from a place in the file, before which so many replies are.
    ///
    /// # Errors
    /// Ours: the system has no thread.
    pub(super) fn start((dir, file): (Dir, File), (good, replies): (u64, u64), identity: Digest, account: Account) -> anyhow::Result<Self> {
        let (words, inbox) = mpsc::channel(QUEUE);
        let (is_given_up, is_read) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        // Counted from here on as it grows and shrinks, and not measured again.
        let snapshots = snapshot::sizes(&dir)?;
        account.hold(good + snapshots.values().sum::<u64>());
        let desk = Desk {
            dir,
            file,
            good,
            replies,
            identity,
            account: account.clone(),
            snapshots,
            waiting: Vec::new(),
            charged: 0,
            is_failing: false,
            is_given_up: is_given_up.clone(),
            is_read: is_read.clone(),
        };
        let thread = std::thread::Builder::new().name("journal".into()).spawn(move || desk.work(inbox));
        let (room, thread) = (Arc::new(Semaphore::new(QUEUE_KIB as usize)), thread.context("starting a journal's thread")?);
        Ok(Self { words, room, account, is_given_up, is_read, thread })
    }

    /// Has a reply kept; waits where others wait before it, so that memory holds few.
    pub(super) async fn keep(&self, frame: Vec<u8>) {
        let kib = u32::try_from(frame.len().div_ceil(1 << 10)).unwrap_or(u32::MAX).min(QUEUE_KIB);
        let Ok(permit) = self.room.clone().acquire_many_owned(kib).await else { return };
        self.say(Word::Frame(frame, permit)).await;
    }

    /// Has what the engine holds after so many calls kept; tells when it is on the disk, or is not going to be.
    pub(super) async fn keep_snapshot(
        &self,
        calls: u64,
        (state, room): (Box<JobState>, Option<OwnedSemaphorePermit>),
    ) -> oneshot::Receiver<bool> {
        let (done, written) = oneshot::channel();
        self.say(Word::Snapshot { calls, state, room, done }).await;
        written
    }

    async fn say(&self, word: Word) {
        // The thread ends only with this; a panic of it was reported, and nothing is kept any more.
        drop(self.words.send(word).await);
    }

    /// Room in memory for a snapshot.
    pub(super) async fn room_for_snapshot(&self) -> Option<OwnedSemaphorePermit> {
        self.account.snapshot().await
    }

    /// The same where it is there at once.
    pub(super) fn room_for_snapshot_now(&self) -> Option<OwnedSemaphorePermit> {
        self.account.snapshot_now()
    }

    /// Whether the job is not kept any more.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Relaxed)
    }

    /// Nothing of what was recorded before is to be read any more.
    pub(super) fn read(&self) {
        self.is_read.store(true, Relaxed);
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
    /// Replies in it, and those that wait.
    replies: u64,
    identity: Digest,
    account: Account,
    /// Bytes of the snapshots beside it, by their calls.
    snapshots: BTreeMap<u64, u64>,
    /// Frames that are not in the file.
    waiting: Vec<u8>,
    /// How many of their bytes all journals together were told of.
    charged: u64,
    is_failing: bool,
    is_given_up: Arc<AtomicBool>,
    /// Whether the attempt has read all of the file that it needs.
    is_read: Arc<AtomicBool>,
}

impl Desk {
    fn work(mut self, mut inbox: mpsc::Receiver<Word>) {
        while let Some(word) = inbox.blocking_recv() {
            if self.is_given_up.load(Relaxed) {
                self.empty_once_read();
                continue;
            }
            match word {
                Word::Frame(frame, permit) => {
                    self.waiting.extend_from_slice(&frame);
                    self.replies += 1;
                    drop((frame, permit));
                    if inbox.is_empty() || self.waiting.len() >= BATCH_BYTES {
                        self.flush();
                    }
                }
                Word::Snapshot { calls, state, room, done } => {
                    let made = self.snapshot(calls, &state);
                    drop((state, room));
                    if let Err(error) = &made {
                        tracing::warn!("a job's snapshot could not be kept, and is made again later: {error:#}");
                    }
                    // Who asked may be gone.
                    done.send(made.is_ok()).ok();
                }
            }
        }
        // The attempt is over: nobody reads.
        self.is_read.store(true, Relaxed);
        if self.is_given_up.load(Relaxed) {
            self.empty_once_read();
        } else {
            self.flush();
        }
        self.account.waited(self.charged);
    }

    /// Bytes of the snapshots.
    fn snapshot_bytes(&self) -> u64 {
        self.snapshots.values().sum()
    }

    fn snapshot(&mut self, calls: u64, state: &JobState) -> anyhow::Result<()> {
        if !self.flush() {
            return Err(anyhow!("the replies before it are not on the disk"));
        }
        self.file.sync_data().context("syncing a job's journal")?;
        let bytes = snapshot::encoded(self.identity, calls, state)?;
        // The older ones go once it is there: until then all of them take room.
        if !self.account.hold(self.good + self.snapshot_bytes() + bytes.len() as u64) {
            return Err(anyhow!(self.account.no_room()));
        }
        let written = snapshot::write(&self.dir, calls, &bytes, &mut self.snapshots);
        self.account.hold(self.good + self.snapshot_bytes());
        written
    }

    /// Writes what waits; whether nothing waits any more.
    fn flush(&mut self) -> bool {
        if !self.account.hold(self.good + self.snapshot_bytes() + self.waiting.len() as u64) {
            self.give_up(self.account.no_room());
            return false;
        }
        match self.write() {
            Ok(()) => {
                self.good += self.waiting.len() as u64;
                self.account.waited(std::mem::take(&mut self.charged));
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
                // Only what the disk did not take counts: on one that writes, no reply is too long for it.
                let more = self.waiting.len() as u64 - self.charged;
                if !self.account.wait(more) {
                    self.give_up("too much waits for the disk");
                    return false;
                }
                self.charged += more;
            }
        }
        if self.good > REPLIES_BYTES_MAX || self.replies > REPLIES_MAX || self.waiting.len() > WAITING_BYTES_MAX {
            self.give_up("it is too long, or waits too long for the disk");
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
    fn give_up(&mut self, why: &str) {
        let (bytes, replies) = (self.good + self.waiting.len() as u64, self.replies);
        tracing::warn!(bytes, replies, "a job's journal is not kept any more, {why}: interrupted, the job will begin anew");
        self.is_given_up.store(true, Relaxed);
        self.account.waited(std::mem::take(&mut self.charged));
        self.waiting = Vec::new();
        self.empty_once_read();
    }

    /// Gives the room back, unless the attempt still reads what was recorded before it: then later.
    fn empty_once_read(&mut self) {
        let is_empty = self.good == IDENTITY_BYTES as u64 && self.snapshots.is_empty();
        if is_empty || !self.is_read.load(Relaxed) {
            return;
        }
        let empty = || -> io::Result<()> {
            for entry in self.dir.entries()? {
                let name = entry?.file_name();
                if name != REPLIES {
                    self.dir.remove_file(name)?;
                }
            }
            // What it is of stays: begun anew, the job tells the same on the same device class alone.
            self.file.set_len(IDENTITY_BYTES as u64)
        };
        match empty() {
            Ok(()) => {
                self.good = IDENTITY_BYTES as u64;
                self.snapshots.clear();
                self.account.hold(self.good);
            }
            Err(error) => tracing::warn!("a job's journal could not be emptied: {error}"),
        }
    }
}
