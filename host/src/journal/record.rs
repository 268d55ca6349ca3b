//! The file of replies: frames, one a reply, each with a checksum.
//!
//! Never trusts what it reads: the first frame that is not whole, and all that follows it, is as if it had not been written.
//!
//! ```text
//! length    u32, little-endian: bytes of all that follows the checksum
//! checksum  the first 8 bytes of its SHA-256
//! call      u64: the so-manieth of the job, from 0
//! work_ms   u64: how long the job had been at work when it was answered, repetitions not counted
//! asked     32 bytes: the call's fingerprint
//! reply     as postcard writes it
//! ```

use std::io::{self, Read, Seek as _, SeekFrom};

use cap_std::fs::File;
use nodus_protocol::Digest;
use sha2::{Digest as _, Sha256};

const LENGTH_BYTES: usize = 4;
const CHECKSUM_BYTES: usize = 8;
const HEAD_BYTES: usize = 8 + 8 + 32;
/// Replies up to so many bytes are read with their frames; others when they are needed.
const SMALL_BYTES_MAX: usize = 256;
/// Bytes of a frame that are read at once.
const PIECE_BYTES: usize = 64 << 10;

/// A reply that was recorded.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) asked: Digest,
    pub(super) work_ms: u64,
    reply: Reply,
}

#[derive(Debug)]
enum Reply {
    Here(Vec<u8>),
    There { offset: u64, bytes: usize },
}

impl Entry {
    /// The reply's bytes, where they need not be read.
    pub(super) fn at_hand(&self) -> Option<Vec<u8>> {
        match &self.reply {
            Reply::Here(bytes) => Some(bytes.clone()),
            Reply::There { .. } => None,
        }
    }

    /// Whether the reply's bytes need not be read.
    pub(super) fn is_at_hand(&self) -> bool {
        matches!(self.reply, Reply::Here(_))
    }

    /// The reply's bytes. Blocks, where they are read.
    pub(super) fn reply(self, file: &mut File) -> io::Result<Vec<u8>> {
        match self.reply {
            Reply::Here(bytes) => Ok(bytes),
            Reply::There { offset, bytes } => {
                let mut reply = vec![0; bytes];
                file.seek(SeekFrom::Start(offset))?;
                file.read_exact(&mut reply)?;
                Ok(reply)
            }
        }
    }
}

/// A frame; none where the reply is longer than a frame can be.
pub(super) fn frame(call: u64, work_ms: u64, asked: Digest, reply: &[u8]) -> Option<Vec<u8>> {
    let length = u32::try_from(HEAD_BYTES + reply.len()).ok()?;
    let body = [&call.to_le_bytes()[..], &work_ms.to_le_bytes(), asked.as_bytes(), reply].concat();
    let checksum = checksum(Sha256::digest(&body).into());
    Some([&length.to_le_bytes()[..], &checksum, &body].concat())
}

/// A file of frames, read one after the other from a place where one begins.
pub(super) struct Frames<R> {
    file: R,
    /// Up to where the file is whole, as far as it was read.
    pub(super) good: u64,
    file_bytes: u64,
    buffer: Vec<u8>,
}

impl<R: Read> Frames<R> {
    /// `start` is where in the file the reader stands, `file_bytes` where it ends at the latest.
    pub(super) fn new(file: R, start: u64, file_bytes: u64) -> Self {
        Self { file, good: start, file_bytes, buffer: vec![0; PIECE_BYTES] }
    }

