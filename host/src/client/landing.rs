//! A folder that is filled from afar: whole in the end, or marked as not.
//!
//! Never touches what was there before it, but what another one that was cut off left.

use std::path::Path;

use anyhow::Context as _;
use cap_std::fs::Dir;

use crate::error::user;
use crate::paths::{Paths, shown};

/// Where everything is until it is whole.
const INCOMPLETE: &str = ".incomplete";

/// A folder that is being filled. Dropped before it is whole, what came is gone.
pub(super) struct Landing {
    whole: Dir,
    dir: Dir,
    is_whole: bool,
}

impl Landing {
    /// In this folder, which is made where it is missing.
    ///
    /// # Errors
    /// The user's: something is in it.
    pub(super) fn open(paths: Paths, path: &Path) -> anyhow::Result<Self> {
        let whole = paths.create_dir_all(path)?;
        let names = whole.entries().and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<Vec<_>>>());
        let names = names.with_context(|| format!("listing {}", shown(path)))?;
        if names.iter().any(|name| name != INCOMPLETE) {
            return Err(user(format!("{} exists and is not empty: choose another --out", shown(path))));
        }
        let open = || {
            if !names.is_empty() {
                whole.remove_dir_all(INCOMPLETE)?;
            }
            whole.create_dir(INCOMPLETE).and_then(|()| whole.open_dir(INCOMPLETE))
        };
        let dir = open().with_context(|| format!("making a folder in {}", shown(path)))?;
        Ok(Self { whole, dir, is_whole: false })
    }

    /// Where things are put.
    pub(super) fn dir(&self) -> &Dir {
        &self.dir
    }

    /// All of it came: it goes to its place.
    ///
    /// # Errors
    /// Ours: the disk.
    pub(super) fn settle(mut self) -> anyhow::Result<()> {
        let settle = || {
            for entry in self.dir.entries()? {
                let name = entry?.file_name();
                self.dir.rename(&name, &self.whole, &name)?;
            }
            self.whole.remove_dir(INCOMPLETE)
        };
        settle().context("moving what was fetched to its place")?;
        self.is_whole = true;
        Ok(())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if !self.is_whole {
            // What is left says by its name what it is.
            drop(self.whole.remove_dir_all(INCOMPLETE));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{INCOMPLETE, Landing};
    use crate::paths::Paths;

    #[test]
    fn a_folder_is_whole_or_empty_and_what_was_cut_off_is_done_again() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::new(cap_std::ambient_authority());
        let out = root.path().join("out");
        let open = || Landing::open(paths, &out);
        let landing = open().unwrap();
        landing.dir().write("half", "x").unwrap();
        drop(landing);
        assert_eq!(paths.entries(&out).unwrap(), 0, "nothing of it stays");
        // Killed, it could not clean up.
        let landing = open().unwrap();
        landing.dir().write("half", "x").unwrap();
        std::mem::forget(landing);
        let landing = open().unwrap();
        landing.dir().create_dir("adapter").unwrap();
        landing.dir().write("adapter/weights", "x").unwrap();
        landing.settle().unwrap();
        let dir = paths.open_dir(&out).unwrap();
        assert!(dir.is_file("adapter/weights") && !dir.exists("half") && !dir.exists(INCOMPLETE));
        let refused = open().err().unwrap().to_string();
        assert!(refused.contains("is not empty"), "{refused}");
        assert!(dir.is_file("adapter/weights"));
    }
}
