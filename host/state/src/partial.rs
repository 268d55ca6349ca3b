//! Uploads that go on where they broke off: what came so far of a content, under its owner and the digest that it is to have.
//!
//! Never takes one for its content before the digest is right, shows none to another tenant, and forgets them after a day.

use std::io::{self, Read as _};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use cap_std::fs::OpenOptions;
use nodus_protocol::Digest;
use sha2::{Digest as _, Sha256};

use crate::blobs::{Blobs, Staged};
use crate::database::lock;
use crate::error::{Result, StateError};
use crate::ids::TenantId;
use crate::place::Place;
use crate::room::{Measure, Share};
use crate::state::State;
use crate::tenants::tenant;
use crate::usage::stored_bytes;

/// The folder of what came so far.
pub(crate) const FOLDER: &str = "partial";
/// Unfinished uploads of one tenant.
const OF_ONE_MAX: usize = 8;
/// How long one is kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);

fn prefix(of: TenantId) -> String {
    format!("{}-", of.number())
}

fn place(of: TenantId, digest: Digest) -> String {
    format!("{FOLDER}/{}{}", prefix(of), digest.hex())
}

impl State {
    /// How many bytes there are of an upload that broke off; 0 where there is none.
    ///
    /// # Errors
    /// The disk's.
    pub fn uploaded(&self, of: TenantId, digest: Digest) -> Result<u64> {
        match self.blobs.dir.metadata(place(of, digest)) {
            Ok(about) => Ok(about.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(StateError::file("looking for an upload that broke off")(error)),
        }
    }

    /// Drops what came of an upload that broke off.
    ///
    /// # Errors
    /// There is none, or it is being uploaded now; the disk's.
    pub fn drop_upload(&self, of: TenantId, digest: Digest) -> Result<()> {
        let name = place(of, digest);
        // Held, so that nobody goes on with it meanwhile.
        let busy = lock(&self.blobs.busy);
        if busy.contains(&name) {
            return Err(StateError::Upload("it is being uploaded, expected one that broke off".to_owned()));
        }
        self.blobs.dir.remove_file(name).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StateError::NotFound("upload"),
            _ => StateError::file("dropping an upload that broke off")(error),
        })
    }

    /// Begins an upload of a content of this digest, or goes on with it: `offset` bytes are there. What is dropped before
    /// [`Staged::finish`] stays, to be gone on with.
    ///
    /// # Errors
    /// Another number of bytes is there, it is being uploaded now, too many others are unfinished, or the quota: what came of an upload counts
    /// among what the tenant keeps.
    pub fn resume(&self, of: TenantId, digest: Digest, offset: u64, bytes_max: u64) -> Result<Staged<'_>> {
        let name = place(of, digest);
        let there = self.uploaded(of, digest)?;
        if there != offset {
            return Err(StateError::Upload(format!("{there} bytes of it are there, expected to go on at {there} and not at {offset}")));
        }
        if offset == 0 && self.blobs.unfinished(of)? >= OF_ONE_MAX {
            return Err(StateError::Upload(format!(
                "{OF_ONE_MAX} uploads of yours are unfinished, expected one of them to be finished or dropped first"
            )));
        }
        let share = self.share(of, (there, Some(name.clone())))?;
        self.blobs.resume(name, digest, (bytes_max, share))
    }

    /// A file for a tenant's upload that cannot be gone on with, of so many bytes at most. It counts among what the tenant keeps as it comes.
    ///
    /// # Errors
    /// The quota is used up; the disk's.
    pub fn receive(&self, of: TenantId, bytes_max: u64) -> Result<Staged<'_>> {
        let (share, measure) = self.share(of, (0, None))?;
        let mut staged = self.blobs.stage(bytes_max)?;
        (staged.place.share, staged.measure) = (Some(share), Some(measure));
        Ok(staged)
    }

    /// An upload's part of its tenant's quota, where so many bytes of it are in the file of this name.
    fn share(&self, of: TenantId, (there, name): (u64, Option<String>)) -> Result<(Share, Measure<'_>)> {
        let bound = self.database.read(|view| Ok(tenant(view, of)?.quota.stored_bytes))?;
        let measure: Measure<'_> = Box::new(move || {
            let busy = self.blobs.busy.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let broken_off = self.partial_bytes(of, |file| Some(file) != name.as_deref() && !busy.contains(file))?;
            Ok(self.database.read(|view| stored_bytes(view, of))?.saturating_add(broken_off))
        });
        Share::begin(&self.blobs.rooms, (of, bound), there, &measure).map(|share| (share, measure))
    }

    /// What came so far of all uploads of a tenant that broke off, or are under way.
    pub(crate) fn unfinished_bytes(&self, of: TenantId) -> Result<u64> {
        self.partial_bytes(of, |_| true)
    }

    /// The same of those files that are asked for.
    fn partial_bytes(&self, of: TenantId, counts: impl Fn(&str) -> bool) -> Result<u64> {
        let sum = || -> io::Result<u64> {
            let prefix = prefix(of);
            let mut sum = 0;
            for entry in self.blobs.dir.read_dir(FOLDER)? {
                let entry = entry?;
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with(&prefix) && counts(&format!("{FOLDER}/{name}")) {
                    // One that is done meanwhile is no longer one.
                    sum += entry.metadata().map_or(0, |about| about.len());
                }
            }
            Ok(sum)
        };
        match sum() {
            // Nobody has served from this folder yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            sum => sum.map_err(StateError::file("measuring uploads that broke off")),
        }
    }

    /// Forgets uploads that nobody went on with for a day; how many.
    ///
    /// # Errors
    /// The disk's.
    pub fn forget_uploads(&self) -> Result<usize> {
        let forget = || -> io::Result<usize> {
            let mut count = 0;
            for entry in self.blobs.dir.read_dir(FOLDER)? {
                let entry = entry?;
                let age = SystemTime::now().duration_since(entry.metadata()?.modified()?.into_std()).unwrap_or_default();
                let name = format!("{FOLDER}/{}", entry.file_name().to_string_lossy());
                if age > KEPT && !self.blobs.busy.lock().unwrap_or_else(PoisonError::into_inner).contains(&name) {
                    self.blobs.dir.remove_file(name)?;
                    count += 1;
                }
            }
            Ok(count)
        };
        forget().map_err(StateError::file("forgetting uploads that broke off"))
    }
}

