//! Base models in the data folder: one folder each, in Hugging Face form, with a manifest.
//!
//! Knows no format: whoever adds a model fills the folder and says what is in it.

use std::io;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use super::{Store, read_json, write_json};
use crate::error::{there_are, user};
use crate::name::Name;

pub(crate) const MANIFEST: &str = "nodus.json";
const FORMAT: u32 = 1;

/// What whoever filled a model's folder says about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// Digest over configuration, weights and tokenizer, as the opened model states it.
    pub digest: Digest,
    /// What it was imported from: `hugging-face` or `gguf`.
    pub source: String,
    /// The architecture by its transformers name.
    pub architecture: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Whether text can be tokenised.
    pub tokenizer: bool,
}

/// A model's `nodus.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelManifest {
    /// Version of this file's form.
    pub format: u32,
    /// What it is.
    #[serde(flatten)]
    pub summary: ModelSummary,
    /// Bytes of all its files.
    pub bytes: u64,
}

impl Store {
    /// Adds a model: `fill` writes its files into the folder it is given, checks them, and says what they are. Nothing stays behind
    /// where it fails.
    ///
    /// # Errors
    /// What `fill` says; the user's where the name is taken; ours where the disk refuses.
    pub fn add_model(&self, name: &Name, fill: impl FnOnce(&Dir) -> anyhow::Result<ModelSummary>) -> anyhow::Result<ModelManifest> {
        self.refuse_taken_model(name)?;
        let scratch = self.scratch()?;
        let summary = fill(scratch.dir())?;
        let bytes = sync_files(scratch.dir())?;
        let manifest = ModelManifest { format: FORMAT, summary, bytes };
        write_json(scratch.dir(), MANIFEST, &manifest)?;
        let _lock = self.write_lock()?;
        self.refuse_taken_model(name)?;
        scratch.publish(&format!("models/{name}"))?;
        Ok(manifest)
    }

    fn refuse_taken_model(&self, name: &Name) -> anyhow::Result<()> {
        if self.dir.exists(format!("models/{name}")) {
            return Err(user(format!(
                "there is a model named `{name}` already: choose another name, or `nodus-host model rm {name}` first"
            )));
        }
        Ok(())
    }

    /// The models' names and manifests, by name.
    ///
    /// # Errors
    /// Ours: the data folder is damaged.
    pub fn models(&self) -> anyhow::Result<Vec<(Name, ModelManifest)>> {
        let names = self.names("models", "")?;
        names.into_iter().map(|name| read_json(&self.dir, &format!("models/{name}/{MANIFEST}")).map(|manifest| (name, manifest))).collect()
    }

    /// A model's folder and manifest. Whoever opens what is in it compares the digest.
    ///
    /// # Errors
    /// The user's where there is no such model; ours where it is damaged.
    pub fn model(&self, name: &Name) -> anyhow::Result<(Dir, ModelManifest)> {
        self.refuse_unknown_model(name)?;
        let dir = self.dir.open_dir(format!("models/{name}")).with_context(|| format!("opening model `{name}`"))?;
        let manifest = read_json(&dir, MANIFEST).with_context(|| format!("opening model `{name}`"))?;
        Ok((dir, manifest))
    }

    /// Removes a model. A process that has it open keeps it until it ends.
    ///
    /// # Errors
    /// The user's where there is no such model.
    pub fn remove_model(&self, name: &Name) -> anyhow::Result<()> {
        let _lock = self.write_lock()?;
        self.refuse_unknown_model(name)?;
        // Moved away at once, removed as the scratch folder is.
        let grave = self.scratch()?;
        self.dir.rename(format!("models/{name}"), grave.dir(), name.as_str()).with_context(|| format!("removing model `{name}`"))
    }

    fn refuse_unknown_model(&self, name: &Name) -> anyhow::Result<()> {
        if self.dir.is_dir(format!("models/{name}")) {
            return Ok(());
        }
        let existing = there_are(name.as_str(), &self.names("models", "")?, "`nodus-host model import PATH --name NAME` adds one");
        Err(user(format!("no model named `{name}`{existing}")))
    }
}

/// Waits until every file of a folder is on the disk; their bytes.
fn sync_files(dir: &Dir) -> anyhow::Result<u64> {
    let sync = || -> io::Result<u64> {
        let mut bytes = 0;
        for entry in dir.entries()? {
            let file = entry?.open()?;
            file.sync_all()?;
            bytes += file.metadata()?.len();
        }
        Ok(bytes)
    };
    sync().context("writing the imported files to the disk")
}

#[cfg(test)]
mod tests {
    use cap_tempfile::TempDir;
    use nodus_protocol::Digest;

    use super::{ModelSummary, Store};
    use crate::error::{exit_code, user};
    use crate::name::Name;

    fn store() -> (TempDir, Store) {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let store = Store::open(root.try_clone().unwrap()).unwrap();
        (root, store)
    }

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn add(store: &Store, model: &str, content: &str) -> anyhow::Result<super::ModelManifest> {
        store.add_model(&name(model), |dir| {
            dir.write("config.json", content)?;
            dir.write("model.safetensors", "weights")?;
            Ok(ModelSummary {
                digest: Digest::of(content.as_bytes()),
                source: "hugging-face".into(),
                architecture: "llama".into(),
                parameters: 7,
                tokenizer: false,
            })
        })
    }

    #[test]
    fn a_model_is_kept_whole_listed_and_removed() {
        let (root, store) = store();
        let manifest = add(&store, "a", "{}").unwrap();
        assert_eq!((manifest.bytes, manifest.summary.digest), (9, Digest::of(b"{}")));
        assert_eq!(store.models().unwrap(), vec![(name("a"), manifest.clone())]);
        assert_eq!(store.model(&name("a")).unwrap().1, manifest);
        add(&store, "b", "{}").unwrap();
        store.remove_model(&name("a")).unwrap();
        assert_eq!(store.models().unwrap().len(), 1);
        assert_eq!(root.read_dir("tmp").unwrap().count(), 0);
    }

    #[test]
    fn a_failed_import_leaves_nothing_behind() {
        let (root, store) = store();
        let error = store.add_model(&name("a"), |dir| {
            dir.create_dir("deep")?;
            dir.write("deep/half", "x")?;
            Err(user("tensor missing"))
        });
        assert_eq!(error.unwrap_err().to_string(), "tensor missing");
        assert_eq!(root.read_dir("tmp").unwrap().count() + root.read_dir("models").unwrap().count(), 0);
    }

    #[test]
    fn taken_and_unknown_names_are_the_users_errors() {
        let (_root, store) = store();
        let unknown = store.model(&name("x")).unwrap_err();
        assert!(unknown.to_string().starts_with("no model named `x`; there are none yet: "), "{unknown}");
        add(&store, "a", "{}").unwrap();
        add(&store, "b", "{}").unwrap();
        let taken = add(&store, "a", "{}").unwrap_err();
        assert!(taken.to_string().contains("`a` already"), "{taken}");
        let unknown = store.remove_model(&name("x")).unwrap_err();
        assert_eq!(unknown.to_string(), "no model named `x`; there are: a, b");
        assert_eq!((exit_code(&taken), exit_code(&unknown)), (2, 2));
    }
}
