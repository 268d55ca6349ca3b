//! Hands an open folder to another process, over a socket.
//!
//! A folder that is handed over is a right; a path would be a wish.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use cap_std::fs::Dir;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// What comes with the folder, since nothing goes over a stream without a byte.
const MARK: [u8; 1] = [0x64];

/// Sends a folder, as the first thing on a stream.
///
/// # Errors
/// What the operating system says.
pub(crate) fn give(stream: &UnixStream, dir: &Dir) -> io::Result<()> {
    let descriptors = [dir.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    if !message.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("a descriptor has no room in a message"));
    }
    match sendmsg(stream, &[IoSlice::new(&MARK)], &mut message, SendFlags::NOSIGNAL)? {
        1 => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives a folder, before anything else is read from the stream. Blocks.
///
/// # Errors
/// None came, or what the operating system says.
pub(crate) fn take(stream: &UnixStream) -> io::Result<Dir> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut mark = [0];
    recvmsg(stream, &mut [IoSliceMut::new(&mut mark)], &mut message, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = message.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptor = descriptors.next().and_then(|mut descriptors| descriptors.next());
    let descriptor = descriptor.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no folder came with the first byte"))?;
    Ok(Dir::from_std_file(File::from(descriptor)))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::{give, take};

    #[test]
    fn a_folder_arrives_open_and_the_stream_goes_on() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        root.write("file", "in it").unwrap();
        let (mut here, mut there) = UnixStream::pair().unwrap();
        give(&here, &root).unwrap();
        here.write_all(b"more").unwrap();
        let dir = take(&there).unwrap();
        assert_eq!(dir.read_to_string("file").unwrap(), "in it");
        let mut more = [0; 4];
        there.read_exact(&mut more).unwrap();
        assert_eq!(&more, b"more");
    }

    #[test]
    fn a_byte_alone_is_no_folder() {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(b"x").unwrap();
        assert!(take(&there).unwrap_err().to_string().contains("no folder"));
        drop(here);
        assert!(take(&there).is_err());
    }
}
