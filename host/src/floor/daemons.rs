//! The MPS daemons of the floor: one for each card that has a job of that lane, started when the first comes, ended with the floor.
//!
//! Its folder is in the data folder, for this user alone, so that nobody else is its client.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use cap_std::fs::{Dir, DirBuilder, DirBuilderExt as _};

use crate::process::mps::Mps;

/// The daemons, by their cards.
pub(super) struct Daemons {
    /// The data folder, and where it is: the driver takes paths alone.
    dir: Dir,
    path: PathBuf,
    running: Arc<Mutex<BTreeMap<usize, Arc<Mps>>>>,
}

impl Daemons {
    pub(super) fn new(dir: Dir, path: PathBuf) -> Self {
        Self { dir, path, running: Arc::default() }
    }

    /// The daemon of a card.
    ///
    /// # Errors
    /// Ours: there is none on this machine, or it does not start.
    pub(super) async fn of(&self, ordinal: usize) -> anyhow::Result<Arc<Mps>> {
        let (dir, running) = (self.dir.try_clone().context("opening the data folder")?, self.running.clone());
        let name = format!("mps-{ordinal}");
        let path = self.path.join(&name);
        let start = move || {
            let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(daemon) = running.get(&ordinal) {
                return Ok(daemon.clone());
            }
            if dir.exists(&name) {
                // A service that was killed left its daemon running.
                drop(Mps::left(path.clone()));
                dir.remove_dir_all(&name).context("removing the folder of an MPS daemon that was left")?;
            }
            dir.create_dir_with(&name, DirBuilder::new().mode(0o700)).context("making the MPS daemon's folder")?;
            let daemon = Arc::new(Mps::start(path)?);
            running.insert(ordinal, daemon.clone());
            anyhow::Ok(daemon)
        };
        tokio::task::spawn_blocking(start).await.context("starting an MPS daemon")?
    }
}
