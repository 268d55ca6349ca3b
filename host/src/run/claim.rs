//! How a run takes the folder that it makes its results in: locked while it lives, and what a killed run left there set aside.
//!
//! Never takes the folder of a living run, nor anything that was written away.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;

use cap_std::fs::{Dir, DirEntry, MetadataExt as _};

use crate::paths::shown;
use crate::store::reopened;

/// What a folder of results is called while it is made, or when its run was killed.
pub(super) fn beside(name: &Path, suffix: &str) -> OsString {
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(suffix);
    hidden
}

/// Makes the partial folder and locks it, after what a killed run left there was set aside; `WouldBlock` where another process has it.
pub(super) fn claim(parent: &Dir, partial: &OsStr, killed: &OsStr) -> io::Result<(Dir, std::fs::File)> {
    // One at a time in this folder: a fresh one must not be taken for a dead run's before it is locked.
    let turn = reopened(parent)?.into_std();
    turn.lock()?;
    loop {
        match parent.create_dir(partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let stale = parent.open_dir(partial)?;
                let lock = reopened(&stale)?.into_std();
                lock.try_lock()?;
                // Another run may have replaced it between the opening and the lock: then what is there now is alive.
                if same(&stale, &parent.open_dir(partial)?)? {
                    set_aside(parent, (&stale, partial), killed)?;
                }
            }
            Err(error) => return Err(error),
            Ok(()) => {
                let dir = parent.open_dir(partial)?;
                let lock = reopened(&dir)?.into_std();
                lock.try_lock()?;
                return Ok((dir, lock));
            }
        }
    }
}

/// Keeps what a killed run wrote, in the place of what an earlier one did; of a run that wrote nothing, nothing.
fn set_aside(parent: &Dir, (stale, partial): (&Dir, &OsStr), killed: &OsStr) -> io::Result<()> {
    if !holds_anything(stale) {
        return parent.remove_dir_all(partial);
    }
    replace(parent, Path::new(partial), killed)?;
    tracing::warn!("an earlier run into this folder was killed: what it had written is now in {}", shown(Path::new(killed)));
    Ok(())
}

/// Gives a folder the place of another, which is gone.
pub(super) fn replace(parent: &Dir, folder: &Path, other: &OsStr) -> io::Result<()> {
    match parent.remove_dir_all(other) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => parent.rename(folder, parent, other),
    }
}

/// Whether there is a folder, or a file with bytes in it.
pub(super) fn holds_anything(folder: &Dir) -> bool {
    let is_written =
        |entry: io::Result<DirEntry>| entry.and_then(|entry| entry.metadata()).is_ok_and(|found| found.is_dir() || found.len() > 0);
    folder.entries().is_ok_and(|mut entries| entries.any(is_written))
}

/// Whether two handles are of one folder.
fn same(a: &Dir, b: &Dir) -> io::Result<bool> {
    let identity = |dir: &Dir| dir.dir_metadata().map(|found| (found.dev(), found.ino()));
    Ok(identity(a)? == identity(b)?)
}
