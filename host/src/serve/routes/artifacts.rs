//! What was kept of a job: single files, all as an archive, the receipt.
//!
//! No receipt, no adapter: what ended otherwise has its records alone.

use std::io::Write;

use anyhow::Context as _;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Json as Answer, Response};
use nodus_api::{Artifact, ArtifactList, Bytes, Problem, Receipt};
use nodus_state::{JobId, StateError};

use super::usual::{App, Caller, Failure, Id, Service, download};
use crate::store::copy;

/// The receipt's name among the results.
const RECEIPT: &str = crate::receipt::FILE;

/// List the files that were kept of a job
#[utoipa::path(
    get, path = "/v1/jobs/{id}/artifacts", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = ArtifactList),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn list(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Answer<ArtifactList>, Failure> {
    let files = app.blocking(move |service| Ok(service.state.artifacts(caller.0.id, id)?)).await?;
    let artifact = |file: nodus_state::FileRef| Artifact { path: file.path, digest: file.digest.to_string(), bytes: file.bytes };
    Ok(Answer(ArtifactList { artifacts: files.into_iter().map(artifact).collect() }))
}

/// Download one file of a job
///
/// Its digest is the `ETag`; with it in `If-None-Match` nothing is sent again.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/artifacts/{*path}", tag = "results",
    params(("id" = String, Path, description = "The job's id"), ("path" = String, Path, description = "Its path, such as `adapter/adapter_model.safetensors`")),
    responses(
        (status = 200, body = Bytes, content_type = "application/octet-stream"),
        (status = 304, description = "It is the one that you have"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn get(
    State(app): State<App>,
    caller: Caller,
    Path((id, path)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let id: JobId = id.parse().map_err(|_| Failure::not_found("job"))?;
    let (file, content) = app
        .blocking(move |service| {
            let files = service.state.artifacts(caller.0.id, id)?;
            let file = files.into_iter().find(|file| file.path == path).ok_or_else(|| Failure::not_found("artifact"))?;
            let content = service.state.open_file(&file)?;
            Ok((file, content))
        })
        .await?;
    let tag = format!("\"{}\"", file.digest);
    let known = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let mut response = if known.is_some_and(|known| known.split(',').any(|known| known.trim() == tag)) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        let work = move |_: &Service, mut out: &mut dyn Write| {
            let mut content = content;
            copy(&mut content, &mut out).context("reading an artifact")
        };
        let mut response = download::written(&app, caller.0.id, "application/octet-stream", work).await?;
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(file.bytes));
        response
    };
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    Ok(response)
}

/// Download all files of a job as a tar archive
///
/// The receipt is among them, so that `nodus-host audit verify` checks the unpacked folder.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/artifacts.tar", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = Bytes, content_type = "application/x-tar"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn archive(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Response, Failure> {
    let of = caller.0.id;
    let (files, receipt) = app
        .blocking(move |service| {
            let receipt = match service.state.receipt(of, id) {
                Err(StateError::NotFound("receipt")) => None,
                found => Some(found?),
            };
            Ok((service.state.artifacts(of, id)?, receipt))
        })
        .await?;
    download::written(&app, of, "application/x-tar", move |service, out| tar(service, &files, receipt.as_deref(), out)).await
}

/// Of a file of so many bytes.
pub(super) fn header(bytes: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(bytes);
    header.set_mode(0o644);
    header.set_entry_type(tar::EntryType::Regular);
    header
}

/// Equal results make equal archives: no times, no owners.
fn tar(service: &Service, files: &[nodus_state::FileRef], receipt: Option<&[u8]>, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut archive = tar::Builder::new(out);
    for file in files {
        archive.append_data(&mut header(file.bytes), &file.path, service.state.open_file(file)?)?;
    }
    if let Some(receipt) = receipt {
        archive.append_data(&mut header(receipt.len() as u64), RECEIPT, receipt)?;
    }
    archive.finish()?;
    Ok(())
}

/// Download a job's receipt
///
/// A signed in-toto statement (DSSE, ed25519) of everything that went in and came out.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/receipt", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = Receipt),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn receipt(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Response, Failure> {
    let receipt = app.blocking(move |service| Ok(service.state.receipt(caller.0.id, id)?)).await?;
    Ok(([(header::CONTENT_TYPE, "application/json")], receipt).into_response())
}
