//! What an owner needs to check a job, and to run it again: what went in, and what the host's ledger says of it.
//!
//! Never gives a ready-made component away: its bytes are the operator's. Says nothing of anybody else's jobs, not even how many there are.

use std::io::{BufWriter, Write};

use anyhow::Context as _;
use axum::extract::State;
use axum::response::Response;
use cap_std::fs::File;
use nodus_api::{Code, JobLedger, Problem};
use nodus_protocol::Digest;
use nodus_receipts::ledger::{Entry, Filter};
use nodus_state::{FileRef, ItemKind, JobId, Reference, Role, StateError, TenantId};
use serde_json::{Value, json};

use super::artifacts::header;
use super::usual::{App, Caller, Failure, Id, Service, download};
use crate::books;
use crate::store::copy;

/// Download what went into a job as a tar archive
///
/// `component.wasm`, `data.jsonl`, `held_out.jsonl` and `init_adapter/`, as far as the job has them. A ready-made component is the operator's and not among them.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/inputs.tar", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = Vec<u8>, content_type = "application/x-tar"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn inputs(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Response, Failure> {
    let of = caller.0.id;
    let files = app
        .blocking(move |service| {
            let mut files = service.state.inputs(of, id)?;
            if !has_component(service, of, &files)? {
                files.retain(|(role, _)| *role != Role::Component);
            }
            Ok(files)
        })
        .await?;
    download::written(&app, of, "application/x-tar", move |service, out| tar(service, &files, out)).await
}

/// Whether the job's component is one that the tenant brought.
fn has_component(service: &Service, of: TenantId, files: &[(Role, FileRef)]) -> Result<bool, Failure> {
    let Some((_, file)) = files.iter().find(|(role, _)| *role == Role::Component) else { return Ok(false) };
    match service.state.item(of, ItemKind::Component, &Reference::Digest(file.digest)) {
        Ok(item) => Ok(!item.is_shared),
        Err(StateError::NotFound(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn tar(service: &Service, files: &[(Role, FileRef)], out: &mut dyn Write) -> anyhow::Result<()> {
    let mut archive = tar::Builder::new(out);
    for (role, file) in files {
        let path = match role {
            Role::Component => "component.wasm".to_owned(),
            Role::Data => "data.jsonl".to_owned(),
            Role::HeldOut => "held_out.jsonl".to_owned(),
            Role::InitAdapter => format!("init_adapter/{}", file.path),
        };
        archive.append_data(&mut header(file.bytes), path, service.state.open_file(file)?)?;
    }
    archive.finish()?;
    Ok(())
}

/// What the host's ledger says of a job
///
/// Its receipt with the digests that it speaks of, and what became of its adapters' bytes. The chain is checked on the way.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/ledger", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = JobLedger),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn ledger(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Response, Failure> {
    let of = caller.0.id;
    app.blocking(move |service| Ok(service.state.job(of, id)?)).await?;
    let Some(slot) = app.ledger_slots.take(of) else {
        let detail = "the ledger is being read for you, expected one request for it at the same time";
        return Err(Failure::new(Code::RateLimited, detail).retry_after(1));
    };
    // It is read whole, and so by few at a time, who have gone when the reading has ended and not when they hang up; how fast the caller takes the answer is
    // no matter of theirs, but it is the one that this tenant has.
    let turn = app.ledgers.clone().acquire_owned().await.map_err(|error| Failure::ours(error.into()))?;
    let read = move |service: &Service| {
        let _turn = turn;
        Ok((entries(service, id).map_err(Failure::ours)?, slot))
    };
    let (mut entries, slot) = app.blocking(read).await?;
    let work = move |_: &Service, mut out: &mut dyn Write| {
        let _slot = slot;
        copy(&mut entries, &mut out).context("reading a job's entries")
    };
    download::written(&app, of, "application/json", work).await
}

/// The entries of a job as the answer has them, in a file that is gone when it is closed: they may be many.
fn entries(service: &Service, id: JobId) -> anyhow::Result<File> {
    let staged = service.state.stage(u64::MAX)?;
    let file = staged.open()?;
    let mut out = BufWriter::new(staged);
    out.write_all(b"{\"entries\":[")?;
    if let Some(reader) = books::reader(service.store.dir()?) {
        let filter = Filter { job: Some(id.to_string()), ..Filter::default() };
        let found = reader.select(filter).context("reading the host's ledger")?;
        for (number, entry) in found.enumerate() {
            let entry = shown(&entry.context("reading the host's ledger")?)?;
            write!(out, "{}{entry}", if number > 0 { "," } else { "" })?;
        }
    }
    out.write_all(b"]}")?;
    out.flush()?;
    Ok(file)
}

/// Without its place among others.
fn shown(Entry { at, unix_ms, event, .. }: &Entry) -> anyhow::Result<Value> {
    let digest: Digest = at.digest;
    let mut shown = json!({ "digest": digest, "unix_ms": unix_ms });
    if let (Some(shown), Value::Object(event)) = (shown.as_object_mut(), serde_json::to_value(event)?) {
        shown.extend(event);
    }
    Ok(shown)
}
