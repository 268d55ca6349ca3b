//! Files under the SHA-256 of what is in them.
//!
//! Never shows anything half-written, and never removes what somebody is about to refer to: a [`Kept`] blob is pinned until it is dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use cap_std::fs::{Dir, File, OpenOptions};
use nodus_protocol::Digest;
use sha2::{Digest as _, Sha256};

use crate::access::Access;
use crate::database::lock;
use crate::error::{Result, StateError};
use crate::partial::{self, FOLDER, Partials};
use crate::place::{Place, Whole};
use crate::room::{Measure, Rooms, Share};

const TMP: &str = "tmp";
const BLOBS: &str = "blobs";
const WRITING: &str = "writing a blob";

/// What stands between a blob and its removal.
pub(crate) type Pins = Arc<Mutex<Pinned>>;

/// Blobs that somebody is about to refer to, and those that may be nobody's.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    /// By how many.
    held: BTreeMap<Digest, usize>,
    /// Let go since it was looked last whether a row refers to them: see [`State::sweep`](crate::State::sweep).
    pub(crate) loose: BTreeSet<Digest>,
}

impl Pinned {
    pub(crate) fn is_held(&self, digest: Digest) -> bool {
        self.held.contains_key(&digest)
    }

    fn hold(&mut self, digest: Digest) {
        *self.held.entry(digest).or_default() += 1;
    }

    fn let_go(&mut self, digest: Digest) {
        if let Some(count) = self.held.get_mut(&digest) {
            *count -= 1;
            if *count == 0 {
                self.held.remove(&digest);
                // Whether it was referred to is known by the rows alone.
                self.loose.insert(digest);
            }
        }
    }
}

/// The folder of blobs.
pub(crate) struct Blobs {
    pub(crate) dir: Dir,
    pub(crate) access: Access,
    next: AtomicU64,
    pub(crate) partials: Partials,
    pub(crate) pins: Pins,
    pub(crate) rooms: Rooms,
}

/// A file that is being written. Dropped, it is gone, unless it may be gone on with ([`State::resume`](crate::State::resume)).
pub struct Staged<'a> {
    pub(crate) place: Place,
    pub(crate) file: File,
    pub(crate) hash: Sha256,
    pub(crate) bytes_max: u64,
    /// What its tenant keeps beside it, where it is a tenant's.
    pub(crate) measure: Option<Measure<'a>>,
    /// What its content is said to have for a digest.
    pub(crate) expected: Option<Digest>,
}

/// A blob in its place, and pinned there until this is dropped: refer to it by a row before.
#[derive(Debug)]
pub struct Kept {
    digest: Digest,
    bytes: u64,
    pins: Pins,
    /// Until it is referred to, and counted as what its tenant keeps.
    pub(crate) share: Option<Share>,
}

impl Kept {
    /// SHA-256 of its content.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Length of its content.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.pins).let_go(self.digest);
    }
}

impl Blobs {
    pub(crate) fn open(dir: Dir, access: Access) -> Result<Self> {
        if access == Access::Whole {
            let failed = StateError::file("making the folders of the state");
            dir.create_dir_all(BLOBS).and_then(|()| dir.create_dir_all(FOLDER)).map_err(&failed)?;
            // What a killed process left; nobody else is there.
            if dir.exists(TMP) {
                dir.remove_dir_all(TMP).map_err(&failed)?;
            }
            dir.create_dir(TMP).map_err(&failed)?;
        }
        let partials = Mutex::new(partial::list(&dir)?);
        Ok(Self { dir, access, next: AtomicU64::new(0), partials, pins: Pins::default(), rooms: Rooms::default() })
    }

