//! `upload`, `uploads`, `models`, `usage`, `rm`: what a tenant keeps on a service, and what there is to name.
//!
//! Knows nothing of the models and data sets of this machine: those are `model` and `data`.

use std::io::Write;

use nodus_api::{ComponentList, DataSetList, ModelList, TenantUsage};
use reqwest::Method;
use serde::Serialize;
use serde_json::json;

use super::files::{WASM, put_component, put_data};
use super::http::{Remote, segment};
use super::jobs::each;
use super::{table, watch};
use crate::cli::{RmArgs, UploadArgs};
use crate::error::user;
use crate::paths::Paths;
use crate::text::{bytes, escape};

/// Uploads a file, and says what jobs may call it.
pub(super) async fn upload(remote: &Remote, paths: Paths, args: &UploadArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let is_component = args.file.to_string_lossy().ends_with(WASM);
    if is_component && args.name.is_some() {
        return Err(user("--name is for data sets: a component is called by its id, or as the operator names a ready-made one"));
    }
    let (said, name) = if is_component {
        let component = put_component(remote, paths, &args.file).await?;
        (serde_json::to_string(&component)?, component.id)
    } else {
        let set = put_data(remote, paths, &args.file, args.name.as_ref()).await?;
        (serde_json::to_string(&set)?, set.name)
    };
    writeln!(out, "{}", if args.remote.json { said } else { escape(&name) })?;
    Ok(())
}

fn lines(out: &mut dyn Write, things: impl IntoIterator<Item = impl Serialize>) -> anyhow::Result<()> {
    things.into_iter().try_for_each(|thing| Ok(writeln!(out, "{}", serde_json::to_string(&thing)?)?))
}

fn whose(is_shared: bool) -> String {
    if is_shared { "all" } else { "you" }.to_owned()
}

/// Lists data sets and components.
pub(super) async fn uploads(remote: &Remote, as_json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let (DataSetList { data }, ComponentList { components }) = (remote.get("/v1/data").await?, remote.get("/v1/components").await?);
    if as_json {
        lines(out, data.iter().map(|set| json!({ "data": set })))?;
        return lines(out, components.iter().map(|component| json!({ "component": component })));
    }
    let sets = data.into_iter().map(|set| ["data".into(), set.name, whose(set.shared), bytes(set.bytes), set.rows.to_string(), set.form]);
    let components = components
        .into_iter()
        .map(|one| ["component".into(), one.name.unwrap_or(one.id), whose(one.shared), bytes(one.bytes), String::new(), String::new()]);
    Ok(table::write(out, ["KIND", "NAME", "OF", "SIZE", "ROWS", "FORM"], &sets.chain(components).collect::<Vec<_>>())?)
}

/// Lists models.
pub(super) async fn models(remote: &Remote, as_json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let ModelList { models } = remote.get("/v1/models").await?;
    if as_json {
        return lines(out, models);
    }
    let data = |has_tokenizer| if has_tokenizer { "text, tokens" } else { "tokens" }.to_owned();
    let rows = models
        .into_iter()
        .map(|model| [model.name, model.architecture, model.parameters.to_string(), bytes(model.bytes), data(model.tokenizer)]);
    Ok(table::write(out, ["NAME", "ARCHITECTURE", "PARAMETERS", "SIZE", "DATA"], &rows.collect::<Vec<_>>())?)
}

/// Shows usage beside what is allowed.
pub(super) async fn usage(remote: &Remote, as_json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let told: TenantUsage = remote.get("/v1/usage").await?;
    if as_json {
        return lines(out, [told]);
    }
    let TenantUsage { usage, quota, .. } = told;
    let number = |number: u64| number.to_string();
    let row = |name: &str, used: u64, bound: Option<u64>, show: fn(u64) -> String| {
        [name.to_owned(), show(used), bound.map_or_else(|| "none".to_owned(), show)]
    };
    let rows = [
        row("queued-jobs", usage.queued_jobs, quota.queued_jobs, number),
        row("running-jobs", usage.running_jobs, quota.running_jobs, number),
        row("high-jobs", usage.high_jobs, quota.high_jobs, number),
        row("stored-bytes", usage.stored_bytes, quota.stored_bytes, bytes),
        row("device-bytes", usage.device_bytes, quota.device_bytes, bytes),
        row("device-ms", usage.device_ms, quota.device_ms, number),
    ];
    Ok(table::write(out, ["QUOTA", "USED", "BOUND"], &rows)?)
}

/// Deletes what is named, as far as that can be.
pub(super) async fn rm(remote: &Remote, args: &RmArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut delete = async |place: &str, id: &str| {
        remote.send(remote.request(Method::DELETE, &format!("{place}/{}", segment(id)))).await?;
        let said = if args.remote.json { json!({ "deleted": id }).to_string() } else { format!("{}  deleted", escape(id)) };
        anyhow::Ok(writeln!(out, "{said}")?)
    };
    let jobs = each(&args.ids, async |id| {
        let (jobs, _) = watch::jobs_of(remote, id).await?;
        for job in jobs {
            delete("/v1/jobs", &job.id).await?;
        }
        Ok(())
    });
    let jobs = jobs.await;
    let data = each(&args.data, async |name| delete("/v1/data", name).await).await;
    let components = each(&args.components, async |id| delete("/v1/components", id).await).await;
    jobs.and(data).and(components)
}
