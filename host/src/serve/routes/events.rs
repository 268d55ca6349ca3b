//! Events as they happen, by server-sent events: from where a reader stopped, until its jobs ended.
//!
//! Never polls: a reader sleeps until something of its own cohort changed.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Sse;
use axum::response::sse::{Event as Frame, KeepAlive};
use nodus_api::{Code, Event, Problem};
use nodus_protocol::Digest;
use nodus_state::{CohortId, EventKind, JobId, Kinds, Stream, TenantId};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::IntoParams;

use super::usual::{App, Caller, Failure, Id, Query};
use crate::serve::words;

/// Events that are read at once.
const PAGE: usize = 256;
/// Events on their way to the reader.
const FRAMES_MAX: usize = 32;
/// How often an idle stream shows that it lives.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Name of the last frame: all jobs ended and all was told.
const END: &str = "end";

type Frames = Sse<axum::response::sse::KeepAliveStream<ReceiverStream<Result<Frame, Infallible>>>>;

/// Where to begin, and with what.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct EventQuery {
    /// Only events after this position; the header `Last-Event-ID` goes first
    after: Option<u64>,
    /// Only these kinds, such as `log,state`; all without a word
    kinds: Option<String>,
}

/// Follow a job's events
///
/// A server-sent event's name is the kind, its id the position, its data the event as JSON. A frame `end` says that the job ended and all was told.
/// A reader that was cut off goes on with `Last-Event-ID`. A stream ends, without that frame, once its token is revoked or its tenant disabled.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/events", tag = "results",
    params(("id" = String, Path, description = "The job's id"), ("Last-Event-ID" = Option<String>, Header, description = "Position of the last event that was read"), EventQuery),
    responses(
        (status = 200, body = Event, content_type = "text/event-stream"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn of_job(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id<JobId>,
    headers: HeaderMap,
    Query(query): Query<EventQuery>,
) -> Result<Frames, Failure> {
    let of = caller.0.id;
    let cohort = app.blocking(move |service| Ok(service.state.job(of, id)?.cohort)).await?;
    follow(app, (of, caller.1), (cohort, Stream::Job(id)), &headers, query)
}

/// Follow the events of all members of a sweep
///
/// As of one job; `end` comes when the last member ended.
#[utoipa::path(
    get, path = "/v1/cohorts/{id}/events", tag = "results",
    params(("id" = String, Path, description = "The cohort's id"), ("Last-Event-ID" = Option<String>, Header, description = "Position of the last event that was read"), EventQuery),
    responses(
        (status = 200, body = Event, content_type = "text/event-stream"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn of_cohort(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id<CohortId>,
    headers: HeaderMap,
    Query(query): Query<EventQuery>,
) -> Result<Frames, Failure> {
    let of = caller.0.id;
    app.blocking(move |service| Ok(service.state.has_ended(of, Stream::Cohort(id))?)).await?;
    follow(app, (of, caller.1), (id, Stream::Cohort(id)), &headers, query)
}

fn follow(app: App, who: (TenantId, Digest), which: (CohortId, Stream), headers: &HeaderMap, query: EventQuery) -> Result<Frames, Failure> {
    let last = headers.get("last-event-id").map(|value| {
        let position = value.to_str().ok().and_then(|text| text.parse::<u64>().ok());
        position.ok_or_else(|| Failure::new(Code::BadParameter, "Last-Event-ID: expected the position of an event"))
    });
    let after = last.transpose()?.or(query.after).unwrap_or(0);
    let kinds = kinds(query.kinds.as_deref())?;
    let (frames, inbox) = mpsc::channel(FRAMES_MAX);
    tokio::spawn(tell(app, who, which, (after, kinds), frames));
    Ok(Sse::new(ReceiverStream::new(inbox)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// Kinds as a query names them.
pub(super) fn kinds(text: Option<&str>) -> Result<Vec<EventKind>, Failure> {
    let kind = |word: &str| {
        let known = EventKind::ALL.iter().copied().find(|kind| kind.as_str() == word);
        known.ok_or_else(|| {
            let all = EventKind::ALL.iter().map(|kind| kind.as_str()).collect::<Vec<_>>().join(", ");
            Failure::new(Code::BadParameter, format!("kinds: there is no kind `{word}`, expected some of {all}"))
        })
    };
    text.map_or(Ok(Vec::new()), |text| text.split(',').map(kind).collect())
}

/// Sends what there is, then what comes, until the jobs ended, the reader is gone, its token opens nothing any more or the service ends.
async fn tell(
    app: App,
    (of, token): (TenantId, Digest),
    (cohort, stream): (CohortId, Stream),
    (mut after, kinds): (u64, Vec<EventKind>),
    frames: mpsc::Sender<Result<Frame, Infallible>>,
) {
    let wanted = if kinds.is_empty() { Kinds::ALL } else { kinds.iter().copied().collect() };
    let mut subscription = app.streams.subscribe(cohort, wanted);
    let (mut closing, mut bars) = (app.closing.subscribe(), app.bars.subscribe());
    loop {
        subscription.look();
        bars.mark_unchanged();
        let kinds = kinds.clone();
        let Ok(turn) = app.telling.acquire().await else { return };
        let read = app.blocking(move |service| {
            if service.state.bearer_of(token)?.is_none() {
                return Ok(None);
            }
            // Whether it is over is asked first: what was told before the end is read after it.
            let is_over = service.state.has_ended(of, stream)?;
            Ok(Some((is_over, service.state.events(of, stream, after, &kinds, PAGE)?)))
        });
        // What was deleted meanwhile has no more events.
        let Ok(Some((is_over, page))) = read.await else { return };
        drop(turn);
        let is_all = page.len() < PAGE;
        for event in page {
            after = event.position;
            let Ok(frame) = Frame::default().id(after.to_string()).event(event.kind.as_str()).json_data(words::event(event)) else {
                return;
            };
            if frames.send(Ok(frame)).await.is_err() {
                return;
            }
        }
        if !is_all {
            continue;
        }
        if is_over {
            // Whoever is gone needs no word of the end.
            drop(frames.send(Ok(Frame::default().event(END).data("{}"))).await);
            return;
        }
        tokio::select! {
            () = subscription.changed() => {}
            // The sender lives as long as the service.
            _ = bars.changed() => {}
            () = frames.closed() => return,
            _ = closing.wait_for(|closing| *closing) => return,
        }
    }
}
