//! Opens what the user named on the command line.
//!
//! The only module besides the store's opening that holds ambient authority, which `main` hands it; it opens nothing that was not named.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use cap_std::AmbientAuthority;
use cap_std::fs::{Dir, File};

use crate::error::user;
use crate::text::{bytes, escape};

/// The right to open paths of the user's.
#[derive(Clone, Copy)]
pub struct Paths(AmbientAuthority);

impl Paths {
    /// Takes the authority that `main` holds.
    #[must_use]
    pub fn new(authority: AmbientAuthority) -> Self {
        Self(authority)
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// The user's: it is not there, is no file, or may not be read.
    pub fn open(self, path: &Path) -> anyhow::Result<File> {
        let file = File::open_ambient(path, self.0).map_err(|error| cannot("open", path, &error))?;
        match file.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(file),
            Ok(_) => Err(user(format!("{} is no file", shown(path)))),
            Err(error) => Err(cannot("read", path, &error)),
        }
    }

    /// Reads a whole file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// The user's: as [`Paths::open`], or it is longer.
    pub fn read(self, path: &Path, bytes_max: u64) -> anyhow::Result<Vec<u8>> {
        let mut content = Vec::new();
        let file = self.open(path)?;
        file.take(bytes_max + 1).read_to_end(&mut content).map_err(|error| cannot("read", path, &error))?;
        if content.len() as u64 > bytes_max {
            return Err(user(format!("{} is over the limit of {}", shown(path), bytes(bytes_max))));
        }
        Ok(content)
    }

    /// Opens a folder.
    ///
    /// # Errors
    /// The user's: it is not there, is no folder, or may not be read.
    pub fn open_dir(self, path: &Path) -> anyhow::Result<Dir> {
        Dir::open_ambient_dir(path, self.0).map_err(|error| cannot("open the folder", path, &error))
    }

    /// How many entries a folder has, counted up to 1.
    ///
    /// # Errors
    /// What the operating system says.
    pub fn entries(self, path: &Path) -> std::io::Result<usize> {
        Ok(Dir::open_ambient_dir(path, self.0)?.entries()?.take(1).count())
    }

    /// The names in a folder that begin with a text, in order; none where there is no such folder.
    pub(crate) fn subfolders(self, path: &Path, beginning: &str) -> Vec<PathBuf> {
        let Ok(entries) = Dir::open_ambient_dir(path, self.0).and_then(|dir| dir.entries()) else { return Vec::new() };
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
        let mut found: Vec<PathBuf> =
            names.filter(|name| name.to_str().is_some_and(|name| name.starts_with(beginning))).map(PathBuf::from).collect();
        found.sort();
        found
    }

    /// Whether the path names a folder.
    ///
    /// # Errors
    /// The user's: nothing is there, or it may not be read.
    pub fn is_dir(self, path: &Path) -> anyhow::Result<bool> {
        if Dir::open_ambient_dir(path, self.0).is_ok() {
            return Ok(true);
        }
        self.open(path).map(|_| false)
    }

    /// Opens a folder that is made where it is missing, parents too.
    ///
    /// # Errors
    /// The user's: it cannot be made or opened.
    pub fn create_dir_all(self, path: &Path) -> anyhow::Result<Dir> {
        Dir::create_ambient_dir_all(path, self.0).map_err(|error| cannot("create the folder", path, &error))?;
        self.open_dir(path)
    }

    /// The folder that holds `path` (made where it is missing), and the last part of its name.
    ///
    /// # Errors
    /// The user's: the path has no last part, or the folder cannot be made.
    pub fn parent(self, path: &Path) -> anyhow::Result<(Dir, PathBuf)> {
        let Some(name) = path.file_name() else {
            return Err(user(format!("{} names no folder that could be made", shown(path))));
        };
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        Ok((self.create_dir_all(parent)?, PathBuf::from(name)))
    }
}

/// A path as it is shown: escaped, in backquotes.
#[must_use]
pub fn shown(path: &Path) -> String {
    format!("`{}`", escape(&path.display().to_string()))
}

/// The user's error that an operation on a path failed.
pub(crate) fn cannot(what: &str, path: &Path, error: &std::io::Error) -> anyhow::Error {
    user(format!("cannot {what} {}: {error}", shown(path)))
}
