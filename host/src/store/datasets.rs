//! Data sets in the data folder: a manifest under a name, the content under its digest.
//!
//! Knows no format: whoever adds a data set checks it. Two names of the same content share it.

use std::io::{self, Read};

use anyhow::Context as _;
use cap_std::fs::File;
use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use super::blob::{Hashing, copy};
use super::{Store, read_json, write_json};
use crate::error::{there_are, user};
use crate::name::Name;

const FORMAT: u32 = 1;
const CONTENT: &str = "content";
const MANIFEST: &str = "manifest";

/// A data set's `NAME.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetManifest {
    /// Version of this file's form.
    pub format: u32,
    /// Digest of the content.
    pub digest: Digest,
    /// Length of the content.
    pub bytes: u64,
    /// Number of rows.
    pub rows: u64,
    /// What the rows are, for example `prompt and completion`.
    pub form: String,
}

impl Store {
    /// Adds a data set: copies `content` into the folder, then `check` reads the copy and says how many rows of what form it has.
    /// Nothing stays behind where it fails.
    ///
    /// # Errors
    /// What `check` says; the user's where the name is taken; ours where the disk refuses.
    pub fn add_dataset(
        &self,
        name: &Name,
        mut content: impl Read,
        check: impl FnOnce(File) -> anyhow::Result<(u64, String)>,
    ) -> anyhow::Result<DatasetManifest> {
        self.refuse_taken_dataset(name)?;
        let scratch = self.scratch()?;
        let mut keep = || -> io::Result<(Digest, u64)> {
            let mut hashing = Hashing::new(scratch.dir().create(CONTENT)?);
            copy(&mut content, &mut hashing)?;
            let (file, digest, bytes) = hashing.finish();
            file.sync_all()?;
            Ok((digest, bytes))
        };
        let (digest, bytes) = keep().with_context(|| format!("copying data set `{name}` into the data folder"))?;
        let (rows, form) = check(scratch.dir().open(CONTENT).context("reading the copied data set")?)?;
        let manifest = DatasetManifest { format: FORMAT, digest, bytes, rows, form };
        write_json(scratch.dir(), MANIFEST, &manifest)?;

        let _lock = self.write_lock()?;
        self.refuse_taken_dataset(name)?;
        scratch.publish_file(CONTENT, &blob(digest))?;
        scratch.publish_file(MANIFEST, &manifest_path(name))?;
        Ok(manifest)
    }

    fn refuse_taken_dataset(&self, name: &Name) -> anyhow::Result<()> {
        if self.dir.exists(manifest_path(name)) {
            return Err(user(format!(
                "there is a data set named `{name}` already: choose another name, or `nodus-host data rm {name}` first"
            )));
        }
        Ok(())
    }

    /// The data sets' names and manifests, by name.
    ///
    /// # Errors
    /// Ours: the data folder is damaged.
    pub fn datasets(&self) -> anyhow::Result<Vec<(Name, DatasetManifest)>> {
        let names = self.names("data", ".json")?;
        names.into_iter().map(|name| read_json(&self.dir, &manifest_path(&name)).map(|manifest| (name, manifest))).collect()
    }

    /// A data set's content and manifest.
    ///
    /// # Errors
    /// The user's where there is no such data set; ours where it is damaged.
    pub fn dataset(&self, name: &Name) -> anyhow::Result<(File, DatasetManifest)> {
        self.refuse_unknown_dataset(name)?;
        let manifest: DatasetManifest = read_json(&self.dir, &manifest_path(name))?;
        let file = self.dir.open(blob(manifest.digest)).with_context(|| format!("opening the content of data set `{name}`"))?;
        Ok((file, manifest))
    }

    /// Removes a data set, and its content where no other name has the same.
    ///
    /// # Errors
    /// The user's where there is no such data set.
    pub fn remove_dataset(&self, name: &Name) -> anyhow::Result<()> {
        let _lock = self.write_lock()?;
        self.refuse_unknown_dataset(name)?;
        let manifest: DatasetManifest = read_json(&self.dir, &manifest_path(name))?;
        self.dir.remove_file(manifest_path(name)).with_context(|| format!("removing data set `{name}`"))?;
        let shared = self.datasets()?.iter().any(|(_, other)| other.digest == manifest.digest);
        if !shared {
            self.dir.remove_file(blob(manifest.digest)).with_context(|| format!("removing the content of data set `{name}`"))?;
        }
        Ok(())
    }

    fn refuse_unknown_dataset(&self, name: &Name) -> anyhow::Result<()> {
        if self.dir.is_file(manifest_path(name)) {
            return Ok(());
        }
        let existing = there_are(name.as_str(), &self.names("data", ".json")?, "`nodus-host data put FILE --name NAME` adds one");
        Err(user(format!("no data set named `{name}`{existing}")))
    }
}

fn manifest_path(name: &Name) -> String {
    format!("data/{name}.json")
}

pub(super) fn blob(digest: Digest) -> String {
    format!("blobs/{}", digest.hex())
}

#[cfg(test)]
mod tests {
    use std::io::{self, Read};

    use cap_tempfile::TempDir;
    use nodus_protocol::Digest;

    use super::Store;
    use crate::error::user;
    use crate::name::Name;

    fn store() -> (TempDir, Store) {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let store = Store::open(root.try_clone().unwrap()).unwrap();
        (root, store)
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn files(root: &TempDir) -> usize {
        ["tmp", "data", "blobs"].iter().map(|folder| root.read_dir(folder).unwrap().count()).sum()
    }

    #[test]
    fn content_is_kept_once_and_goes_with_its_last_name() {
        let (root, store) = store();
        for text in ["a", "b"] {
            let manifest = store.add_dataset(&name(text), &b"rows"[..], |_| Ok((1, "text".into()))).unwrap();
            assert_eq!((manifest.digest, manifest.bytes), (Digest::of(b"rows"), 4));
        }
        assert_eq!(root.read_dir("blobs").unwrap().count(), 1);
        store.remove_dataset(&name("a")).unwrap();
        let mut content = String::new();
        store.dataset(&name("b")).unwrap().0.read_to_string(&mut content).unwrap();
        assert_eq!(content, "rows");
        store.remove_dataset(&name("b")).unwrap();
        assert_eq!(files(&root), 0);
        assert!(store.dataset(&name("b")).unwrap_err().to_string().starts_with("no data set named `b`; there are none yet: "));
    }

    #[test]
    fn refused_or_unreadable_content_leaves_nothing_behind() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
        }
        let (root, store) = store();
        let refused = store.add_dataset(&name("a"), &b"bad"[..], |_| Err(user("line 1 is no JSON"))).unwrap_err();
        let broken = store.add_dataset(&name("a"), b"half".chain(Broken), |_| Ok((1, "text".into()))).unwrap_err();
        assert_eq!((crate::error::exit_code(&refused), crate::error::exit_code(&broken)), (2, 1));
        assert_eq!(files(&root), 0);
    }
}
