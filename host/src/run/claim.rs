//! How a run takes the folder that it makes its results in, and their place: locked while it lives, and what a killed run left there set aside.
//!
//! Never takes the folder of a living run, nor anything that was written away.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;

use cap_std::fs::{Dir, DirEntry, Metadata, MetadataExt as _};

use crate::error::user;
use crate::paths::{cannot, shown};
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

/// Keeps what a killed run wrote; of a run that wrote nothing, nothing.
fn set_aside(parent: &Dir, (stale, partial): (&Dir, &OsStr), killed: &OsStr) -> io::Result<()> {
    if !holds_anything(stale) {
        return parent.remove_dir_all(partial);
    }
    let now = put_aside(parent, Path::new(partial), killed)?;
    tracing::warn!("an earlier run into this folder was killed: what it had written is now in {}", shown(Path::new(&now)));
    Ok(())
}

/// Gives a folder another name, where that is taken with the first number behind it that is free; which one.
pub(super) fn put_aside(parent: &Dir, folder: &Path, name: &OsStr) -> io::Result<OsString> {
    let (mut free, mut number) = (name.to_owned(), 1_u64);
    while parent.try_exists(&free)? {
        number += 1;
        free = name.to_owned();
        free.push(format!("-{number}"));
    }
    parent.rename(folder, parent, &free)?;
    Ok(free)
}

/// What tells a folder from any that comes after it in its place: the number that the file system gave it, and, since numbers are given again, when
/// it was made, where that is known.
pub(super) fn identity(found: &Metadata) -> String {
    let since = |created: cap_std::time::SystemTime| created.duration_since(cap_std::time::SystemClock::UNIX_EPOCH).ok();
    format!("inode {}, made {:?}", found.ino(), found.created().ok().and_then(since))
}

/// The user's error where results cannot be put there.
pub(super) fn refuse_taken(parent: &Dir, name: &Path, path: &Path) -> anyhow::Result<()> {
    if parent.symlink_metadata(name).is_ok_and(|found| found.is_symlink()) {
        return Err(user(format!("{} is a symbolic link: give the folder itself to --out", shown(path))));
    }
    if is_mount_point(parent, name) {
        return Err(user(format!("{} is a mount point, which nothing can be renamed to: choose a folder in it for --out", shown(path))));
    }
    refuse(parent.read_dir(name).map(|entries| entries.take(1).count()), path)
}

/// Whether another file system begins there.
fn is_mount_point(parent: &Dir, name: &Path) -> bool {
    let inner = parent.open_dir(name).and_then(|dir| dir.dir_metadata());
    inner.is_ok_and(|inner| parent.dir_metadata().is_ok_and(|outer| outer.dev() != inner.dev()))
}

/// The user's error, unless nothing is there or the folder has no entries.
fn refuse(entries: io::Result<usize>, path: &Path) -> anyhow::Result<()> {
    match entries {
        Ok(0) => Ok(()),
        Ok(_) => Err(user(format!("{} exists and is not empty: choose another folder for --out", shown(path)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(cannot("use", path, &error)),
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::is_mount_point;
    use crate::paths::Paths;

    #[test]
    fn a_mount_point_is_refused_before_any_work() {
        let paths = Paths::new(cap_std::ambient_authority());
        assert!(is_mount_point(&paths.open_dir(Path::new("/")).unwrap(), Path::new("proc")));
        let temp = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        temp.create_dir("inner").unwrap();
        assert!(!is_mount_point(&temp, Path::new("inner")));
    }
}
