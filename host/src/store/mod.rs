//! The data folder: models, data sets and adapters, each under its digest.
//!
//! Never shows anything half-written: what is made is made in `tmp/`, synced, and renamed into place. Opens nothing outside its folder.
//!
//! ```text
//! alive.lock         held shared by every process that uses the folder; whoever gets it alone sweeps tmp/
//! write.lock         held while something is put in place or removed
//! models/NAME/       config.json, *.safetensors, tokenizer.json, ..., nodus.json (the manifest)
//! data/NAME.json     manifest of a data set
//! blobs/HEX          content of data sets, and components that receipts of the command line name, by SHA-256
//! adapters/HEX/      PEFT folders, by digest
//! journals/JOB/      what keeps the jobs of a service through an interruption; see `crate::journal`
//! kernels/           compiled kernels and what the exactness gate found; may be emptied
//! service/           a service's state, with the components and data of its jobs; see `nodus_state`
//! tmp/               what is being made
//! host_key.pem, host_key.pub.pem, ledger.jsonl: the host's books, which `nodus_receipts` keeps
//! ```

mod adapters;
mod blob;
mod components;
mod datasets;
mod models;
mod scratch;

use std::io;

use anyhow::Context as _;
use cap_std::fs::{Dir, File, OpenOptions};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use blob::copy;
pub use blob::{Hashing, digest_of};
pub use components::Workspace;
pub use datasets::DatasetManifest;
pub(crate) use models::MANIFEST as MODEL_MANIFEST;
pub use models::{ModelManifest, ModelSummary};

use crate::error::user;
use crate::name::Name;

const ALIVE: &str = "alive.lock";
const WRITE: &str = "write.lock";
const TMP: &str = "tmp";
const MODELS: &str = "models";
pub(crate) const KERNELS: &str = "kernels";
/// The service's state, which `nodus_state` keeps.
pub(crate) const SERVICE: &str = "service";
const FOLDERS: [&str; 6] = [MODELS, "data", "blobs", "adapters", KERNELS, TMP];

/// The data folder, open.
#[derive(Debug)]
pub struct Store {
    dir: Dir,
    /// Locked shared as long as the store is open; none where it is only read.
    _alive: Option<std::fs::File>,
}

impl Store {
    /// Opens a data folder, fills in what it lacks, and sweeps what a killed process left, unless another process is at work in it.
    ///
    /// # Errors
    /// The user's, where the folder cannot be written.
    pub fn open(dir: Dir) -> anyhow::Result<Self> {
        let alive = Self::prepare(&dir).map_err(|error| user(format!("the data folder cannot be used: {error}")))?;
        Ok(Self { dir, _alive: Some(alive) })
    }

    /// Opens a data folder to read what is in it: makes and changes nothing, so that it may be read-only.
    ///
    /// # Errors
    /// The user's, where this is no data folder.
    pub fn open_to_read(dir: Dir) -> anyhow::Result<Self> {
        if !dir.is_dir(MODELS) {
            return Err(user("this is not a data folder: it has no models/"));
        }
        Ok(Self { dir, _alive: None })
    }

