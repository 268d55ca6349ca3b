//! A data set's file: hashed once, and seen to be the same whenever it is read after that.
//!
//! Never opened a second time: what is cut into parts, and what jobs read, is the file that was hashed.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context as _, ensure};
use cap_std::fs::{File, FileExt as _};
use nodus_formats::data;
use nodus_protocol::Digest;

use crate::import::fault;
use crate::name::Name;
use crate::store::{Hashing, digest_of};

/// The content of a data set.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    file: Arc<File>,
    /// How the file looked before it was hashed; none where nobody has to know what it holds.
    seen: Option<Look>,
}

/// What every write to a file changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    bytes: u64,
    written: Option<SystemTime>,
}

impl Look {
    fn at(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { bytes: metadata.len(), written: metadata.modified().ok().map(cap_std::time::SystemTime::into_std) })
    }
}

impl Content {
    /// A file whose content nobody vouches for: for plans alone.
    pub(crate) fn unseen(file: File) -> Self {
        Self { file: Arc::new(file), seen: None }
    }

    /// Reads a file once, and sees that it holds what its digest says: nobody trains on anything else under that name.
    ///
    /// # Errors
    /// Ours: it is damaged, or the disk refuses.
    pub(crate) fn hashed(name: &Name, digest: Digest, file: File) -> anyhow::Result<Self> {
        Self::read(name, digest, file, |content| digest_of(content).map(|(found, _)| (found, ()))).map(|(content, ())| content)
    }

    /// The same; with it how many rows there are, counted in the same reading.
    ///
    /// # Errors
    /// As [`Content::hashed`]; the owner's: it is no data set.
    pub(crate) fn counted(name: &Name, digest: Digest, file: File) -> anyhow::Result<(Self, u64)> {
        let (content, counted) = Self::read(name, digest, file, |content| {
            let mut content = Hashing::new(content);
            let counted = data::check(BufReader::new(&mut content), "the data");
            io::copy(&mut content, &mut io::sink())?;
            Ok((content.finish().1, counted))
        })?;
        // After the digest: what is wrong with rows that are not its owner's is no fault of the owner's.
        Ok((content, counted.map_err(fault)?.rows))
    }

    fn read<T>(
        name: &Name,
        expected: Digest,
        file: File,
        read: impl FnOnce(FromStart<'_>) -> io::Result<(Digest, T)>,
    ) -> anyhow::Result<(Self, T)> {
        let reading = || format!("reading data set `{name}`");
        let seen = Look::at(&file).with_context(reading)?;
        let (found, value) = read(FromStart { file: &file, at: 0 }).with_context(reading)?;
        ensure!(found == expected, "the content of data set `{name}` is damaged: its digest is {found}, expected {expected}");
        let content = Self { file: Arc::new(file), seen: Some(seen) };
        content.unchanged().with_context(reading)?;
        Ok((content, value))
    }

    /// Sees, after something was read, that it was of the file as it was hashed.
    ///
    /// # Errors
    /// It was written to since.
    pub(crate) fn unchanged(&self) -> io::Result<()> {
        match self.seen {
            Some(seen) if Look::at(&self.file)? != seen => Err(io::Error::other("the file was changed after it was hashed")),
            _ => Ok(()),
        }
    }

    /// Reads it from a place on.
    pub(crate) fn from(&self, at: u64) -> impl Read {
        FromStart { file: &self.file, at }
    }

    /// Its length; 0 where the system does not say.
    pub(crate) fn bytes(&self) -> u64 {
        self.file.metadata().map_or(0, |metadata| metadata.len())
    }
}

/// A file read at an offset of its own: several jobs read one file at the same time.
struct FromStart<'a> {
    file: &'a File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}