impl Blobs {
    fn unfinished(&self, of: TenantId) -> Result<usize> {
        let prefix = prefix(of);
        let names =
            self.dir.read_dir(FOLDER).and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>());
        let names = names.map_err(StateError::file("listing uploads that broke off"))?;
        Ok(names.iter().filter(|name| name.to_string_lossy().starts_with(&prefix)).count())
    }

    fn resume<'a>(
        self: &'a Arc<Self>,
        name: String,
        expected: Digest,
        (bytes_max, (share, measure)): (u64, (Share, Measure<'a>)),
    ) -> Result<Staged<'a>> {
        if !self.busy.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone()) {
            return Err(StateError::Upload("it is being uploaded, expected one upload of a content at a time".to_owned()));
        }
        let open = || -> io::Result<(cap_std::fs::File, Sha256, u64)> {
            let mut file = self.dir.open_with(&name, OpenOptions::new().read(true).append(true).create(true))?;
            let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 16]);
            loop {
                match file.read(&mut buffer)? {
                    0 => return Ok((file, hash, bytes)),
                    count => {
                        hash.update(buffer.get(..count).unwrap_or_default());
                        bytes += count as u64;
                    }
                }
            }
        };
        match open() {
            Ok((file, hash, bytes)) => {
                let mut place = Place::new(self, name);
                (place.bytes, place.share, place.is_busy, place.stays) = (bytes, Some(share), true, true);
                Ok(Staged { place, file, hash, bytes_max, measure: Some(measure), expected: Some(expected) })
            }
            Err(error) => {
                self.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
                Err(StateError::file("opening an upload that broke off")(error))
            }
        }
    }
}
