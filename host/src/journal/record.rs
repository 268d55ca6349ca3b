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

use std::collections::BTreeMap;
use std::io::{self, Read, Seek as _, SeekFrom};

use cap_std::fs::File;
use nodus_protocol::Digest;

const LENGTH_BYTES: usize = 4;
const CHECKSUM_BYTES: usize = 8;
const HEAD_BYTES: usize = 8 + 8 + 32;
/// Replies up to so many bytes are kept in memory while a job is run again; others are read when they are needed.
const SMALL_BYTES_MAX: usize = 4096;

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
    Some([&length.to_le_bytes()[..], &checksum(&body), &body].concat())
}

/// Reads a file on from a place; what was recorded, by the number of the call, and up to where the file is whole.
///
/// # Errors
/// What the operating system says.
pub(super) fn read(file: &mut impl Read, start: u64, file_bytes: u64) -> io::Result<(BTreeMap<u64, Entry>, u64)> {
    let (mut entries, mut good) = (BTreeMap::new(), start);
    let mut body = Vec::new();
    loop {
        let mut head = [0; LENGTH_BYTES + CHECKSUM_BYTES];
        if !fill(file, &mut head)? {
            return Ok((entries, good));
        }
        let (length, check) = head.split_at(LENGTH_BYTES);
        let length = length.iter().rev().fold(0, |length, byte| length << 8 | usize::from(*byte));
        let offset = good + head.len() as u64;
        body.clear();
        // A length that is damaged must not cost memory.
        if length < HEAD_BYTES || offset + length as u64 > file_bytes || file.take(length as u64).read_to_end(&mut body)? != length {
            return Ok((entries, good));
        }
        let Some((call, entry)) = entry(&body, offset).filter(|_| checksum(&body) == check) else { return Ok((entries, good)) };
        entries.insert(call, entry);
        good = offset + length as u64;
    }
}

fn entry(body: &[u8], offset: u64) -> Option<(u64, Entry)> {
    let (call, rest) = body.split_first_chunk()?;
    let (work_ms, rest) = rest.split_first_chunk()?;
    let (asked, reply) = rest.split_first_chunk()?;
    let bytes = reply.len();
    let reply =
        if bytes <= SMALL_BYTES_MAX { Reply::Here(reply.to_vec()) } else { Reply::There { offset: offset + HEAD_BYTES as u64, bytes } };
    let entry = Entry { asked: Digest::from_bytes(*asked), work_ms: u64::from_le_bytes(*work_ms), reply };
    Some((u64::from_le_bytes(*call), entry))
}

/// Fills the buffer; whether the file had as much.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn checksum(body: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let [a, b, c, d, e, f, g, h, ..] = *Digest::of(body).as_bytes();
    [a, b, c, d, e, f, g, h]
}

#[cfg(test)]
mod tests {
    use nodus_protocol::Digest;
    use proptest::prelude::*;

    use super::{frame, read};

    fn frames(count: u64) -> Vec<Vec<u8>> {
        let reply = |call: u64| vec![call as u8; if call == 2 { 5000 } else { 30 }];
        (0..count).map(|call| frame(call, 10 * call, Digest::of(&call.to_le_bytes()), &reply(call)).unwrap()).collect()
    }

    fn read_all(bytes: &[u8]) -> (Vec<u64>, u64) {
        let (entries, good) = read(&mut &*bytes, 0, bytes.len() as u64).unwrap();
        (entries.into_keys().collect(), good)
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
