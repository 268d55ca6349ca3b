//! Hands open files to another process, over a socket.
//!
//! A descriptor that is handed over is a right; a path would be a wish.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};

/// Descriptors that go over at once, at most: fewer than the 253 that Linux allows.
pub(crate) const AT_ONCE_MAX: usize = 128;

/// What comes with the descriptors, since nothing goes over a stream without a byte.
const MARK: [u8; 1] = [0x64];

/// Sends descriptors, at most [`AT_ONCE_MAX`].
///
/// # Errors
/// What the operating system says.
pub(crate) fn give(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE_MAX))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    if descriptors.len() > AT_ONCE_MAX || !message.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(format!("{} descriptors have no room in a message", descriptors.len())));
    }
    match sendmsg(stream, &[IoSlice::new(&MARK)], &mut message, SendFlags::NOSIGNAL)? {
        1 => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives what one `give` sent, where nothing else is to be read from the stream before it. Blocks.
///
/// # Errors
/// None came, or what the operating system says.
pub(crate) fn take(stream: &UnixStream) -> io::Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE_MAX))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut mark = [0];
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut mark)], &mut message, RecvFlags::CMSG_CLOEXEC)?;
    let rights = message.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let descriptors: Vec<OwnedFd> = rights.flatten().collect();
    if descriptors.is_empty() || received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no open files came with the first byte, or not all of them"));
    }
    Ok(descriptors)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use cap_std::fs::Dir;

    use super::{AT_ONCE_MAX, give, take};

    #[test]
    fn a_folder_arrives_open_and_the_stream_goes_on() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        root.write("file", "in it").unwrap();
        let (mut here, mut there) = UnixStream::pair().unwrap();
        give(&here, &[root.as_fd()]).unwrap();
        here.write_all(b"more").unwrap();
        let dir = Dir::from_std_file(File::from(take(&there).unwrap().pop().unwrap()));
        assert_eq!(dir.read_to_string("file").unwrap(), "in it");
        let mut more = [0; 4];
        there.read_exact(&mut more).unwrap();
        assert_eq!(&more, b"more");
    }

    #[test]
    fn as_many_as_may_arrive_and_no_more() {
        let (here, there) = UnixStream::pair().unwrap();
        let all = vec![here.as_fd(); AT_ONCE_MAX];
        give(&here, &all).unwrap();
        assert_eq!(take(&there).unwrap().len(), AT_ONCE_MAX);
        assert!(give(&here, &vec![here.as_fd(); AT_ONCE_MAX + 1]).unwrap_err().to_string().contains("no room"));
    }

    #[test]
    fn a_byte_alone_is_no_folder() {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(b"x").unwrap();
        assert!(take(&there).unwrap_err().to_string().contains("no open files"));
        drop(here);
        assert!(take(&there).is_err());
    }
}
