//! A job's journal as it is found when an attempt begins: what is to be answered from it, from where the engine goes on, and who writes on.
//!
//! Never mixes two device classes: bits are promised within one.

use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::sync::Arc;

use anyhow::Context as _;
use cap_std::fs::{Dir, OpenOptions};
use nodus_protocol::Digest;

use super::keeper::Keeper;
use super::past::{Past, Sum};
use super::record::Frames;
use super::snapshot;
use super::space::Account;
use crate::receipt::CONTRACT;
use crate::run::device::Class;
use crate::store::sync_dir;

/// The replies.
pub(super) const REPLIES: &str = "replies";
/// What the journal is of: in the first bytes of its file.
pub(super) const IDENTITY_BYTES: usize = 32;

/// An open journal.
pub(crate) struct Book {
    pub(super) past: Past,
    pub(super) keeper: Keeper,
    /// Whether nothing was recorded.
    pub(crate) is_new: bool,
}

/// The job was begun on another device class, or under another contract, than this.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the job was begun on another device class or by another version of the host, and its bits are promised within one only")]
pub(crate) struct BegunElsewhere {
    /// Of what it was begun on.
    pub(crate) identity: Digest,
}

/// Of what is in a journal.
pub(crate) const VERSION: u32 = 1;

/// What a journal must be of for a job to go on from it on a device of this class: all that decides its bits and that the job itself does not.
///
/// # Errors
/// None that any class has.
pub(crate) fn identity(class: &Class) -> anyhow::Result<Digest> {
    Ok(Digest::of(&serde_json::to_vec(&(VERSION, CONTRACT, class)).context("naming a device class")?))
}

/// What the journal in a folder is of; none where there is none.
pub(super) fn identity_in(dir: &Dir) -> Option<Digest> {
    let mut found = [0; IDENTITY_BYTES];
    dir.open(REPLIES).ok()?.read_exact(&mut found).ok()?;
    Some(Digest::from_bytes(found))
}

/// Forgets the replies to all but the first calls, and what was kept after them.
pub(super) fn cut(dir: &Dir, calls: u64) -> io::Result<()> {
    snapshot::cut(dir, calls)?;
    let Ok(mut source) = dir.open(REPLIES) else { return Ok(()) };
    let (start, bytes) = (IDENTITY_BYTES as u64, source.metadata()?.len());
    let (mut reading, mut rest) = (dir.open(REPLIES)?, dir.create(snapshot::NEW)?);
    io::copy(&mut (&mut source).take(start), &mut rest)?;
    reading.seek(SeekFrom::Start(start))?;
    let mut frames = Frames::new(BufReader::new(reading), start, bytes);
    loop {
        let from = frames.good;
        let Some((call, _)) = frames.next()? else { break };
        if call < calls {
            source.seek(SeekFrom::Start(from))?;
            io::copy(&mut (&mut source).take(frames.good - from), &mut rest)?;
        }
    }
    rest.sync_all()?;
    dir.rename(snapshot::NEW, dir, REPLIES)?;
    sync_dir(dir)
}

impl Book {
    /// Opens what is in a job's folder, and cuts off what a sudden end tore. `identity` is of all that decides the job's bits. Blocks.
    ///
    /// # Errors
    /// [`BegunElsewhere`]; what the operating system says.
    pub(crate) fn open(dir: Dir, identity: Digest, account: Account) -> anyhow::Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = dir.open_with(REPLIES, options.read(true).write(true).create(true)).context("opening a job's journal")?;
        let file_bytes = file.metadata().context("looking at a job's journal")?.len();
        let start = IDENTITY_BYTES as u64;
        if file_bytes < start {
            file.set_len(0).and_then(|()| file.write_all(identity.as_bytes())).context("beginning a job's journal")?;
        }
        let reading = || "reading a job's journal";
        file.seek(SeekFrom::Start(0)).with_context(reading)?;
        let mut found = [0; IDENTITY_BYTES];
        file.read_exact(&mut found).with_context(reading)?;
        if found != *identity.as_bytes() {
            return Err(BegunElsewhere { identity: Digest::from_bytes(found) }.into());
        }
        let sum = Sum::of(&mut file, start, file_bytes.max(start)).with_context(reading)?;
        if sum.good < file_bytes {
            tracing::warn!(bytes = file_bytes - sum.good, "a sudden end tore a job's journal; the rest of it was cut off");
            file.set_len(sum.good).context("cutting a job's journal")?;
        }
        let again = || dir.open(REPLIES).context("opening a job's journal");
        let mut past = Past::new(&sum, (again()?, again()?), start).with_context(reading)?;
        if let Some((calls, state)) = snapshot::latest(&dir, identity, sum.recorded)? {
            (past.calls, past.state) = (calls, Some(Arc::new(state)));
        }
        let keeper = Keeper::start((dir, file), (sum.good, sum.replies), identity, account)?;
        Ok(Self { past, keeper, is_new: sum.replies == 0 })
    }
}
