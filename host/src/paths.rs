//! Opens what the user named on the command line.
//!
//! The only module besides the store's opening that holds ambient authority, which `main` hands it; it opens nothing that was not named.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use cap_std::AmbientAuthority;
use cap_std::fs::{Dir, File, OpenOptions, OpenOptionsExt as _};

use crate::error::user;
use crate::text::{bytes, escape};

/// Open at once, whatever it is (`O_NONBLOCK`); no effect on regular files.
const NONBLOCK: i32 = if cfg!(target_os = "linux") { 0o4000 } else { 4 };

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
        // Opening a pipe would wait for its other end.
        let options = OpenOptions::new().read(true).custom_flags(NONBLOCK).clone();
        let file = File::open_ambient_with(path, &options, self.0).map_err(|error| cannot("open", path, &error))?;
        match file.metadata() {
            Ok(metadata) if metadata.is_file() => Ok(file),
            Ok(metadata) if metadata.is_dir() => Err(user(format!("{} is a folder, expected a file", shown(path)))),
            Ok(_) => Err(user(format!("{} is a pipe or a device, expected a regular file", shown(path)))),
            Err(error) => Err(cannot("read", path, &error)),
        }
    }

    /// Reads a whole file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// The user's: as [`Paths::open`], or it is longer.
    pub fn read(self, path: &Path, bytes_max: u64) -> anyhow::Result<Vec<u8>> {
        let mut content = Vec::new();
        let file = self.open_within(path, bytes_max)?;
        file.take(bytes_max + 1).read_to_end(&mut content).map_err(|error| cannot("read", path, &error))?;
        if content.len() as u64 > bytes_max {
            return Err(too_long(path, content.len() as u64, bytes_max));
        }
        Ok(content)
    }

    /// Opens a file that has at most so many bytes now.
    ///
    /// # Errors
    /// The user's: as [`Paths::open`], or it is longer.
    pub fn open_within(self, path: &Path, bytes_max: u64) -> anyhow::Result<File> {
        let file = self.open(path)?;
        match file.metadata().map_err(|error| cannot("read", path, &error))?.len() {
            length if length > bytes_max => Err(too_long(path, length, bytes_max)),
            _ => Ok(file),
        }
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

    /// The folders above `path` that are not there, from the top down.
    #[must_use]
    pub fn missing_above(self, path: &Path) -> Vec<PathBuf> {
        let is_missing = |folder: &&Path| {
            *folder != Path::new("")
                && Dir::open_ambient_dir(folder, self.0).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
        };
        let mut missing: Vec<PathBuf> = path.ancestors().skip(1).take_while(is_missing).map(Path::to_owned).collect();
        missing.reverse();
        missing
    }

    /// Removes folders that were made, given from the top down, as far as nothing is in them.
    pub fn remove_empty(self, folders: &[PathBuf]) {
        for folder in folders.iter().rev() {
            let above = folder.parent().filter(|above| *above != Path::new("")).unwrap_or(Path::new("."));
            let removed =
                Dir::open_ambient_dir(above, self.0).and_then(|above| folder.file_name().map_or(Ok(()), |name| above.remove_dir(name)));
            if removed.is_err() {
                return;
            }
        }
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

fn too_long(path: &Path, length: u64, bytes_max: u64) -> anyhow::Error {
    user(format!("{} has {}, expected at most {}", shown(path), bytes(length), bytes(bytes_max)))
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::Paths;
    use crate::error::exit_code;

    #[test]
    fn pipes_devices_folders_and_long_files_are_refused_at_once() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::new(cap_std::ambient_authority());
        let pipe = root.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let device = std::path::Path::new("/dev/zero");
        for path in [pipe.as_path(), device] {
            let error = paths.read(path, 1 << 20).unwrap_err();
            assert!(error.to_string().contains("a pipe or a device, expected a regular file") && exit_code(&error) == 2, "{error}");
        }
        assert!(paths.open(root.path()).unwrap_err().to_string().contains("is a folder, expected a file"));
        let long = root.path().join("long");
        let dir = paths.open_dir(root.path()).unwrap();
        dir.create("long").unwrap().set_len(3 << 30).unwrap();
        let error = paths.open_within(&long, 256 << 20).unwrap_err();
        assert!(error.to_string().ends_with("has 3.2 GB, expected at most 268.4 MB"), "{error}");
    }
}
