//! Content with its SHA-256, computed while it passes by.
//!
//! Never keeps a whole file in memory.

use std::io::{self, Read, Write};

use nodus_protocol::Digest;
use sha2::{Digest as _, Sha256};

/// Passes bytes on to a writer, or from a reader, and hashes and counts them.
#[derive(Debug)]
pub struct Hashing<T> {
    inner: T,
    hash: Sha256,
    bytes: u64,
}

impl<T> Hashing<T> {
    /// Hashes what goes to `inner`, or comes from it.
    pub fn new(inner: T) -> Self {
        Self { inner, hash: Sha256::new(), bytes: 0 }
    }

    /// The writer or reader, the digest of all that passed by, and how many bytes that was.
    pub fn finish(self) -> (T, Digest, u64) {
        (self.inner, Digest::from_bytes(self.hash.finalize().into()), self.bytes)
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buffer)?;
        self.hash.update(buffer.get(..written).unwrap_or(buffer));
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.hash.update(buffer.get(..read).unwrap_or_default());
        self.bytes += read as u64;
        Ok(read)
    }
}

/// Digest and length of all that a reader gives.
///
/// # Errors
/// The reader's.
pub fn digest_of(mut reader: impl Read) -> io::Result<(Digest, u64)> {
    let mut hashing = Hashing::new(io::sink());
    copy(&mut reader, &mut hashing)?;
    let (_, digest, bytes) = hashing.finish();
    Ok((digest, bytes))
}

/// `io::copy` with a buffer fit for large files.
pub(crate) fn copy(reader: &mut impl Read, writer: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) => writer.write_all(buffer.get(..n).unwrap_or_default())?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use nodus_protocol::Digest;

    use super::digest_of;

    #[test]
    fn the_digest_is_that_of_the_whole() {
        let content = vec![7_u8; (3 << 20) + 5];
        assert_eq!(digest_of(content.as_slice()).unwrap(), (Digest::of(&content), content.len() as u64));
    }
}
