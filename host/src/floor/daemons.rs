//! The MPS daemons of the floor: one for each card that has a job of that lane, started when the first comes, ended with the floor.
//!
//! Its folder is in the data folder, for this user alone, so that nobody else is its client; no two daemons ever have the same.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use cap_std::fs::{Dir, DirBuilder, DirBuilderExt as _};

use crate::process::mps::{CONTROL, Mps};

/// How the folders' names begin.
const PREFIX: &str = "mps-";

/// The daemons, by their cards.
pub(super) struct Daemons {
    folder: Arc<Folder>,
    cards: Mutex<BTreeMap<usize, Card>>,
}

/// The daemon of one card, where it has one. Locked while the driver's program is asked, which takes long where the card is in trouble: the other cards'
/// engines do not wait for that.
type Card = Arc<Mutex<Option<Arc<Mps>>>>;

struct Folder {
    /// The driver's program.
    control: PathBuf,
    /// The data folder, and where it is: the driver takes paths alone.
    dir: Dir,
    path: PathBuf,
    made: AtomicU64,
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
        Ok(Self { folder: Arc::new(Folder { control, dir, path, made: AtomicU64::new(0) }), cards: Mutex::default() })
    }

    /// The daemon of a card, `name` being what processes that are to see it alone are told; another one where the last is gone.
    ///
    /// # Errors
    /// Ours: there is none on this machine, or it does not start.
    pub(super) async fn of(&self, ordinal: usize, name: &str) -> anyhow::Result<Arc<Mps>> {
        let card = self.cards.lock().unwrap_or_else(PoisonError::into_inner).entry(ordinal).or_default().clone();
        let (folder, name) = (self.folder.clone(), name.to_owned());
        let start = move || folder.of((ordinal, name), &mut card.lock().unwrap_or_else(PoisonError::into_inner));
        tokio::task::spawn_blocking(start).await.context("starting an MPS daemon")?
    }
}

impl Folder {
    fn of(&self, (ordinal, card): (usize, String), running: &mut Option<Arc<Mps>>) -> anyhow::Result<Arc<Mps>> {
        if let Some(daemon) = running.as_ref() {
            if !daemon.is_gone() {
                return Ok(daemon.clone());
            }
            tracing::error!(card = ordinal, "the MPS daemon is gone; another one is started");
            *running = None;
        }
        // Engines that are clients of the last one still name its folder.
        let name = format!("{PREFIX}{ordinal}-{}", self.made.fetch_add(1, Relaxed) + 1);
        self.dir.create_dir_with(&name, DirBuilder::new().mode(0o700)).context("making the MPS daemon's folder")?;
        let daemon = Arc::new(Mps::start(self.control.clone(), self.path.join(&name), card)?);
        *running = Some(daemon.clone());
        Ok(daemon)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::Daemons;
    use crate::process::mps::tests::control;

    #[tokio::test]
    async fn a_daemon_that_died_is_replaced_and_the_next_service_ends_what_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let programs = tempfile::tempdir().unwrap();
        let control = control(programs.path(), "");
        let dir = || cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        let daemons = Daemons::of_program(control.clone(), dir(), folder.path().to_owned()).unwrap();
        let first = daemons.of(0, "GPU-0").await.unwrap();
        assert!(Arc::ptr_eq(&first, &daemons.of(0, "GPU-0").await.unwrap()), "one for a card");
        let other = daemons.of(1, "GPU-1").await.unwrap();
        let shown = |daemon: &str| dir().read_to_string(format!("{daemon}/alive")).unwrap();
        assert_eq!([shown("mps-0-1"), shown("mps-1-2")], ["GPU-0\n", "GPU-1\n"], "each is shown its own card alone");
        dir().remove_file("mps-0-1/alive").unwrap();
        let second = daemons.of(0, "GPU-0").await.unwrap();
        assert!(!Arc::ptr_eq(&first, &second) && !second.is_gone() && first.is_gone());
        // The last client of the first goes: the second is another, and stays.
        drop(first);
        assert!(!second.is_gone() && !other.is_gone());

        // Killed, it could not end them.
        std::mem::forget([second, other]);
        std::mem::forget(daemons);
        assert!(dir().exists("mps-0-3/alive") && dir().exists("mps-1-2/alive"), "both run on");
        Daemons::of_program(control, dir(), folder.path().to_owned()).unwrap();
        assert!(dir().entries().unwrap().count() == 0, "nothing is left");
    }
    /// A card whose daemon answers nobody, as after a fault on it.
    #[tokio::test]
    async fn a_daemon_that_is_silent_holds_up_its_own_card_alone() {
        let (folder, programs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // Silent on card 0 while there is a file that says so.
        let silent = folder.path().join("silent");
        let control = control(
            programs.path(),
            &format!("case \"$CUDA_MPS_PIPE_DIRECTORY\" in *mps-0-*) while [ -e {} ]; do sleep 0.05; done;; esac", silent.display()),
        );
        let dir = cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        let daemons = Arc::new(Daemons::of_program(control, dir.try_clone().unwrap(), folder.path().to_owned()).unwrap());
        let (first, other) = (daemons.of(0, "GPU-0").await.unwrap(), daemons.of(1, "GPU-1").await.unwrap());
        dir.write("silent", "").unwrap();
        let asking = daemons.clone();
        let held_up = tokio::spawn(async move { asking.of(0, "GPU-0").await.unwrap() });
        tokio::time::sleep(Duration::from_millis(200)).await;
        let again = tokio::time::timeout(Duration::from_secs(60), daemons.of(1, "GPU-1")).await.expect("it waits for the other card's");
        assert!(Arc::ptr_eq(&other, &again.unwrap()));
        assert!(!held_up.is_finished(), "the silent one is still asked");
        dir.remove_file("silent").unwrap();
        assert!(Arc::ptr_eq(&first, &held_up.await.unwrap()));
    }
}
