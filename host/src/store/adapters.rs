//! Adapters that users brought, in the data folder: PEFT folders, under their digests.
//!
//! Knows no format: whoever adds one fills the folder and computes the digest.

use std::io;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::Digest;

use super::Store;

impl Store {
    /// Keeps an adapter under its digest; `fill` writes its files and gives the digest. The same adapter twice is kept once.
    ///
    /// # Errors
    /// What `fill` says; ours where the disk refuses.
    pub fn add_adapter(&self, fill: impl FnOnce(&Dir) -> anyhow::Result<Digest>) -> anyhow::Result<Digest> {
        let scratch = self.scratch()?;
        let digest = fill(scratch.dir())?;
        let sync = || -> io::Result<()> { scratch.dir().entries()?.try_for_each(|entry| entry?.open()?.sync_all()) };
        sync().context("writing the adapter into the data folder")?;
        let _lock = self.write_lock()?;
        if !self.dir.is_dir(path(digest)) {
            scratch.publish(&path(digest))?;
        }
        Ok(digest)
    }

    /// An adapter's PEFT folder, if it is there.
    ///
    /// # Errors
    /// Ours: the data folder is damaged.
    pub fn adapter(&self, digest: Digest) -> anyhow::Result<Option<Dir>> {
        match self.dir.open_dir(path(digest)) {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("opening adapter {digest} of the data folder")),
        }
    }
}

fn path(digest: Digest) -> String {
    format!("adapters/{}", digest.hex())
}

#[cfg(test)]
mod tests {
    use nodus_protocol::Digest;

    use super::Store;

    #[test]
    fn the_same_adapter_twice_is_kept_once() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let store = Store::open(root.try_clone().unwrap()).unwrap();
        let digest = Digest::of(b"adapter");
        assert!(store.adapter(digest).unwrap().is_none());
        for _ in 0..2 {
            let kept = store.add_adapter(|dir| {
                dir.write("adapter_config.json", "{}")?;
                Ok(digest)
            });
            assert_eq!(kept.unwrap(), digest);
        }
        assert_eq!(store.adapter(digest).unwrap().unwrap().read_to_string("adapter_config.json").unwrap(), "{}");
        assert_eq!((root.read_dir("adapters").unwrap().count(), root.read_dir("tmp").unwrap().count()), (1, 0));
    }
}
