//! What a request carries, read strictly: JSON of a known form, queries of known keys, ids in paths.
//!
//! Never panics and never blames the host for what a caller wrote.

use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::header;
use axum::http::request::Parts;
use nodus_api::Code;
use nodus_state::{CohortId, JobId};
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::failure::Failure;
use super::service::App;

/// Longest JSON body. Parameters are bounded besides, by the job's own limit.
const JSON_BYTES_MAX: usize = 4 << 20;
/// How long a JSON body may take.
const JSON_TIME_MAX: Duration = Duration::from_secs(30);

/// A JSON body.
pub(super) struct Json<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<App> for Json<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, _: &App) -> Result<Self, Failure> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if kind.split(';').next().map(str::trim) != Some("application/json") {
            return Err(Failure::new(Code::WrongMediaType, "expected `Content-Type: application/json`"));
        }
        let read = to_bytes(request.into_body(), JSON_BYTES_MAX);
        let Ok(read) = tokio::time::timeout(JSON_TIME_MAX, read).await else {
            return Err(Failure::new(Code::TooSlow, format!("expected the body within {} s", JSON_TIME_MAX.as_secs())));
        };
        let bytes = read.map_err(|error| {
            let is_long = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source())
                .any(|error| error.to_string().contains("length limit exceeded"));
            if is_long {
                Failure::new(Code::TooLarge, format!("expected at most {JSON_BYTES_MAX} bytes of JSON"))
            } else {
                Failure::new(Code::BadBody, "the body broke off")
            }
        })?;
        serde_json::from_slice(&bytes).map(Self).map_err(|error| Failure::new(Code::BadBody, wrong(&error)))
    }
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
