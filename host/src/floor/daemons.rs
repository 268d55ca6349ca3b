//! The MPS daemons of the floor: one for each card that has a job of that lane, started when the first comes, ended with the floor.
//!
//! Its folder is in the data folder, for this user alone, so that nobody else is its client; no two daemons ever have the same.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use cap_std::fs::{Dir, DirBuilder, DirBuilderExt as _};

use crate::process::mps::{CONTROL, Mps};

/// How the folders' names begin.
const PREFIX: &str = "mps-";

/// The daemons, by their cards.
pub(super) struct Daemons(Arc<Mutex<Folder>>);

struct Folder {
    /// The driver's program.
    control: PathBuf,
    /// The data folder, and where it is: the driver takes paths alone.
    dir: Dir,
    path: PathBuf,
    running: BTreeMap<usize, Arc<Mps>>,
    made: u64,
}

impl Daemons {
    /// Ends what a service that was killed left running.
    ///
    /// # Errors
    /// Ours: the data folder cannot be listed, or a folder in it not be removed.
    pub(super) fn new(dir: Dir, path: PathBuf) -> anyhow::Result<Self> {
        Self::of_program(CONTROL.into(), dir, path)
    }

    fn of_program(control: PathBuf, dir: Dir, path: PathBuf) -> anyhow::Result<Self> {
        for entry in dir.entries().context("listing the data folder")? {
            let name = entry.context("listing the data folder")?.file_name().to_string_lossy().into_owned();
            if name.starts_with(PREFIX) {
                drop(Mps::left(control.clone(), path.join(&name)));
                dir.remove_dir_all(&name).context("removing the folder of an MPS daemon that was left")?;
            }
        }
        Ok(Self(Arc::new(Mutex::new(Folder { control, dir, path, running: BTreeMap::new(), made: 0 }))))
    }

    /// The daemon of a card; another one where the last is gone.
    ///
    /// # Errors
    /// Ours: there is none on this machine, or it does not start.
    pub(super) async fn of(&self, ordinal: usize) -> anyhow::Result<Arc<Mps>> {
        let folder = self.0.clone();
        let start = move || folder.lock().unwrap_or_else(PoisonError::into_inner).of(ordinal);
        tokio::task::spawn_blocking(start).await.context("starting an MPS daemon")?
    }
}

impl Folder {
    fn of(&mut self, ordinal: usize) -> anyhow::Result<Arc<Mps>> {
        if let Some(daemon) = self.running.get(&ordinal) {
            if !daemon.is_gone() {
                return Ok(daemon.clone());
            }
            tracing::error!(card = ordinal, "the MPS daemon is gone; another one is started");
            self.running.remove(&ordinal);
        }
        // Engines that are clients of the last one still name its folder.
        self.made += 1;
        let name = format!("{PREFIX}{ordinal}-{}", self.made);
        self.dir.create_dir_with(&name, DirBuilder::new().mode(0o700)).context("making the MPS daemon's folder")?;
        let daemon = Arc::new(Mps::start_by(self.control.clone(), self.path.join(&name))?);
        self.running.insert(ordinal, daemon.clone());
        Ok(daemon)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Daemons;
    use crate::process::mps::tests::control;

    #[tokio::test]
    async fn a_daemon_that_died_is_replaced_and_the_next_service_ends_what_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let programs = tempfile::tempdir().unwrap();
        let control = control(programs.path(), "");
        let dir = || cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        let daemons = Daemons::of_program(control.clone(), dir(), folder.path().to_owned()).unwrap();
        let first = daemons.of(0).await.unwrap();
        assert!(Arc::ptr_eq(&first, &daemons.of(0).await.unwrap()), "one for a card");
        let other = daemons.of(1).await.unwrap();
        dir().remove_file("mps-0-1/alive").unwrap();
        let second = daemons.of(0).await.unwrap();
        assert!(!Arc::ptr_eq(&first, &second) && !second.is_gone() && first.is_gone());
        // The last client of the first goes: the second is another, and stays.
        drop(first);
        assert!(!second.is_gone() && !other.is_gone());

        // Killed, it could not end them.
        std::mem::forget([second, other, daemons.of(0).await.unwrap()]);
        std::mem::forget(daemons);
        assert!(dir().exists("mps-0-3/alive") || dir().exists("mps-0-2/alive"));
        Daemons::of_program(control, dir(), folder.path().to_owned()).unwrap();
        assert!(dir().entries().unwrap().count() == 0, "nothing is left");
    }
}