    /// What was recorded next, and of which call. None where no whole frame follows; then nothing more is read.
    ///
    /// # Errors
    /// What the operating system says.
    pub(super) fn next(&mut self) -> io::Result<Option<(u64, Entry)>> {
        let mut start = [0; LENGTH_BYTES + CHECKSUM_BYTES + HEAD_BYTES];
        let (offset, end) = (self.good + start.len() as u64, std::mem::take(&mut self.file_bytes));
        if offset > end || !fill(&mut self.file, &mut start)? {
            return Ok(None);
        }
        let (length, rest) = start.split_at(LENGTH_BYTES);
        let (check, head) = rest.split_at(CHECKSUM_BYTES);
        let length = length.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte));
        // A length that is damaged must not cost memory.
        let Some(bytes) = length.checked_sub(HEAD_BYTES).filter(|bytes| offset + *bytes as u64 <= end) else { return Ok(None) };
        let mut hash = Sha256::new_with_prefix(head);
        let Some(small) = self.body(bytes, &mut hash)? else { return Ok(None) };
        if checksum(hash.finalize().into()) != check {
            return Ok(None);
        }
        let Some((call, work_ms, asked)) = parse(head) else { return Ok(None) };
        let reply = if bytes <= SMALL_BYTES_MAX { Reply::Here(small) } else { Reply::There { offset, bytes } };
        (self.good, self.file_bytes) = (offset + bytes as u64, end);
        Ok(Some((call, Entry { asked, work_ms, reply })))
    }

    /// Reads a reply past, and gives it where it is small; none where the file ends before.
    fn body(&mut self, bytes: usize, hash: &mut Sha256) -> io::Result<Option<Vec<u8>>> {
        let (mut left, mut small) = (bytes, Vec::new());
        while left > 0 {
            let piece = self.buffer.get_mut(..left.min(PIECE_BYTES)).unwrap_or_default();
            if !fill(&mut self.file, piece)? {
                return Ok(None);
            }
            hash.update(&*piece);
            if bytes <= SMALL_BYTES_MAX {
                small.extend_from_slice(piece);
            }
            left -= piece.len();
        }
        Ok(Some(small))
    }
}

fn parse(head: &[u8]) -> Option<(u64, u64, Digest)> {
    let (call, rest) = head.split_first_chunk()?;
    let (work_ms, rest) = rest.split_first_chunk()?;
    Some((u64::from_le_bytes(*call), u64::from_le_bytes(*work_ms), Digest::from_bytes(*rest.first_chunk()?)))
}

/// Fills the buffer; whether the file had as much.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn checksum(digest: [u8; 32]) -> [u8; CHECKSUM_BYTES] {
    let [a, b, c, d, e, f, g, h, ..] = digest;
    [a, b, c, d, e, f, g, h]
}

#[cfg(test)]
mod tests {
    use nodus_protocol::Digest;
    use proptest::prelude::*;

    use super::{Frames, frame};

    fn frames(count: u64) -> Vec<Vec<u8>> {
        let reply = |call: u64| vec![call as u8; if call == 2 { 5000 } else { 30 }];
        (0..count).map(|call| frame(call, 10 * call, Digest::of(&call.to_le_bytes()), &reply(call)).unwrap()).collect()
    }

    fn read_all(bytes: &[u8]) -> (Vec<u64>, u64) {
        let mut frames = Frames::new(bytes, 0, bytes.len() as u64);
        let calls = std::iter::from_fn(|| frames.next().unwrap()).map(|(call, _)| call).collect();
        (calls, frames.good)
    }

    proptest! {
        /// Whatever is torn off or flipped, what was whole before it is read and nothing else.
        #[test]
        fn a_torn_or_damaged_end_is_cut_at_the_last_whole_frame(place in 0_usize..6000, bit in 0_u8..8) {
            let frames = frames(5);
            let whole = frames.concat();
            let place = place % whole.len();
            let mut ends = vec![0];
            for frame in &frames { ends.push(ends.last().unwrap() + frame.len()); }
            let good = ends.iter().rposition(|end| *end <= place).unwrap();
            let expected = ((0..good as u64).collect::<Vec<_>>(), ends[good] as u64);
            prop_assert_eq!(read_all(&whole[..place]), expected.clone());
            let mut flipped = whole;
            flipped[place] ^= 1 << bit;
            prop_assert_eq!(read_all(&flipped), expected);
        }
    }
}