    fn prepare(dir: &Dir) -> io::Result<std::fs::File> {
        for folder in FOLDERS {
            dir.create_dir(folder).or_else(|error| if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })?;
        }
        let alive = lock_file(dir, ALIVE)?;
        if alive.try_lock().is_ok() {
            for stale in dir.read_dir(TMP)? {
                dir.remove_dir_all(format!("{TMP}/{}", stale?.file_name().to_string_lossy()))?;
            }
            alive.unlock()?;
        }
        alive.lock_shared()?;
        Ok(alive)
    }

    /// The data folder itself, for the host's books.
    ///
    /// # Errors
    /// Ours: no file handle is left.
    pub fn dir(&self) -> anyhow::Result<Dir> {
        self.dir.try_clone().context("opening the data folder")
    }

    /// The folder of compiled kernels.
    ///
    /// # Errors
    /// Ours: no file handle is left.
    pub(crate) fn kernels(&self) -> anyhow::Result<Dir> {
        self.dir.open_dir(KERNELS).context("opening the data folder's kernels")
    }

    /// Waits until nobody else puts or removes anything; holds that until dropped.
    fn write_lock(&self) -> anyhow::Result<std::fs::File> {
        let file = lock_file(&self.dir, WRITE).context("opening the data folder's lock")?;
        file.lock().context("locking the data folder")?;
        Ok(file)
    }

    /// The names in `folder` that end in `suffix`, without it, sorted. Files that this program did not name are passed over.
    fn names(&self, folder: &str, suffix: &str) -> anyhow::Result<Vec<Name>> {
        let mut names = Vec::new();
        if !self.dir.exists(folder) {
            return Ok(names);
        }
        for entry in self.dir.read_dir(folder).with_context(|| format!("listing {folder}/ of the data folder"))? {
            let file_name = entry.with_context(|| format!("listing {folder}/ of the data folder"))?.file_name();
            names.extend(file_name.to_str().and_then(|n| n.strip_suffix(suffix)).and_then(|n| n.parse::<Name>().ok()));
        }
        names.sort();
        Ok(names)
    }
}

fn lock_file(dir: &Dir, name: &str) -> io::Result<std::fs::File> {
    Ok(dir.open_with(name, OpenOptions::new().read(true).write(true).create(true))?.into_std())
}

/// Writes a manifest and waits until it is on the disk.
fn write_json(dir: &Dir, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    write_synced(dir, name, text.as_bytes())
}

/// Writes a new file and waits until it is on the disk.
///
/// # Errors
/// Ours: the disk is full or read-only, or the file exists.
pub(crate) fn write_synced(dir: &Dir, name: &str, content: &[u8]) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        let mut file = dir.open_with(name, OpenOptions::new().write(true).create_new(true))?;
        io::Write::write_all(&mut file, content)?;
        file.sync_all()
    };
    write().with_context(|| format!("writing {name}"))
}

fn read_json<T: DeserializeOwned>(dir: &Dir, name: &str) -> anyhow::Result<T> {
    let text = dir.read(name).with_context(|| format!("reading {name} of the data folder"))?;
    serde_json::from_slice(&text).with_context(|| format!("{name} of the data folder is damaged"))
}

/// Waits until the names in a folder are on the disk.
///
/// # Errors
/// What the operating system says.
pub(crate) fn sync_dir(dir: &Dir) -> io::Result<()> {
    reopened(dir)?.sync_all()
}

/// The folder as a file: what a `Dir` holds may be a bare path handle, which can be neither synced nor locked.
pub(crate) fn reopened(dir: &Dir) -> io::Result<File> {
    dir.open(".")
}

#[cfg(test)]
mod tests {
    use super::Store;

    #[test]
    fn what_a_killed_process_left_is_swept_only_when_nobody_else_is_there() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let first = Store::open(root.try_clone().unwrap()).unwrap();
        root.create_dir_all("tmp/left/deep").unwrap();
        root.write("tmp/left/deep/file", "half").unwrap();
        drop(Store::open(root.try_clone().unwrap()).unwrap());
        assert!(root.exists("tmp/left"), "swept beside a living process");
        drop(first);
        drop(Store::open(root.try_clone().unwrap()).unwrap());
        assert_eq!(root.read_dir("tmp").unwrap().count(), 0);
    }

    #[test]
    fn reading_makes_nothing_and_needs_a_data_folder() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let error = Store::open_to_read(root.try_clone().unwrap()).unwrap_err();
        assert!(error.to_string().contains("not a data folder"), "{error}");
        root.create_dir("models").unwrap();
        let store = Store::open_to_read(root.try_clone().unwrap()).unwrap();
        assert!(store.models().unwrap().is_empty() && store.datasets().unwrap().is_empty());
        assert_eq!(root.entries().unwrap().count(), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_the_users_error() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        root.write("models", "a file where a folder must be").unwrap();
        root.write("alive.lock", "").unwrap();
        root.create_dir("write.lock").unwrap();
        root.write("tmp", "").unwrap();
        let error = Store::open(root.try_clone().unwrap()).unwrap_err();
        assert_eq!(crate::error::exit_code(&error), 2, "{error:#}");
    }
}
