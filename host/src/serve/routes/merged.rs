//! A job's adapter folded into its model: a folder that transformers and vLLM load by itself.
//!
//! Only where the operator offers it, since the weights are the operator's.

use std::io::Write;
use std::sync::Arc;

use anyhow::Context as _;
use axum::extract::State;
use axum::response::Response;
use cap_std::fs::Dir;
use nodus_api::{Bytes, Code, Problem};
use nodus_formats::merge::{FILE, Merged};
use nodus_protocol::AdapterWeights;
use nodus_state::JobId;
use serde::Deserialize;
use utoipa::IntoParams;

use super::usual::{App, Caller, Failure, Id, Query, Service};
use crate::run::inputs::{OpenModel, Weights};
use crate::serve::{adapters, download};

/// Of a tar archive.
const BLOCK_BYTES: u64 = 512;

/// Which adapter.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct MergedQuery {
    /// The adapter's name among the job's results; `adapter` without a word
    adapter: Option<String>,
}

/// What is merged.
struct Parts {
    model: Arc<OpenModel>,
    adapter: AdapterWeights,
    /// The model's folder.
    folder: Dir,
}

/// Download a job's adapter merged into its model, as a tar archive of a model folder
///
/// Weights keep the type that the model is stored in. A merged weight is rounded once, so it gives other bits than model and adapter side by side; no
/// receipt speaks of it. Refused where the operator does not offer it.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/merged.tar", tag = "results", params(("id" = String, Path, description = "The job's id"), MergedQuery),
    responses(
        (status = 200, body = Bytes, content_type = "application/x-tar"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn merged(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id<JobId>,
    Query(query): Query<MergedQuery>,
) -> Result<Response, Failure> {
    let of = caller.0.id;
    let parts = app
        .blocking(move |service| {
            let job = service.state.job(of, id)?;
            if !service.offers.merged {
                return Err(Failure::new(Code::NotOffered, "the operator of this service does not give its models' weights away"));
            }
            let name = query.adapter.as_deref().unwrap_or(adapters::ADAPTER);
            let model = service.planner.model(service, &job.spec.common.model.name)?;
            if model.digest != job.spec.common.model.digest {
                return Err(Failure::new(Code::WrongState, "the model that the job was trained on is gone"));
            }
            let adapter = adapters::of_job(service, of, (id, name), &model)?.ok_or_else(|| Failure::not_found("adapter"))?;
            let folder = service.store.model(&model.name).map_err(Failure::ours)?.0;
            Ok(Parts { model, adapter, folder })
        })
        .await?;
    if !matches!(parts.model.weights, Weights::Mapped(_)) {
        return Err(Failure::new(Code::WrongState, "the model's weights are random numbers that no file holds"));
    }
    download::written(&app, of, "application/x-tar", move |_: &Service, out| tar(&parts, out)).await
}

/// The model's small files, then the weights.
fn tar(Parts { model, adapter, folder }: &Parts, out: &mut dyn Write) -> anyhow::Result<()> {
    let Weights::Mapped(tensors) = &model.weights else { return Ok(()) };
    let merged = Merged::new(tensors, adapter)?;
    let mut names: Vec<String> = Vec::new();
    for entry in folder.entries().context("listing a model's files")? {
        names.push(entry.context("listing a model's files")?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    // The store's own word and the weights as they were stay here.
    for name in names.iter().filter(|name| !name.contains(".safetensors") && *name != crate::store::MODEL_MANIFEST) {
        let content = folder.read(name).with_context(|| format!("reading {name} of a model"))?;
        entry(name, content.len() as u64, out, |out| Ok(out.write_all(&content)?))?;
    }
    entry(FILE, merged.bytes(), out, |out| Ok(merged.write(out)?))?;
    // Two empty blocks end an archive.
    Ok(out.write_all(&[0; 2 * BLOCK_BYTES as usize])?)
}

/// A file of an archive, written as it is made.
fn entry(name: &str, bytes: u64, out: &mut dyn Write, write: impl FnOnce(&mut dyn Write) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_path(name)?;
    header.set_size(bytes);
    header.set_mode(0o644);
    header.set_entry_type(tar::EntryType::Regular);
    header.set_cksum();
    out.write_all(header.as_bytes())?;
    write(out)?;
    let rest = bytes.next_multiple_of(BLOCK_BYTES) - bytes;
    Ok(std::io::copy(&mut std::io::Read::take(std::io::repeat(0), rest), out).map(drop)?)
}
