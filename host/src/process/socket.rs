//! The sockets between this program's processes, and what they write to standard error.
//!
//! Understands no word that goes over them.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::process::Child;

use anyhow::Context as _;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::spawn::lines;
use crate::text::escape_lines;

/// Characters of its standard error that are logged, a line at a time.
const COMPLAINT_CHARS_MAX: usize = 2000;

/// The ends of a socket, for tasks.
pub(crate) fn split(stream: StdStream) -> anyhow::Result<(OwnedReadHalf, OwnedWriteHalf)> {
    stream.set_nonblocking(true).context("setting a socket up")?;
    Ok(UnixStream::from_std(stream).context("setting a socket up")?.into_split())
}

/// A socket that this process was started with.
///
/// # Errors
/// Ours: it is none.
pub(crate) fn inherited(descriptor: BorrowedFd<'_>) -> anyhow::Result<StdStream> {
    let stream = StdStream::from(descriptor.try_clone_to_owned()?);
    stream.set_nonblocking(true).context("this process is started by its parent, with sockets for input and output")?;
    Ok(stream)
}

/// Logs what the process writes to standard error, until it ends. `name` is what it is called in the log.
pub(crate) fn listen(child: &mut Child, name: &'static str) -> std::io::Result<()> {
    let Some(stderr) = child.stderr.take() else { return Ok(()) };
    let work = move || lines(stderr, |line| tracing::warn!("{name}: {}", escape_lines(line, COMPLAINT_CHARS_MAX)));
    std::thread::Builder::new().name("stderr".into()).spawn(work).map(drop)
}
