//! `submit`: local files become uploads, the rest a request.
//!
//! Checks nothing that the service checks.

use std::io::Write;

use nodus_api::{HeldOut, Lane, Priority, SubmitRequest, Submitted, SweepAxis};
use nodus_sandbox::Limits;
use reqwest::Method;

use super::http::Remote;
use super::{files, watch};
use crate::cli::{RemoteLane, SubmitArgs};
use crate::error::user;
use crate::paths::{Paths, shown};
use crate::settings::merge;

/// Submits, and says what came of it.
pub(super) async fn submit(
    remote: &Remote,
    (paths, form): (Paths, watch::Form),
    args: &SubmitArgs,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let request = SubmitRequest {
        component: files::component(remote, paths, &args.component).await?,
        model: args.model.clone(),
        data: files::data(remote, paths, &args.data).await?,
        held_out: held_out(remote, paths, args).await?,
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
            writeln!(out, "{}", format!("{}  {}", job.id, job.name).trim_end())?;
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

async fn held_out(remote: &Remote, paths: Paths, args: &SubmitArgs) -> anyhow::Result<Option<HeldOut>> {
    if let Some(text) = &args.held_out {
        return files::data(remote, paths, text).await.map(HeldOut::Data).map(Some);
    }
    Ok(args.held_out_count.map(|count| HeldOut::Count(count.get() as u64)).or(args.held_out_fraction.map(HeldOut::Fraction)))
}
