//! Answers that are written piece by piece: files, archives, tables, logs.
//!
//! Never holds a whole answer in memory, and writes no faster than it is read. One that fails half-way, or is not read, is broken off, so that nobody
//! takes it for whole.

use std::io::{self, BufWriter, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use nodus_api::Code;
use nodus_state::TenantId;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_stream::Stream;

use super::failure::Failure;
use super::service::{App, Service};
use super::upload::{PATIENCE, Patience};

/// Pieces on their way to the caller.
const PIECES_MAX: usize = 8;
const PIECE_BYTES: usize = 64 << 10;

/// An answer to a tenant that `work` writes. Each has a thread while it is written, so that a tenant has few at the same time.
pub(super) async fn written(
    app: &App,
    of: TenantId,
    kind: &'static str,
    work: impl FnOnce(&Service, &mut dyn Write) -> anyhow::Result<()> + Send + 'static,
) -> Result<Response, Failure> {
    let Some(slot) = app.download_slots.take(of) else {
        let detail =
            format!("{} downloads of yours are under way, expected at most so many at the same time", app.download_slots.of_one_max());
        return Err(Failure::new(Code::RateLimited, detail).retry_after(1));
    };
    let turn = app.downloads.clone().acquire_owned().await.map_err(|error| Failure::ours(error.into()))?;
    let (pipe, pieces) = pipe(PATIENCE);
    let app = app.clone();
    tokio::task::spawn_blocking(move || {
        let _held = (slot, turn);
        let mut out = BufWriter::with_capacity(PIECE_BYTES, pipe);
        let done = work(&app, &mut out).and_then(|()| out.into_inner().map_err(|error| error.into_error().into()));
        match done.and_then(|mut pipe| Ok(pipe.pass(None)?)) {
            Err(error) if !is_readers(&error) => tracing::error!("an answer broke off: {error:#}"),
            _ => {}
        }
    });
    let mut response = Body::from_stream(pieces).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

/// Whether an answer broke off because its reader is gone, or does not read.
fn is_readers(error: &anyhow::Error) -> bool {
    let kind = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>()).map(io::Error::kind);
    matches!(kind, Some(io::ErrorKind::BrokenPipe | io::ErrorKind::TimedOut))
}

/// Where an answer is written, on a thread that may wait, and the answer as it is sent.
fn pipe(patience: Patience) -> (Pipe, Pieces) {
    let (pieces, inbox) = mpsc::channel(PIECES_MAX);
    let pipe = Pipe { pieces, runtime: Handle::current(), patience, waited: Duration::ZERO, bytes: 0 };
    (pipe, Pieces { inbox, is_over: false })
}

struct Pipe {
    /// Nothing is the end.
    pieces: mpsc::Sender<Option<Bytes>>,
    runtime: Handle,
    patience: Patience,
    /// For the reader: how long the answer takes to be made is not held against it.
    waited: Duration,
    bytes: u64,
}

impl Pipe {
    fn pass(&mut self, piece: Option<Bytes>) -> io::Result<()> {
        let bytes = piece.as_ref().map_or(0, |piece| piece.len() as u64);
        let left = self.patience.whole(self.bytes).saturating_sub(self.waited).min(self.patience.pause);
        let began = Instant::now();
        let passed = self.runtime.block_on(tokio::time::timeout(left, self.pieces.send(piece)));
        passed?.map_err(|_| io::ErrorKind::BrokenPipe)?;
        (self.waited, self.bytes) = (self.waited + began.elapsed(), self.bytes + bytes);
        Ok(())
    }
}

impl Write for Pipe {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        self.pass(Some(Bytes::copy_from_slice(content)))?;
        Ok(content.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The pieces, and a fault where they stop before the end.
struct Pieces {
    inbox: mpsc::Receiver<Option<Bytes>>,
    is_over: bool,
}

impl Stream for Pieces {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let piece = ready!(self.inbox.poll_recv(context));
        self.is_over = !matches!(piece, Some(Some(_)));
        Poll::Ready(match piece {
            Some(piece) => piece.map(Ok),
            None => Some(Err(io::Error::other("the answer broke off"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write as _};
    use std::time::Duration;

    use tokio_stream::StreamExt as _;

    use super::{PIECES_MAX, Patience, Pieces, pipe};

    async fn all(pieces: Pieces) -> (usize, Option<String>) {
        let all = pieces.collect::<Vec<_>>().await;
        let fault = all.last().and_then(|last| last.as_ref().err().map(ToString::to_string));
        (all.iter().flatten().map(|piece| piece.len()).sum(), fault)
    }

    #[tokio::test]
    async fn what_is_not_read_is_broken_off_and_never_taken_for_whole() {
        let patience = Patience { pause: Duration::from_millis(200), bytes_per_second: 1 << 40 };
        let (mut unread, pieces) = pipe(patience);
        let written = tokio::task::spawn_blocking(move || (0..99).try_for_each(|_| unread.write_all(b"x")).unwrap_err().kind());
        assert_eq!(written.await.unwrap(), io::ErrorKind::TimedOut);
        assert_eq!(all(pieces).await, (PIECES_MAX, Some("the answer broke off".to_owned())));

        let (mut slow, mut pieces) = pipe(patience);
        let written = tokio::task::spawn_blocking(move || (0..99).try_for_each(|_| slow.write_all(b"x")).unwrap_err().kind());
        // Each in time, and too slow on the whole.
        while !written.is_finished() {
            pieces.next().await.unwrap().unwrap();
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
        assert_eq!(written.await.unwrap(), io::ErrorKind::TimedOut);

        let (mut whole, pieces) = pipe(patience);
        let written = tokio::task::spawn_blocking(move || {
            (0..99).try_for_each(|_| whole.write_all(b"x"))?;
            // What takes long to be made is not the reader's fault.
            std::thread::sleep(2 * patience.pause);
            whole.write_all(b"x")?;
            whole.pass(None)
        });
        assert_eq!(all(pieces).await, (100, None));
        written.await.unwrap().unwrap();

        let (gone, pieces) = pipe(patience);
        drop(gone);
        assert_eq!(all(pieces).await.1.as_deref(), Some("the answer broke off"));
    }
}
