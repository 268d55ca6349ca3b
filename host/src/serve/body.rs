//! What a request carries, read strictly: JSON of a known form, queries of known keys, ids in paths.
//!
//! Never panics and never blames the host for what a caller wrote.

use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::header;
use axum::http::request::Parts;
use nodus_api::Code;
use nodus_state::{CohortId, JobId, TenantId};
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt as _;

use super::auth::Of;
use super::failure::Failure;
use super::service::App;
use super::slots::Slot;

/// Longest JSON body. Parameters are bounded besides, by the job's own limit.
const JSON_BYTES_MAX: usize = 4 << 20;
/// What any request may have of it; for more there are few places.
pub(super) const JSON_BYTES_USUAL: usize = 16 << 10;
/// How long a JSON body may take.
const JSON_TIME_MAX: Duration = Duration::from_secs(30);

/// A JSON body, with its place where it is a large one: held for as long as what was read of it.
pub(super) struct Json<T>(pub(super) T, pub(super) Place);

/// A place among those for large bodies: one of the tenant's, and one of all.
type Place = Option<(Slot, OwnedSemaphorePermit)>;

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &App) -> Result<Self, Failure> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if kind.split(';').next().map(str::trim) != Some("application/json") {
            return Err(Failure::new(Code::WrongMediaType, "expected `Content-Type: application/json`"));
        }
        // Nothing is read for somebody who was not asked who he is.
        let Some(Of(of)) = request.extensions().get().copied() else {
            return Err(Failure::ours(anyhow::anyhow!("a body is read before it is known whose it is")));
        };
        let (bytes, place) = read(app, of, request.into_body()).await?;
        let read = serde_json::from_slice(&bytes).map_err(|error| Failure::new(Code::BadBody, wrong(&error)))?;
        Ok(Self(read, place))
    }
}

/// Reads a body whole. What goes beyond the usual takes one of the few places that a tenant has for that, since it is held in memory however slowly
/// the rest comes. What it waits for a place is no time of its sender's.
async fn read(app: &App, of: TenantId, body: Body) -> Result<(Vec<u8>, Place), Failure> {
    let (mut bytes, mut place, mut until) = (Vec::new(), None, Instant::now() + JSON_TIME_MAX);
    let slow = |_| Failure::new(Code::TooSlow, format!("expected the body within {} s", JSON_TIME_MAX.as_secs()));
    let too_large = || Failure::new(Code::TooLarge, format!("expected at most {JSON_BYTES_MAX} bytes of JSON"));
    if body.size_hint().exact().is_some_and(|length| length > JSON_BYTES_MAX as u64) {
        return Err(too_large());
    }
    let mut body = body.into_data_stream();
    while let Some(piece) = timeout_at(until, body.next()).await.map_err(slow)? {
        let piece = piece.map_err(|_| Failure::new(Code::BadBody, "the body broke off"))?;
        let length = bytes.len() + piece.len();
        if length > JSON_BYTES_MAX {
            return Err(too_large());
        }
        if length > JSON_BYTES_USUAL && place.is_none() {
            let Some(own) = app.body_slots.take(of) else {
                let detail = format!(
                    "{} bodies of yours of more than {JSON_BYTES_USUAL} bytes are under way, expected at most so many at the same time",
                    app.body_slots.of_one_max()
                );
                return Err(Failure::new(Code::RateLimited, detail).retry_after(1));
            };
            let waits = Instant::now();
            place = Some((own, app.bodies.clone().acquire_owned().await.map_err(|error| Failure::ours(error.into()))?));
            until += waits.elapsed();
        }
        bytes.extend_from_slice(&piece);
    }
    Ok((bytes, place))
}

/// What is wrong with a body: JSON that says something else, or none.
fn wrong(error: &serde_json::Error) -> String {
    match error.classify() {
        Category::Data => error.to_string(),
        _ => format!("expected JSON: what is at line {}, column {} is none", error.line(), error.column()),
    }
}

/// How axum begins what it says of a query.
const OF_QUERY: &str = "Failed to deserialize query string: ";

/// The query, every key of it known.
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequestParts<App> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let read = axum::extract::Query::from_request_parts(parts, app).await;
        read.map(|axum::extract::Query(value)| Self(value)).map_err(|error| {
            let text = error.body_text();
            Failure::new(Code::BadParameter, format!("query: {}", text.strip_prefix(OF_QUERY).unwrap_or(&text)))
        })
    }
}

/// The id in the path. What is no id is an id of nothing.
pub(super) struct Id<T>(pub(super) T);

/// What an id is of.
pub(super) trait Identifies: std::str::FromStr {
    /// As messages name it.
    const WHAT: &'static str;
}

impl Identifies for JobId {
    const WHAT: &'static str = "job";
}

impl Identifies for CohortId {
    const WHAT: &'static str = "cohort";
}

impl<T: Identifies> FromRequestParts<App> for Id<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let Text(text) = Text::from_request_parts(parts, app).await?;
        text.parse().map(Self).map_err(|_| Failure::not_found(T::WHAT))
    }
}

/// The one part of the path that varies, as it is.
pub(super) struct Text(pub(super) String);

impl FromRequestParts<App> for Text {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let read = Path::<String>::from_request_parts(parts, app).await;
        read.map(|Path(text)| Self(text)).map_err(|error| Failure::new(Code::BadParameter, error.body_text()))
    }
}
