//! `submit`: local files become uploads, the rest a request.
//!
//! Uploads what the service does not have already, by its digest.

use std::io::Write;
use std::path::Path;

use anyhow::Context as _;
use nodus_api::{Component, DataSet, HeldOut, Lane, Priority, SubmitRequest, Submitted, SweepAxis};
use nodus_protocol::Digest;
use nodus_sandbox::Limits;
use reqwest::Method;

use super::http::{Remote, segment};
use super::upload::{Content, upload};
use super::watch;
use crate::cli::{HeldOutArgs, RemoteLane, SubmitArgs};
use crate::error::user;
use crate::paths::{Paths, shown};
use crate::settings::merge;
use crate::store::digest_of;

/// Submits, and says what came of it.
pub(super) async fn submit(
    remote: &Remote,
    (paths, form): (Paths, watch::Form),
    args: &SubmitArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let request = SubmitRequest {
        component: component(remote, paths, &args.component).await?,
        model: args.model.clone(),
        data: data(remote, paths, &args.data).await?,
        held_out: held_out(&args.held_out),
        parameters: parameters(paths, args)?,
        sweep: args.sweeps.iter().map(|sweep| SweepAxis { key: sweep.key().to_owned(), values: sweep.values().to_vec() }).collect(),
        seed: args.seed,
        limits: args.limits.iter().map(|limit| (limit.name().to_owned(), limit.value())).collect(),
        lane: match args.lane {
            RemoteLane::Fused => Lane::Fused,
            RemoteLane::Mps => Lane::Mps,
            RemoteLane::Solo => Lane::Solo,
        },
        priority: if args.high { Priority::High } else { Priority::Low },
    };
    let mut post = remote.request(Method::POST, "/v1/jobs").json(&request);
    if let Some(key) = &args.key {
        post = post.header("idempotency-key", key);
    }
    let submitted: Submitted = remote.json(post).await?;
    if args.remote.json {
        writeln!(out, "{}", serde_json::to_string(&submitted)?)?;
    } else {
        for job in &submitted.jobs {
            writeln!(out, "{}  {}", job.id, job.name)?;
        }
        if submitted.jobs.len() > 1 {
            writeln!(out, "sweep {} of {} jobs", submitted.cohort, submitted.jobs.len())?;
        }
    }
    out.flush()?;
    if args.watch { watch::watch(remote, &submitted.cohort, form, out).await } else { Ok(()) }
}

fn parameters(paths: Paths, args: &SubmitArgs) -> anyhow::Result<serde_json::Map<String, serde_json::Value>> {
    let file = args.params.as_deref().map(|path| {
        let bytes = paths.read(path, Limits::DEFAULT.parameter_bytes)?;
        let text = String::from_utf8(bytes).map_err(|_| user(format!("{}: not UTF-8", shown(path))))?;
        anyhow::Ok((shown(path), text))
    });
    let file = file.transpose()?;
    merge(file.as_ref().map(|(name, text)| (name.as_str(), text.as_str())), &args.settings)
}

fn held_out(args: &HeldOutArgs) -> Option<HeldOut> {
    let count = args.held_out_count.map(|count| HeldOut::Count(count.get() as u64));
    count.or(args.held_out_fraction.map(HeldOut::Fraction)).or(args.held_out.as_ref().map(|name| HeldOut::Data(name.to_string())))
}

/// A file by its looks: it has a folder or an ending in its name.
fn is_path(text: &str, ending: &str) -> bool {
    text.contains('/') || text.ends_with(ending)
}

async fn component(remote: &Remote, paths: Paths, text: &str) -> anyhow::Result<String> {
    if !is_path(text, ".wasm") {
        return Ok(text.to_owned());
    }
    let path = Path::new(text);
    // Looked at whole, so that what can be no component is refused before it is sent.
    let digest = Digest::of(&paths.read(path, Limits::DEFAULT.component_bytes)?);
    let id = digest.to_string();
    if remote.find::<Component>(&format!("/v1/components/{}", segment(&id))).await?.is_some() {
        return Ok(id);
    }
    let content = Content { file: paths.open(path)?.into_std(), digest, kind: "application/wasm" };
    Ok(upload::<Component>(remote, (Method::POST, "/v1/components"), &content).await?.id)
}

/// A file is kept under its own name and its digest's beginning: other content never meets a taken name.
async fn data(remote: &Remote, paths: Paths, text: &str) -> anyhow::Result<String> {
    if !is_path(text, ".jsonl") {
        return Ok(text.to_owned());
    }
    let path = Path::new(text);
    let (digest, _) = digest_of(paths.open(path)?).with_context(|| format!("reading {}", shown(path)))?;
    let stem: String = path.file_stem().unwrap_or_default().to_string_lossy().chars().take(48).collect();
    let stem: String = stem.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '_' }).collect();
    let name = format!("{}-{}", stem.trim_start_matches(['-', '.']), digest.hex().get(..8).unwrap_or_default());
    let name = name.trim_start_matches('-').to_owned();
    let place = format!("/v1/data/{}", segment(&name));
    match remote.find::<DataSet>(&place).await? {
        Some(there) if there.digest == digest.to_string() => {}
        _ => {
            let content = Content { file: paths.open(path)?.into_std(), digest, kind: "application/jsonl" };
            upload::<DataSet>(remote, (Method::PUT, &place), &content).await?;
        }
    }
    Ok(name)
}
