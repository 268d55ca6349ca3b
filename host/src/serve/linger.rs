//! Bodies that nobody reads to their end: read on for a while, so that their sender sees the answer.
//!
//! Keeps nothing of them, and does not ask for one that its sender has not begun.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use tokio::runtime::Handle;
use tokio_stream::StreamExt as _;

/// How long, and how much of it, the rest of a body is still read: hung up on, its sender would see that and not the answer.
const LINGER: (Duration, usize) = (Duration::from_secs(5), 64 << 20);

/// Answers a request, and reads on what is left of its body.
pub(super) async fn read_on(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    // Whoever asks first whether to send it is told by the answer.
    let is_sent = !parts.headers.contains_key(header::EXPECT);
    let body = Body::new(Lingering { left: Some(body), is_sent });
    next.run(Request::from_parts(parts, body)).await
}

/// A body; dropped before its end, it is read on.
struct Lingering {
    /// None once its end was seen, or that there is none.
    left: Option<Body>,
    /// Whether its sender sends it without waiting for a word.
    is_sent: bool,
}

impl HttpBody for Lingering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.is_sent = true;
        let Some(body) = self.left.as_mut() else { return Poll::Ready(None) };
        let frame = ready!(Pin::new(body).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.left = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.left.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.left.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        if let Some(body) = self.left.take().filter(|body| self.is_sent && !body.is_end_stream())
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(linger(body));
        }
    }
}

async fn linger(body: Body) {
    let (time, mut rest) = LINGER;
    let mut body = body.into_data_stream();
    let read = async {
        while let Some(Ok(piece)) = body.next().await
            && piece.len() <= rest
        {
            rest -= piece.len();
        }
    };
    // However far it came.
    drop(tokio::time::timeout(time, read).await);
}
