//! Reading and writing inside a folder that was handed over.
//!
//! Never reads more than the caller allows, and never follows a name out of the folder (cap-std sees to that).

use std::io::{ErrorKind, Read};

use cap_std::fs::Dir;
use nodus_kernels::Mapped;

use crate::error::{FormatError, Place};

/// Most bytes of a configuration file.
pub const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// Most bytes of a tokenizer or of a shard index.
pub const TOKENIZER_BYTES_MAX: u64 = 256 << 20;

/// The bytes of a file, or none where there is no such file.
pub(crate) fn read_optional(dir: &Dir, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, FormatError> {
    let Some(file) = open_optional(dir, name)? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(|source| FormatError::Read { file: name.into(), source })?;
    if bytes.len() as u64 > bytes_max {
        return Err(FormatError::invalid(name, Place::File, format!("more than {bytes_max} bytes"), "a smaller file"));
    }
    Ok(Some(bytes))
}

/// The bytes of a file that must be there.
pub(crate) fn read(dir: &Dir, name: &str, bytes_max: u64, expected: &str) -> Result<Vec<u8>, FormatError> {
    read_optional(dir, name, bytes_max)?.ok_or_else(|| FormatError::Missing { file: name.into(), expected: expected.into() })
}

/// Maps a file, or none where there is no such file.
pub(crate) fn map_optional(dir: &Dir, name: &str) -> Result<Option<Mapped>, FormatError> {
    let Some(file) = open_optional(dir, name)? else { return Ok(None) };
    map(&file.into_std(), name).map(Some)
}

/// Maps an open file.
pub(crate) fn map(file: &std::fs::File, name: &str) -> Result<Mapped, FormatError> {
    let unreadable = |source| FormatError::Read { file: name.into(), source };
    if file.metadata().map_err(unreadable)?.len() == 0 {
        return Err(FormatError::invalid(name, Place::File, "an empty file", "tensors"));
    }
    Mapped::new(file).map_err(|e| unreadable(std::io::Error::other(e)))
}

/// Writes a whole file.
pub(crate) fn write(dir: &Dir, name: &str, bytes: &[u8]) -> Result<(), FormatError> {
    dir.write(name, bytes).map_err(|source| FormatError::Write { file: name.into(), source })
}

fn open_optional(dir: &Dir, name: &str) -> Result<Option<cap_std::fs::File>, FormatError> {
    let unreadable = |source| FormatError::Read { file: name.into(), source };
    // Looked at before it is opened: opening a pipe would wait for a writer.
    match dir.metadata(name) {
        Ok(about) if about.is_file() => dir.open(name).map(Some).map_err(unreadable),
        Ok(_) => Err(FormatError::invalid(name, Place::File, "no regular file", "a regular file")),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(unreadable(e)),
    }
}
