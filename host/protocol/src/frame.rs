//! Values on a byte stream: a length, a version, and the value as postcard writes it.
//!
//! Never trusts a length: memory grows with the bytes that arrive, not with those that are promised.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Of every frame. Both ends are one program, so another version is a mix of two installations.
pub const VERSION: u8 = 1;
/// A length (32 bits, little-endian) and a version.
const HEADER_BYTES: usize = 5;
/// What a buffer may keep between two frames.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// Why a stream of frames ended.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The other end is gone, or the system failed.
    #[error("the stream failed")]
    Io(#[from] io::Error),
    /// The other end speaks another version.
    #[error("a frame of version {0}, expected {VERSION}")]
    Version(u8),
    /// Longer than this end takes.
    #[error("a frame of {bytes} bytes, expected at most {allowed}")]
    TooLong {
        /// What was announced.
        bytes: u64,
        /// The limit.
        allowed: u64,
    },
    /// The bytes are no such value, or more than one.
    #[error("a malformed frame")]
    Malformed,
}

/// Reads frames of at most so many bytes.
pub struct FrameReader<R> {
    stream: R,
    buffer: Vec<u8>,
    bytes_max: u64,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    /// A reader of a stream from its start.
    pub fn new(stream: R, bytes_max: u64) -> Self {
        Self { stream, buffer: Vec::new(), bytes_max }
    }

    /// The next value; none where the stream ended between two frames. Not to be cancelled: a part of a frame would be lost.
    ///
    /// # Errors
    /// See [`FrameError`]; after one the stream is of no use.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let mut header = [0; HEADER_BYTES];
        if self.stream.read(header.get_mut(..1).unwrap_or_default()).await? == 0 {
            return Ok(None);
        }
        self.stream.read_exact(header.get_mut(1..).unwrap_or_default()).await?;
        let [a, b, c, d, version] = header;
        let bytes = u64::from(u32::from_le_bytes([a, b, c, d]));
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        if bytes > self.bytes_max {
            return Err(FrameError::TooLong { bytes, allowed: self.bytes_max });
        }
        self.buffer.clear();
        (&mut self.stream).take(bytes).read_to_end(&mut self.buffer).await?;
        if self.buffer.len() as u64 != bytes {
            return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        let value = decode(&self.buffer);
        self.buffer.shrink_to(KEPT_BYTES_MAX);
        value.map(Some)
    }
}

/// Writes frames.
pub struct FrameWriter<W> {
    stream: W,
    buffer: Vec<u8>,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// A writer to a stream from its start.
    pub fn new(stream: W) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// Writes a value.
    ///
    /// # Errors
    /// `TooLong` beyond 4 GiB; what the stream says.
    pub async fn send<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), FrameError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.extend_from_slice(&[0; HEADER_BYTES]);
        let mut buffer = postcard::to_extend(value, buffer).map_err(|_| FrameError::Malformed)?;
        let bytes = (buffer.len() - HEADER_BYTES) as u64;
        let length = u32::try_from(bytes).map_err(|_| FrameError::TooLong { bytes, allowed: u64::from(u32::MAX) })?;
        let [a, b, c, d] = length.to_le_bytes();
        for (to, from) in buffer.iter_mut().zip([a, b, c, d, VERSION]) {
            *to = from;
        }
        self.stream.write_all(&buffer).await?;
        buffer.clear();
        buffer.shrink_to(KEPT_BYTES_MAX);
        self.buffer = buffer;
        Ok(())
    }
}

/// A value from all of these bytes.
///
/// # Errors
/// `Malformed`.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        _ => Err(FrameError::Malformed),
    }
}

/// A value's bytes.
///
/// # Errors
/// `Malformed` where the value cannot be written, which no type of this project is.
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, FrameError> {
    postcard::to_stdvec(value).map_err(|_| FrameError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(bytes: &[u8], bytes_max: u64) -> Result<Option<(u32, String)>, FrameError> {
        FrameReader::new(bytes, bytes_max).next().await
    }

    async fn written(value: &(u32, String)) -> Vec<u8> {
        let mut bytes = Vec::new();
        FrameWriter::new(&mut bytes).send(value).await.unwrap();
        bytes
    }

    #[tokio::test]
    async fn frames_round_trip_and_a_stream_ends_between_two() {
        let value = (7, "seven".to_owned());
        let bytes = written(&value).await;
        let twice = [bytes.clone(), bytes].concat();
        let mut reader = FrameReader::new(twice.as_slice(), 100);
        for _ in 0..2 {
            assert_eq!(reader.next::<(u32, String)>().await.unwrap(), Some(value.clone()));
        }
        assert!(reader.next::<(u32, String)>().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn what_is_no_frame_is_refused() {
        let bytes = written(&(7, "seven".to_owned())).await;
        assert!(matches!(read(&bytes, 3).await, Err(FrameError::TooLong { bytes: 7, allowed: 3 })));
        for length in 1..bytes.len() {
            assert!(matches!(read(&bytes[..length], 100).await, Err(FrameError::Io(_))), "{length}");
        }
        let with = |place: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[place] = byte;
            bytes
        };
        assert!(matches!(read(&with(4, 2), 100).await, Err(FrameError::Version(2))));
        // A string longer than its frame, one that is shorter, and one that is no UTF-8.
        for (place, byte) in [(6, 6), (6, 4), (7, 0xff)] {
            assert!(matches!(read(&with(place, byte), 100).await, Err(FrameError::Malformed)), "{place}");
        }
        // A promise of 4 GiB costs nothing.
        let promise = [0xff, 0xff, 0xff, 0xff, VERSION];
        assert!(matches!(read(&promise, u64::MAX).await, Err(FrameError::Io(_))));
    }
}
