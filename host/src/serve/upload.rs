//! Bodies that are files: written to the disk as they come, hashed on the way, cut off beyond their size.
//!
//! Never holds a whole upload in memory, and keeps nothing of one that breaks off.

use std::io::{self, Write as _};
use std::time::Duration;

use axum::body::{Body, Bytes};
use nodus_api::Code;
use nodus_state::Staged;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;

use super::failure::Failure;
use super::service::{App, Service};

/// Pieces on their way to the disk.
const PIECES_MAX: usize = 16;
/// How long the next piece may take.
const PIECE_TIME_MAX: Duration = Duration::from_secs(60);

/// What comes over the channel: a piece, or why there is no more.
type Piece = Result<Bytes, Failure>;

/// Writes a body to the disk; `end` decides what becomes of it, away from the threads that answer requests.
pub(super) async fn upload<T: Send + 'static>(
    app: &App,
    body: Body,
    bytes_max: u64,
    end: impl FnOnce(&Service, Staged<'_>) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let _permit = app.uploads.acquire().await.map_err(|error| Failure::ours(error.into()))?;
    let (pieces, inbox) = mpsc::channel::<Piece>(PIECES_MAX);
    let written = app.blocking(move |service| {
        let staged = write(service, inbox, bytes_max)?;
        // Few at a time: this thread waits, and no request's thread.
        let _permit = tokio::runtime::Handle::current().block_on(service.checks.acquire()).map_err(|error| Failure::ours(error.into()))?;
        end(service, staged)
    });
    let ((), written) = tokio::join!(send(body, pieces), written);
    written
}

async fn send(body: Body, pieces: mpsc::Sender<Piece>) {
    let mut body = body.into_data_stream();
    loop {
        let piece = match tokio::time::timeout(PIECE_TIME_MAX, body.next()).await {
            Ok(None) => return,
            Ok(Some(Ok(piece))) => Ok(piece),
            Ok(Some(Err(_))) => Err(Failure::new(Code::BadBody, "the body broke off")),
            Err(_) => Err(Failure::new(Code::TooSlow, format!("expected more of the body within {} s", PIECE_TIME_MAX.as_secs()))),
        };
        let is_over = piece.is_err();
        // Whoever writes has seen enough where it is gone.
        if pieces.send(piece).await.is_err() || is_over {
            return;
        }
    }
}

fn write(service: &Service, mut inbox: mpsc::Receiver<Piece>, bytes_max: u64) -> Result<Staged<'_>, Failure> {
    let mut staged = service.state.stage(bytes_max)?;
    while let Some(piece) = inbox.blocking_recv() {
        staged.write_all(&piece?).map_err(|error| match error.kind() {
            io::ErrorKind::FileTooLarge => Failure::new(Code::TooLarge, format!("expected at most {bytes_max} bytes")),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => nodus_state::StateError::Full.into(),
            _ => Failure::ours(anyhow::Error::from(error).context("writing an upload")),
        })?;
    }
    if staged.bytes() == 0 {
        return Err(Failure::new(Code::BadBody, "the body is empty"));
    }
    Ok(staged)
}
