//! Bodies that are files: written to the disk as they come, hashed on the way, cut off beyond their size.
//!
//! Never holds a whole upload in memory, and keeps nothing of one that is refused.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use axum::body::{Body, BodyDataStream, Bytes, HttpBody as _};
use axum::http::HeaderMap;
use nodus_api::Code;
use nodus_protocol::Digest;
use nodus_state::{Staged, StateError, TenantId, Whole};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt as _;

use super::checks::Checks;
use super::failure::Failure;
use super::service::{App, Service};

/// Pieces on their way to the disk.
const PIECES_MAX: usize = 16;
/// How long a body may take that comes as slowly as it may.
pub(super) const PATIENCE: Patience = Patience { pause: Duration::from_secs(60), bytes_per_second: 16 << 10 };
/// How slow a body may be that comes, or is taken: one that is under way keeps others from theirs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Longest wait for the next piece, and what a body of any length has.
    pub(super) pause: Duration,
    /// Beyond that, on the whole.
    pub(super) bytes_per_second: u64,
}

impl Patience {
    /// What so many bytes may take.
    pub(super) fn whole(self, bytes: u64) -> Duration {
        self.pause + Duration::from_secs(bytes / self.bytes_per_second)
    }
}

/// What comes over the channel: a piece, or why there is no more.
type Piece = Result<Bytes, Failure>;

/// What a body is a part of: the content's digest, and where in it the body begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    digest: Digest,
    offset: u64,
}

/// The content's digest, where the upload is to be one that can be gone on with.
const DIGEST: &str = "upload-digest";
/// How many bytes of it came before.
const OFFSET: &str = "upload-offset";

impl Part {
    /// As the headers say; none where they say nothing.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Self>, Failure> {
        let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or_default());
        let wrong = |name: &str, expected: &str| Failure::new(Code::BadParameter, format!("{name}: expected {expected}"));
        let Some(digest) = text(DIGEST) else {
            return if text(OFFSET).is_some() { Err(wrong(OFFSET, "it beside upload-digest alone")) } else { Ok(None) };
        };
        let digest = digest.parse().map_err(|_| wrong(DIGEST, "the content's digest as `sha256:` and 64 hexadecimal digits"))?;
        let offset = text(OFFSET).unwrap_or("0").parse().map_err(|_| wrong(OFFSET, "how many bytes came before"))?;
        Ok(Some(Self { digest, offset }))
    }
}

/// Writes a tenant's body to the disk; `end` decides what becomes of it once it is the tenant's turn for that, away from the threads that answer
/// requests.
pub(super) async fn upload<T: Send + 'static>(
    app: &App,
    of: TenantId,
    (headers, body): (&HeaderMap, Body),
    (bytes_max, checks): (u64, &Arc<Checks>),
    end: impl FnOnce(&Service, Whole) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let Some(slot) = app.slots.take(of) else {
        let detail = format!("{} uploads of yours are under way, expected at most so many at the same time", app.slots.of_one_max());
        return Err(Failure::new(Code::RateLimited, detail).retry_after(1));
    };
    let whole = take(app, of, body, Part::of(headers)?, bytes_max).await?;
    let (app, checks) = (app.clone(), checks.clone());
    // It goes on where its sender is gone, who then finds it when asking again.
    let ended = tokio::spawn(async move {
        let _slot = slot;
        let turn = checks.take(of).await;
        let end = move |service: &Service| {
            let _turn = turn;
            end(service, whole)
        };
        app.blocking(end).await
    });
    ended.await.context("an upload's work panicked").map_err(Failure::ours)?
}

/// Writes a body to the disk, a few at a time.
async fn take(app: &App, of: TenantId, body: Body, part: Option<Part>, bytes_max: u64) -> Result<Whole, Failure> {
    let length = body.size_hint().exact();
    let mut body = body.into_data_stream();
    let _permit = app.uploads.acquire().await.map_err(|error| Failure::ours(error.into()))?;
    let (pieces, inbox) = mpsc::channel::<Piece>(PIECES_MAX);
    let (begin, begun) = oneshot::channel();
    let written = app.blocking(move |service| {
        let staged = match part {
            None => service.state.receive(of, bytes_max)?,
            Some(Part { digest, offset }) => service.state.resume(of, digest, offset, bytes_max)?,
        };
        Ok(write(staged, (begin, inbox), (length, bytes_max))?.finish()?)
    });
    let ((), written) = tokio::join!(send(&mut body, pieces, begun, PATIENCE), written);
    written
}

/// Passes a body on piece by piece, once whoever takes them has begun. What the host itself takes its time for is not held against the sender: what
/// came before is read again, and disks are slow.
async fn send(body: &mut BodyDataStream, pieces: mpsc::Sender<Piece>, begun: oneshot::Receiver<()>, patience: Patience) {
    if begun.await.is_err() {
        return;
    }
    let (mut began, mut bytes) = (Instant::now(), 0_u64);
    loop {
        let until = (began + patience.whole(bytes)).min(Instant::now() + patience.pause);
        let piece = match tokio::time::timeout_at(until.into(), body.next()).await {
            Ok(None) => return,
            Ok(Some(Ok(piece))) => Ok(piece),
            Ok(Some(Err(_))) => Err(Failure::new(Code::BadBody, "the body broke off")),
            Err(_) => Err(Failure::new(Code::TooSlow, patience.to_string())),
        };
        bytes += piece.as_ref().map_or(0, |piece| piece.len() as u64);
        let is_over = piece.is_err();
        let sending = Instant::now();
        // Whoever writes has seen enough where it is gone.
        if pieces.send(piece).await.is_err() || is_over {
            return;
        }
        began += sending.elapsed();
    }
}

