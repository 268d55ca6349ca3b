//! What the folders of this crate need beyond `cap_std`: a lock that is waited for, a folder synced, a file's digest.
//!
//! Opens nothing outside the folder that it is given.

use std::io::{self, Read, Write as _};
use std::thread::sleep;
use std::time::Duration;

use cap_std::fs::{Dir, File, OpenOptions, OpenOptionsExt as _};
use nodus_protocol::Digest;
use sha2::{Digest as _, Sha256};

/// Holders keep a lock for milliseconds; one that is held longer than `ATTEMPTS_MAX` times `PAUSE` (30 s) belongs to a stopped
/// process, and waiting for ever would hide that.
const ATTEMPTS_MAX: u32 = 3000;
const PAUSE: Duration = Duration::from_millis(10);

/// Locks the file `name`, made if it is missing, until the returned file is dropped.
///
/// # Errors
/// `WouldBlock` where another holds it for longer than 30 seconds.
pub(crate) fn exclusive(dir: &Dir, name: &str) -> io::Result<std::fs::File> {
    let file = made(dir, name)?;
    locked(ATTEMPTS_MAX, &file, std::fs::File::try_lock)?;
    Ok(file)
}

/// The same, together with others who write as little.
///
/// # Errors
/// As [`exclusive`].
pub(crate) fn shared(dir: &Dir, name: &str) -> io::Result<std::fs::File> {
    // Whoever reads needs no disk that takes writes.
    let file = match dir.open(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => made(dir, name)?,
        opened => opened?.into_std(),
    };
    locked(ATTEMPTS_MAX, &file, std::fs::File::try_lock_shared)?;
    Ok(file)
}

type TryLock = fn(&std::fs::File) -> Result<(), std::fs::TryLockError>;

fn made(dir: &Dir, name: &str) -> io::Result<std::fs::File> {
    Ok(dir.open_with(name, OpenOptions::new().create(true).truncate(false).write(true))?.into_std())
}

fn locked(attempts_max: u32, file: &std::fs::File, try_lock: TryLock) -> io::Result<()> {
    for _ in 0..attempts_max {
        match try_lock(file) {
            Ok(()) => return Ok(()),
            Err(std::fs::TryLockError::WouldBlock) => sleep(PAUSE),
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::ErrorKind::WouldBlock.into())
}

/// Waits until the names in a folder are on the disk.
pub(crate) fn sync_dir(dir: &Dir) -> io::Result<()> {
    dir.open(".")?.sync_all()
}

/// Writes a file below a folder, with the folders above it: the whole of it is there afterwards, on the disk, or what was there before.
pub(crate) fn write_synced(dir: &Dir, path: &str, bytes: &[u8]) -> io::Result<()> {
    let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
    dir.create_dir_all(folder)?;
    let folder = dir.open_dir(folder)?;
    // No other file of such a folder ends so: whoever writes one holds the ledger's lock.
    let partial = format!("{name}.partial");
    let mut file = folder.open_with(&partial, OpenOptions::new().create(true).truncate(true).write(true).mode(0o600))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    folder.rename(&partial, &folder, name)?;
    sync_dir(&folder)?;
    sync_dir(dir)
}

/// Opens a file of a folder for reading; anything but a regular file is refused, since reading a pipe may never end.
pub(crate) fn open_regular(dir: &Dir, name: &str) -> io::Result<File> {
    if !dir.metadata(name)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    dir.open(name)
}

/// Digest and length in bytes of a file of a folder, read piece by piece.
pub(crate) fn digest_of(dir: &Dir, name: &str) -> io::Result<(Digest, u64)> {
    let mut file = open_regular(dir, name)?;
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((Digest::from_bytes(hash.finalize().into()), bytes)),
            Ok(n) => {
                hash.update(buffer.get(..n).unwrap_or_default());
                bytes += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io;

    use super::{exclusive, locked, made, shared};

    #[test]
    fn a_lock_that_stays_held_is_refused_and_a_dropped_one_is_free() {
        let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let held = exclusive(&dir, "lock").unwrap();
        for try_lock in [File::try_lock, File::try_lock_shared] {
            assert_eq!(locked(3, &made(&dir, "lock").unwrap(), try_lock).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        drop(held);
        let _both = (shared(&dir, "lock").unwrap(), shared(&dir, "lock").unwrap());
        assert!(locked(1, &made(&dir, "lock").unwrap(), File::try_lock).is_err());
    }
}
