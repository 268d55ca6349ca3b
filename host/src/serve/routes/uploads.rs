//! Uploads that broke off: how much of one is there, and away with it.
//!
//! Shows a tenant its own alone.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Json;
use nodus_api::{Code, Problem, Upload};
use nodus_protocol::Digest;

use super::usual::{App, Caller, Failure, Text};

/// How much of an upload is there
///
/// Of a content that was sent with the header `upload-digest` and broke off; kept for a day. What is sent next with `upload-offset` goes on there.
#[utoipa::path(
    get, path = "/v1/uploads/{digest}", tag = "data", params(("digest" = String, Path, description = "The content's digest: `sha256:` and 64 digits")),
    responses(
        (status = 200, body = Upload, description = "0 bytes where nothing is there"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn get(State(app): State<App>, caller: Caller, Text(digest): Text) -> Result<Json<Upload>, Failure> {
    let digest = parsed(&digest)?;
    let bytes = app.blocking(move |service| Ok(service.state.uploaded(caller.0.id, digest)?)).await?;
    Ok(Json(Upload { bytes }))
}

/// Drop what came of an upload that broke off
///
/// It counts among what you store until it is finished, dropped, or a day old.
#[utoipa::path(
    delete, path = "/v1/uploads/{digest}", tag = "data", params(("digest" = String, Path, description = "The content's digest: `sha256:` and 64 digits")),
    responses(
        (status = 204, description = "It is gone"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn remove(State(app): State<App>, caller: Caller, Text(digest): Text) -> Result<StatusCode, Failure> {
    let digest = parsed(&digest)?;
    app.blocking(move |service| Ok(service.state.drop_upload(caller.0.id, digest)?)).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn parsed(digest: &str) -> Result<Digest, Failure> {
    digest.parse().map_err(|_| Failure::new(Code::BadParameter, "expected `sha256:` and 64 hexadecimal digits"))
}
