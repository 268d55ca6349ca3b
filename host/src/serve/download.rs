//! Answers that are written piece by piece: files, archives, tables, logs.
//!
//! Never holds a whole answer in memory, and writes no faster than it is read. One that fails half-way is broken off, so that nobody takes it for whole.

use std::io::{self, BufWriter, Write};

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::service::{App, Service};

/// Pieces on their way to the caller.
const PIECES_MAX: usize = 8;
const PIECE_BYTES: usize = 64 << 10;

/// An answer that `work` writes.
pub(super) fn written(
    app: &App,
    kind: &'static str,
    work: impl FnOnce(&Service, &mut dyn Write) -> anyhow::Result<()> + Send + 'static,
) -> Response {
    let (pieces, inbox) = mpsc::channel(PIECES_MAX);
    let app = app.clone();
    tokio::task::spawn_blocking(move || {
        let mut out = BufWriter::with_capacity(PIECE_BYTES, Pipe(pieces.clone()));
        let done = work(&app, &mut out).and_then(|()| out.flush().map_err(Into::into));
        if let Err(error) = done {
            let is_reader_gone = pieces.is_closed();
            if !is_reader_gone {
                tracing::error!("an answer broke off: {error:#}");
                // The reader may be gone by now.
                drop(pieces.blocking_send(Err(io::Error::other("the answer broke off"))));
            }
        }
    });
    let mut response = Body::from_stream(ReceiverStream::new(inbox)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

struct Pipe(mpsc::Sender<io::Result<Bytes>>);

impl Write for Pipe {
    fn write(&mut self, content: &[u8]) -> io::Result<usize> {
        self.0.blocking_send(Ok(Bytes::copy_from_slice(content))).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        Ok(content.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