    pub(crate) fn stage(self: &Arc<Self>, bytes_max: u64) -> Result<Staged<'_>> {
        if self.access == Access::Rows {
            return Err(StateError::RowsOnly);
        }
        let name = format!("{TMP}/{}", self.next.fetch_add(1, Relaxed));
        let options = OpenOptions::new().read(true).write(true).create_new(true).clone();
        let file = self.dir.open_with(&name, &options).map_err(StateError::file(WRITING))?;
        Ok(Staged { place: Place::new(self, name), file, hash: Sha256::new(), bytes_max, measure: None, expected: None })
    }

    /// Puts a file that is on the disk in place under its digest, for good.
    pub(crate) fn keep(&self, name: &str, (digest, bytes): (Digest, u64)) -> Result<Kept> {
        // Pinned from here on, so that nobody waits for the lock while the disk works; dropped by an error, it is not any more.
        lock(&self.pins).hold(digest);
        let kept = Kept { digest, bytes, pins: self.pins.clone(), share: None };
        let place = blob_path(digest);
        let folder = place.rsplit_once('/').map_or(BLOBS, |(folder, _)| folder);
        // Over what is there, which may be damaged: this is known to be right. Who has that open keeps it.
        let put = || -> io::Result<()> {
            self.dir.create_dir_all(folder)?;
            self.dir.rename(name, &self.dir, &place)?;
            self.dir.open_dir(folder)?.open(".")?.sync_all()?;
            self.dir.open_dir(BLOBS)?.open(".")?.sync_all()
        };
        put().map_err(StateError::file("keeping a blob"))?;
        Ok(kept)
    }

    /// The blob's file.
    pub(crate) fn read(&self, digest: Digest) -> Result<File> {
        self.dir.open(blob_path(digest)).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StateError::Damaged(format!("blob {digest} is missing")),
            _ => StateError::file("opening a blob")(error),
        })
    }

    /// Every blob that is there, with its length.
    pub(crate) fn all(&self) -> Result<BTreeMap<Digest, u64>> {
        let list = || -> io::Result<BTreeMap<Digest, u64>> {
            let mut found = BTreeMap::new();
            for folder in self.dir.read_dir(BLOBS)? {
                for file in folder?.open_dir()?.entries()? {
                    let file = file?;
                    let digest = format!("sha256:{}", file.file_name().to_string_lossy()).parse();
                    if let Ok(digest) = digest {
                        found.insert(digest, file.metadata()?.len());
                    }
                }
            }
            Ok(found)
        };
        list().map_err(StateError::file("listing the blobs"))
    }

    /// Hold the pins, so that nobody finds a blob in its place that is about to go.
    pub(crate) fn remove(&self, digest: Digest) -> Result<()> {
        match self.dir.remove_file(blob_path(digest)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StateError::file("removing a blob")(error)),
            _ => Ok(()),
        }
    }

    /// The digest of what the blob's file holds now.
    pub(crate) fn digest_now(&self, digest: Digest) -> Result<Digest> {
        let mut file = self.read(digest)?;
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            match file.read(&mut buffer).map_err(StateError::file("reading a blob"))? {
                0 => return Ok(Digest::from_bytes(hash.finalize().into())),
                count => hash.update(buffer.get(..count).unwrap_or_default()),
            }
        }
    }
}

/// Where a blob's file is, within the state's folder.
#[must_use]
pub fn blob_path(digest: Digest) -> String {
    let hex = digest.hex();
    format!("{BLOBS}/{}/{hex}", hex.get(..2).unwrap_or_default())
}

impl Staged<'_> {
    /// How many bytes were written.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.place.bytes
    }

    /// What was written, from its beginning.
    ///
    /// # Errors
    /// The disk's.
    pub fn open(&self) -> Result<File> {
        self.place.open()
    }

    /// So many bytes more are said to come: refuses what would be refused on the way, before any of them comes.
    ///
    /// # Errors
    /// As writing them.
    pub fn announce(&self, more: u64) -> io::Result<()> {
        self.fits(more)?;
        let share = self.place.share.as_ref().zip(self.measure.as_ref());
        share.map_or(Ok(()), |(share, measure)| share.admits(more, measure)).map_err(io::Error::other)
    }

    /// Refused for good: nothing of it stays to be gone on with.
    pub fn forget(mut self) {
        self.place.stays = false;
    }

    fn fits(&self, more: u64) -> io::Result<()> {
        if self.place.bytes.saturating_add(more) > self.bytes_max { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(()) }
    }

    /// All of it came: from here on it is gone where it is dropped.
    ///
    /// # Errors
    /// It is not what it was said to be.
    pub fn finish(mut self) -> Result<Whole> {
        self.place.stays = false;
        let digest = Digest::from_bytes(self.hash.finalize().into());
        match self.expected {
            Some(expected) if expected != digest => {
                Err(StateError::Upload(format!("what came has the digest {digest}, expected {expected}; it is forgotten")))
            }
            _ => Ok(Whole { place: self.place, file: self.file, digest }),
        }
    }

    /// Finishes it, and puts it in place under its digest, on the disk for good.
    ///
    /// # Errors
    /// It is not what it was said to be; the disk's. Nothing was kept.
    pub fn keep(self) -> Result<Kept> {
        self.finish()?.keep()
    }
}

impl Write for Staged<'_> {
    /// Refuses what goes beyond the size that was allowed, with `FileTooLarge`; beyond the quota, with the [`StateError`] within.
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        let more = content.len() as u64;
        self.fits(more)?;
        let share = self.place.share.as_mut().zip(self.measure.as_ref());
        share.map_or(Ok(()), |(share, measure)| share.take(more, measure)).map_err(io::Error::other)?;
        let written = self.file.write(content);
        let rest = more - written.as_ref().map_or(0, |count| *count as u64);
        self.place.share.iter_mut().for_each(|share| share.give_back(rest));
        let count = written?;
        self.hash.update(content.get(..count).unwrap_or(content));
        self.place.grow(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
