//! What an owner needs to check a job, and to run it again: what went in, and what the host's ledger says of it.
//!
//! Never gives a ready-made component away: its bytes are the operator's. Says nothing of anybody else's jobs, not even how many there are.

use std::io::Write;

use axum::extract::State;
use axum::response::{Json as Answer, Response};
use nodus_api::{Bytes, Code, JobLedger, Problem};
use nodus_protocol::Digest;
use nodus_receipts::ledger::Entry;
use nodus_state::{FileRef, ItemKind, JobId, Reference, Role, StateError, TenantId};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::IntoParams;

use super::artifacts::header;
use super::usual::{App, Caller, Failure, Id, Query, Service, download};
use crate::books;

/// Entries of one page.
const ENTRIES_MAX: usize = 1000;

/// Download what went into a job as a tar archive
///
/// `component.wasm`, `data.jsonl`, `held_out.jsonl` and `init_adapter/`, as far as the job has them. A ready-made component is the operator's and not among them.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/inputs.tar", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = Bytes, content_type = "application/x-tar"),
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

/// Which entries are shown.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LedgerQuery {
    /// From the so-manieth of the job's entries on, from 0: `next` of the page before
    from: Option<u64>,
    /// How many at most, 1 to 1000; 1000 without a word
    limit: Option<usize>,
}

/// What the host's ledger says of a job
///
/// Its receipt with the digests that it speaks of, and what became of its adapters' bytes. Nothing else of the ledger is read for it than what was added
/// since it was read last, on the way of which the chain is checked.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/ledger", tag = "results", params(("id" = String, Path, description = "The job's id"), LedgerQuery),
    responses(
        (status = 200, body = JobLedger),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn ledger(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id<JobId>,
    Query(query): Query<LedgerQuery>,
) -> Result<Answer<JobLedger>, Failure> {
    let (of, from, limit) = (caller.0.id, query.from.unwrap_or(0), query.limit.unwrap_or(ENTRIES_MAX));
    if !(1..=ENTRIES_MAX).contains(&limit) {
        return Err(Failure::new(Code::BadParameter, format!("limit is {limit}, expected 1 to {ENTRIES_MAX}")));
    }
    let _turn = app.ledgers.acquire().await.map_err(|error| Failure::ours(error.into()))?;
    app.blocking(move |service| {
        service.state.job(of, id)?;
        let (entries, is_more) = books::entries_of(&service.ledger, &id.to_string(), from, limit).map_err(Failure::ours)?;
        let next = is_more.then(|| from + entries.len() as u64);
        let entries = entries.iter().map(shown).collect::<Result<_, _>>().map_err(Failure::ours)?;
        Ok(Answer(JobLedger { entries, next }))
    })
    .await
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
