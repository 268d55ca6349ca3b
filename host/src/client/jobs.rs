//! `jobs`, `logs`, `metrics`, `cancel`: what is said of jobs, and the one thing that is done to them.
//!
//! Tables for people, JSON for programs.

use std::io::Write;
use std::time::Duration;

use nodus_api::{CancelRequest, Cancellation, Event, How, Job, JobPage};
use reqwest::Method;
use serde_json::Value;

use super::http::{PAGE_MAX, Remote, segment};
use super::{sse, table, watch};
use crate::cli::{CancelArgs, JobsArgs, LogsArgs, MetricsArgs};
use crate::error::{exit_code, user};
use crate::text::{duration, escape};

/// Lists jobs, page by page.
pub(super) async fn list(remote: &Remote, args: &JobsArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let (mut jobs, mut before) = (Vec::<Job>::new(), None::<String>);
    loop {
        let limit = (args.limit.get() - jobs.len()).min(PAGE_MAX).to_string();
        let query =
            [("state", &args.state), ("cohort", &args.cohort), ("model", &args.model), ("before", &before), ("limit", &Some(limit))];
        let query: Vec<(&str, &String)> = query.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?))).collect();
        let page: JobPage = remote.json(remote.request(Method::GET, "/v1/jobs").query(&query)).await?;
        jobs.extend(page.jobs);
        before = page.next;
        if before.is_none() || jobs.len() >= args.limit.get() {
            break;
        }
    }
    if args.remote.json {
        return jobs.iter().try_for_each(|job| Ok(writeln!(out, "{}", serde_json::to_string(job)?)?));
    }
    let rows: Vec<_> = jobs.iter().map(row).collect();
    Ok(table::write(out, ["ID", "STATE", "MODEL", "DATA", "NAME", "STEP", "LOSS", "HELD-OUT", "DEVICE", "NOTE"], &rows)?)
}

fn row(job: &Job) -> [String; 10] {
    let [step, loss, held_out] = table::progress(job);
    let place = job.ahead.filter(|ahead| *ahead > 0).map(|ahead| format!("{ahead} of yours ahead"));
    let note: Vec<String> = [place, job.reason.clone(), job.message.clone()].into_iter().flatten().collect();
    [
        job.id.clone(),
        job.state.as_str().to_owned(),
        job.model.clone(),
        job.data.clone(),
        job.name.clone(),
        step,
        loss,
        held_out,
        duration(Duration::from_millis(job.device_ms)),
        note.join("; "),
    ]
}

/// Shows a log, and goes on with it where that is asked for.
pub(super) async fn logs(remote: &Remote, args: &LogsArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let id = segment(&args.id);
    if !args.follow {
        return copy(remote, &format!("/v1/jobs/{id}/log"), out).await;
    }
    sse::follow(remote, &format!("/v1/jobs/{id}/events?kinds=log"), watch::aloud, |frame| {
        let event: Event = serde_json::from_str(&frame.data)?;
        let field = |name: &str| event.body.get(name).and_then(Value::as_str).map(escape).unwrap_or_default();
        writeln!(out, "{}: {}", field("level"), field("message"))?;
        Ok(out.flush()?)
    })
    .await
}

/// Shows a job's numbers.
pub(super) async fn metrics(remote: &Remote, args: &MetricsArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let id = segment(&args.id);
    if !args.remote.json {
        return copy(remote, &format!("/v1/jobs/{id}/metrics.csv"), out).await;
    }
    let mut after = 0;
    loop {
        let page: nodus_api::MetricPage = remote.get(&format!("/v1/jobs/{id}/metrics?limit=10000&after={after}")).await?;
        page.events.iter().try_for_each(|event| anyhow::Ok(writeln!(out, "{}", serde_json::to_string(event)?)?))?;
        match page.next {
            Some(next) => after = next,
            None => return Ok(()),
        }
    }
}

async fn copy(remote: &Remote, path: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut response = remote.send(remote.request(Method::GET, path)).await?;
    while let Some(bytes) = response.chunk().await? {
        out.write_all(&bytes)?;
    }
    Ok(())
}

/// Cancels jobs, and all members of sweeps that are not over.
pub(super) async fn cancel(remote: &Remote, args: &CancelArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let request = CancelRequest { how: if args.now { How::Cancel } else { How::Stop } };
    each(&args.ids, async |id| {
        let (jobs, _) = watch::jobs_of(remote, id).await?;
        let is_alone = jobs.len() == 1;
        if !is_alone && jobs.iter().all(|job| job.state.is_ended()) {
            return Err(user(format!("all {} jobs of the sweep have ended", jobs.len())));
        }
        for job in jobs.iter().filter(|job| is_alone || !job.state.is_ended()) {
            let place = format!("/v1/jobs/{}", segment(&job.id));
            let done: Cancellation = match remote.post(&format!("{place}/cancel"), &request).await {
                // A member that ended by itself meanwhile.
                Err(error) if !is_alone && exit_code(&error) == 2 && remote.get::<Job>(&place).await?.state.is_ended() => continue,
                posted => posted?,
            };
            if args.remote.json {
                writeln!(out, "{}", serde_json::json!({ "id": job.id, "ended": done.ended }))?;
            } else {
                writeln!(out, "{}  {}", job.id, if done.ended { "cancelled" } else { "asked to stop" })?;
            }
        }
        Ok(())
    })
    .await
}

/// Does it to each of them; those that it could not be done to are named in the end.
pub(super) async fn each(ids: &[String], mut one: impl AsyncFnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut refused = Vec::new();
    for id in ids {
        match one(id).await {
            Err(error) if exit_code(&error) == 2 => refused.push(format!("`{}`: {error}", escape(id))),
            done => done?,
        }
    }
    if refused.is_empty() { Ok(()) } else { Err(user(refused.join("\n"))) }
}