impl std::fmt::Display for Patience {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { pause, bytes_per_second } = self;
        write!(f, "expected more of the body within {} s, and {bytes_per_second} bytes a second on the whole", pause.as_secs())
    }
}

/// Writes what comes, once there is room for as much as is said to come. What is refused for its size is refused for good.
fn write(
    mut staged: Staged<'_>,
    (begin, mut inbox): (oneshot::Sender<()>, mpsc::Receiver<Piece>),
    (length, bytes_max): (Option<u64>, u64),
) -> Result<Staged<'_>, Failure> {
    let announced = length.map_or(Ok(()), |length| staged.announce(length));
    if announced.is_ok() {
        // Who sends may be gone.
        begin.send(()).ok();
    }
    let mut taken = announced;
    while taken.is_ok()
        && let Some(piece) = inbox.blocking_recv()
    {
        let piece = piece?;
        taken = staged.write_all(&piece);
    }
    match taken {
        Ok(()) if staged.bytes() == 0 => Err(Failure::new(Code::BadBody, "the body is empty")),
        Ok(()) => Ok(staged),
        Err(error) => Err(refused(error, staged, bytes_max)),
    }
}

fn refused(error: io::Error, staged: Staged<'_>, bytes_max: u64) -> Failure {
    match (error.kind(), error.downcast::<StateError>()) {
        (_, Ok(refused)) => {
            if refused.is_refusal() {
                staged.forget();
            }
            refused.into()
        }
        (io::ErrorKind::FileTooLarge, _) => {
            staged.forget();
            Failure::new(Code::TooLarge, format!("expected at most {bytes_max} bytes"))
        }
        (io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded, _) => StateError::Full.into(),
        (_, Err(error)) => Failure::ours(anyhow::Error::from(error).context("writing an upload")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::{Body, Bytes};
    use tokio::sync::{mpsc, oneshot};
    use tokio_stream::wrappers::ReceiverStream;

    use super::{Patience, Piece, send};

    /// Sends a piece of 100 bytes so often; how many were taken, and what was said in the end.
    async fn trickle(pieces: usize, every: Duration, patience: Patience) -> (usize, Option<String>) {
        let (sender, body) = mpsc::channel::<Result<Bytes, std::io::Error>>(1);
        let (taken, mut inbox) = mpsc::channel::<Piece>(1);
        let (begin, begun) = oneshot::channel();
        begin.send(()).unwrap();
        let mut body = Body::from_stream(ReceiverStream::new(body)).into_data_stream();
        tokio::spawn(async move { send(&mut body, taken, begun, patience).await });
        tokio::spawn(async move {
            for _ in 0..pieces {
                tokio::time::sleep(every).await;
                // It is hung up on.
                if sender.send(Ok(Bytes::from_static(&[b'x'; 100]))).await.is_err() {
                    return;
                }
            }
        });
        let mut count = 0;
        while let Some(piece) = inbox.recv().await {
            match piece {
                Ok(_) => count += 1,
                Err(failure) => return (count, Some(format!("{failure:?}"))),
            }
        }
        (count, None)
    }

    #[tokio::test]
    async fn what_the_host_takes_its_time_for_is_not_held_against_the_sender() {
        let patience = Patience { pause: Duration::from_millis(200), bytes_per_second: 1 << 40 };
        let (begin, begun) = oneshot::channel();
        let (taken, mut inbox) = mpsc::channel::<Piece>(1);
        let pieces = (0..6).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(b"x")));
        let mut body = Body::from_stream(tokio_stream::iter(pieces)).into_data_stream();
        tokio::spawn(async move { send(&mut body, taken, begun, patience).await });
        // It reads what came before; then each piece takes it longer than the sender may pause.
        tokio::time::sleep(2 * patience.pause).await;
        begin.send(()).unwrap();
        let mut count = 0;
        while let Some(piece) = inbox.recv().await {
            assert!(piece.is_ok(), "{piece:?} after {count}");
            count += 1;
            tokio::time::sleep(patience.pause / 2).await;
        }
        assert_eq!(count, 6);
    }

    #[tokio::test]
    async fn a_body_may_pause_and_be_slow_but_not_for_ever() {
        let patience = Patience { pause: Duration::from_millis(300), bytes_per_second: 1 << 40 };
        assert_eq!(trickle(5, Duration::from_millis(1), patience).await, (5, None));
        let (count, said) = trickle(2, Duration::from_secs(60), patience).await;
        assert!(count == 0 && said.unwrap().contains("TooSlow"), "a pause that is too long");
        let (count, said) = trickle(1000, Duration::from_millis(50), patience).await;
        assert!((1..=6).contains(&count) && said.unwrap().contains("TooSlow"), "{count} pieces, each in time");
        let patience = Patience { bytes_per_second: 10, ..patience };
        assert_eq!(trickle(20, Duration::from_millis(50), patience).await, (20, None), "slow, but fast enough");
    }
}
