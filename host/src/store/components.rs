//! Components that receipts name, in the data folder, so that a run can be repeated; and folders to repeat it in. Those of a service's jobs are its
//! state's, once, and go with their jobs.
//!
//! Knows no format: a component is bytes under their digest.

use std::io;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::Digest;
use nodus_state::blob_path;

use super::datasets::blob;
use super::scratch::Scratch;
use super::{SERVICE, Store, write_synced};

const CONTENT: &str = "content";

/// A folder of its own in the data folder's `tmp/`. Dropping it removes it.
#[derive(Debug)]
pub struct Workspace(Scratch);

impl Workspace {
    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Dir {
        self.0.dir()
    }
}

impl Store {
    /// Keeps a component; twice the same is kept once, and what is damaged is put right.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub fn keep_component(&self, digest: Digest, bytes: &[u8]) -> anyhow::Result<()> {
        if matches!(self.component_at(&blob(digest), digest), Ok(Some(_))) {
            return Ok(());
        }
        let scratch = self.scratch()?;
        write_synced(scratch.dir(), CONTENT, bytes)?;
        let _lock = self.write_lock()?;
        scratch.publish_file(CONTENT, &blob(digest))
    }

    /// A component's bytes, if they are there: kept by the command line, or by a service of this folder as long as it has a job of it.
    ///
    /// # Errors
    /// Ours: the data folder is damaged.
    pub fn component(&self, digest: Digest) -> anyhow::Result<Option<Vec<u8>>> {
        let own = self.component_at(&blob(digest), digest)?;
        if own.is_some() { Ok(own) } else { self.component_at(&format!("{SERVICE}/{}", blob_path(digest)), digest) }
    }

    fn component_at(&self, path: &str, digest: Digest) -> anyhow::Result<Option<Vec<u8>>> {
        let bytes = match self.dir.read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).context("reading a component of the data folder"),
        };
        let found = Digest::of(&bytes);
        anyhow::ensure!(found == digest, "component {digest} of the data folder is damaged: its digest is {found}");
        Ok(Some(bytes))
    }

    /// An empty folder to work in.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub fn workspace(&self) -> anyhow::Result<Workspace> {
        self.scratch().map(Workspace)
    }
}

#[cfg(test)]
mod tests {
    use nodus_protocol::Digest;

    use super::Store;

    #[test]
    fn a_component_is_kept_once_and_a_damaged_one_is_ours() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let store = Store::open(root.try_clone().unwrap()).unwrap();
        let digest = Digest::of(b"component");
        assert!(store.component(digest).unwrap().is_none());
        for _ in 0..2 {
            store.keep_component(digest, b"component").unwrap();
        }
        assert_eq!(store.component(digest).unwrap().unwrap(), b"component");
        let of_service = Digest::of(b"of a service");
        root.create_dir_all(format!("service/blobs/{}", &of_service.hex()[..2])).unwrap();
        root.write(format!("service/{}", nodus_state::blob_path(of_service)), "of a service").unwrap();
        assert_eq!(store.component(of_service).unwrap().unwrap(), b"of a service");
        root.write(format!("blobs/{}", digest.hex()), "altered").unwrap();
        let error = store.component(digest).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        assert_eq!(crate::error::exit_code(&error), 1);
    }

    #[test]
    fn a_workspace_goes_when_it_is_dropped() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let store = Store::open(root.try_clone().unwrap()).unwrap();
        let workspace = store.workspace().unwrap();
        workspace.dir().write("file", "x").unwrap();
        assert_eq!(root.read_dir("tmp").unwrap().count(), 1);
        drop(workspace);
        assert_eq!(root.read_dir("tmp").unwrap().count(), 0);
    }
}
