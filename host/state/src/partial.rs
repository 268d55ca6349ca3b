//! Uploads that go on where they broke off: what came so far of a content, under its owner and the digest that it is to have.
//!
//! Never takes one for its content before the digest is right, shows none to another tenant, and forgets them after a day.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use cap_std::fs::{Dir, OpenOptions};
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

/// What came so far of each, by its file: what is in the folder, which is listed once.
pub(crate) type Partials = Mutex<BTreeMap<String, Partial>>;

/// An upload that may be gone on with.
#[derive(Debug, Default)]
pub(crate) struct Partial {
    pub(crate) bytes: u64,
    /// Whether it is under way, so that nobody else may go on with it.
    pub(crate) is_busy: bool,
}

/// The folder of what came so far.
pub(crate) const FOLDER: &str = "partial";
/// Unfinished uploads of one tenant.
const OF_ONE_MAX: usize = 8;
/// How long one is kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// What the names of a tenant's files begin with.
fn prefix(of: TenantId) -> String {
    format!("{FOLDER}/{}-", of.number())
}

fn place(of: TenantId, digest: Digest) -> String {
    format!("{}{}", prefix(of), digest.hex())
}

/// What is in the folder; nothing where nobody has served from this one yet.
pub(crate) fn list(dir: &Dir) -> Result<BTreeMap<String, Partial>> {
    let list = || -> io::Result<_> {
        let mut found = BTreeMap::new();
        for entry in dir.read_dir(FOLDER)? {
            let entry = entry?;
            // One that is done meanwhile, beside a running service, is no longer one.
            let bytes = entry.metadata().map_or(0, |about| about.len());
            found.insert(format!("{FOLDER}/{}", entry.file_name().to_string_lossy()), Partial { bytes, is_busy: false });
        }
        Ok(found)
    };
    match list() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        found => found.map_err(StateError::file("listing uploads that broke off")),
    }
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
        let mut partials = lock(&self.blobs.partials);
        if partials.get(&name).is_some_and(|partial| partial.is_busy) {
            return Err(StateError::Upload("it is being uploaded, expected one that broke off".to_owned()));
        }
        self.blobs.dir.remove_file(&name).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StateError::NotFound("upload"),
            _ => StateError::file("dropping an upload that broke off")(error),
        })?;
        partials.remove(&name);
        Ok(())
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
        if offset == 0 && self.blobs.unfinished(of) >= OF_ONE_MAX {
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
            let broken_off = self.blobs.partial_bytes(of, |file, partial| !partial.is_busy && Some(file) != name.as_ref());
            Ok(self.database.read(|view| stored_bytes(view, of))?.saturating_add(broken_off))
        });
        Share::begin(&self.blobs.rooms, (of, bound), there, &measure).map(|share| (share, measure))
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
                let mut partials = lock(&self.blobs.partials);
                if age > KEPT && !partials.get(&name).is_some_and(|partial| partial.is_busy) {
                    self.blobs.dir.remove_file(&name)?;
                    partials.remove(&name);
                    count += 1;
                }
            }
            Ok(count)
        };
        forget().map_err(StateError::file("forgetting uploads that broke off"))
    }
}

/// One is not under way any more.
pub(crate) fn leave(partials: &mut BTreeMap<String, Partial>, name: &str, is_gone: bool) {
    if is_gone {
        partials.remove(name);
    } else if let Some(partial) = partials.get_mut(name) {
        partial.is_busy = false;
    }
}

impl Blobs {
    /// What came so far of all uploads of a tenant that broke off, or are under way and can.
    pub(crate) fn unfinished_bytes(&self, of: TenantId) -> u64 {
        self.partial_bytes(of, |_, _| true)
    }

    /// The same of those that are asked for.
    fn partial_bytes(&self, of: TenantId, counts: impl Fn(&String, &Partial) -> bool) -> u64 {
        let (prefix, partials) = (prefix(of), lock(&self.partials));
        let own = partials.range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix));
        own.filter(|(name, partial)| counts(name, partial)).map(|(_, partial)| partial.bytes).sum()
    }

    fn unfinished(&self, of: TenantId) -> usize {
        let prefix = prefix(of);
        lock(&self.partials).range(prefix.clone()..).take_while(|(name, _)| name.starts_with(&prefix)).count()
    }

    fn resume<'a>(
        self: &'a Arc<Self>,
        name: String,
        expected: Digest,
        (bytes_max, (share, measure)): (u64, (Share, Measure<'a>)),
    ) -> Result<Staged<'a>> {
        if std::mem::replace(&mut lock(&self.partials).entry(name.clone()).or_default().is_busy, true) {
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
        let (file, hash, bytes) = open().map_err(|error| {
            let mut partials = lock(&self.partials);
            let is_gone = partials.get(&name).is_some_and(|partial| partial.bytes == 0);
            leave(&mut partials, &name, is_gone);
            StateError::file("opening an upload that broke off")(error)
        })?;
        let mut place = Place::new(self, name.clone());
        (place.share, place.is_busy, place.stays) = (Some(share), true, true);
        place.grow(bytes);
        Ok(Staged { place, file, hash, bytes_max, measure: Some(measure), expected: Some(expected) })
    }
}
