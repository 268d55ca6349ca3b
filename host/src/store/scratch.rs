//! A folder under `tmp/` in which something is made.
//!
//! Never outlives its maker: it is renamed into place, or removed.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use cap_std::fs::Dir;

use super::{Store, TMP, sync_dir};

static NEXT: AtomicU64 = AtomicU64::new(0);

/// A folder of its own. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Scratch {
    /// The data folder.
    store: Dir,
    path: String,
    dir: Dir,
}

impl Store {
    /// A new, empty scratch folder.
    pub(super) fn scratch(&self) -> anyhow::Result<Scratch> {
        let make = || -> io::Result<Scratch> {
            loop {
                // A process id is reused only after its owner died, and may then have left this very name behind.
                let path = format!("{TMP}/{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
                match self.dir.create_dir(&path) {
                    Ok(()) => return Ok(Scratch { store: self.dir.try_clone()?, dir: self.dir.open_dir(&path)?, path }),
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(error),
                }
            }
        };
        make().context("making a temporary folder in the data folder")
    }
}

impl Scratch {
    /// Where to make it.
    pub(super) fn dir(&self) -> &Dir {
        &self.dir
    }

    /// Puts the whole folder in place under a path of the data folder. Hold the write lock and know that the path is free.
    pub(super) fn publish(self, path: &str) -> anyhow::Result<()> {
        let publish = || -> io::Result<()> {
            sync_dir(&self.dir)?;
            self.store.rename(&self.path, &self.store, path)?;
            sync_dir(&self.store.open_dir(parent(path))?)
        };
        publish().with_context(|| format!("putting {path} in place in the data folder"))
    }

    /// Puts one file of it in place under a path of the data folder, over what is there. Hold the write lock.
    pub(super) fn publish_file(&self, name: &str, path: &str) -> anyhow::Result<()> {
        let publish = || -> io::Result<()> {
            self.dir.rename(name, &self.store, path)?;
            sync_dir(&self.store.open_dir(parent(path))?)
        };
        publish().with_context(|| format!("putting {path} in place in the data folder"))
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or(".", |(parent, _)| parent)
}

impl Drop for Scratch {
    fn drop(&mut self) {
        match self.store.remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = self.path, %error, "a temporary folder stays behind until the next start");
            }
            _ => {}
        }
    }
}
