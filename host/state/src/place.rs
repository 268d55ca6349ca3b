//! Where an upload is written, and an upload that came whole: to be looked at, and kept or not.
//!
//! Never leaves a file behind that nobody goes on with.

use std::io;
use std::sync::Arc;

use cap_std::fs::File;
use nodus_protocol::Digest;

use crate::blobs::{Blobs, Kept};
use crate::database::lock;
use crate::error::{Result, StateError};
use crate::partial;
use crate::room::Share;

/// The file of an upload. Dropped, it is gone, unless it may be gone on with ([`State::resume`](crate::State::resume)).
pub(crate) struct Place {
    pub(crate) blobs: Arc<Blobs>,
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Its part of its tenant's quota, where it is a tenant's.
    pub(crate) share: Option<Share>,
    /// Whether nobody else may go on with it meanwhile.
    pub(crate) is_busy: bool,
    /// Whether it stays where it is dropped.
    pub(crate) stays: bool,
}

impl Place {
    pub(crate) fn new(blobs: &Arc<Blobs>, name: String) -> Self {
        Self { blobs: blobs.clone(), name, bytes: 0, share: None, is_busy: false, stays: false }
    }

    pub(crate) fn open(&self) -> Result<File> {
        self.blobs.dir.open(&self.name).map_err(StateError::file("reading what was uploaded"))
    }

    /// So many bytes more are there.
    pub(crate) fn grow(&mut self, bytes: u64) {
        self.bytes += bytes;
        if self.is_busy {
            lock(&self.blobs.partials).entry(self.name.clone()).or_default().bytes = self.bytes;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let stays = self.stays && self.bytes > 0;
        if stays {
            self.share.iter_mut().for_each(Share::stay);
        }
        let is_gone = !stays
            && match self.blobs.dir.remove_file(&self.name) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(%error, "a temporary file stays behind until the next start");
                    false
                }
                _ => true,
            };
        if self.is_busy {
            partial::leave(&mut lock(&self.blobs.partials), &self.name, is_gone);
        }
    }
}

/// An upload that came whole, and is what it was said to be. Dropped, it is gone. It may wait for as long as it likes.
pub struct Whole {
    pub(crate) place: Place,
    pub(crate) file: File,
    pub(crate) digest: Digest,
}

impl Whole {
    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.place.bytes
    }

    /// What was written, from its beginning, to look at before it is kept.
    ///
    /// # Errors
    /// The disk's.
    pub fn open(&self) -> Result<File> {
        self.place.open()
    }

    /// Puts it in place under its digest, on the disk for good.
    ///
    /// # Errors
    /// The disk's: nothing was kept.
    pub fn keep(mut self) -> Result<Kept> {
        self.file.sync_all().map_err(StateError::file("keeping a blob"))?;
        let mut kept = self.place.blobs.keep(&self.place.name, (self.digest, self.place.bytes))?;
        kept.share = self.place.share.take().map(|mut share| {
            share.stay();
            share
        });
        Ok(kept)
    }
}
