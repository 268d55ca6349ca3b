//! What is kept of a run that ended, and what is said about it.
//!
//! A job that completed, or stopped on request, gets its adapters and a receipt. Any other keeps its records alone, and nothing
//! where it took no step and evaluated nothing.

use std::collections::BTreeMap;
use std::io::{self, Write};

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::EngineError;
use nodus_sandbox::{Failure, JobEnd, Limits, Outcome as JobOutcome, Usage, ValidComponent};

use super::inputs::Inputs;
use super::output::Output;
use super::record::{Figures, HELD_OUT, LOG, LOSSES, METRICS};
use crate::cli::RunArgs;
use crate::error::{Ending, user};
use crate::paths::shown;
use crate::receipt::{self, Artifact, ExternalEvent, HeldOut, Predicate, Program, Resource, Statement, Times};
use crate::store::{digest_of, write_synced};
use crate::text::{count, escape, escape_lines};

/// Most of a guest's message that is shown.
const MESSAGE_CHARS_MAX: usize = 2000;

/// How a run ended.
pub(super) struct Outcome {
    /// The job's end; none where a second Ctrl-C cut it off.
    pub(super) end: Option<JobEnd>,
    pub(super) figures: Figures,
    pub(super) class: BTreeMap<String, String>,
    pub(super) engine: Result<(), EngineError>,
    /// Whether the job was asked to stop.
    pub(super) is_stopped: bool,
    pub(super) started_unix_ms: u64,
}

/// Publishes what is to be kept and says what that is.
///
/// # Errors
/// The user's where the job failed; ours where the host or the disk did.
pub(super) fn conclude(
    component: &ValidComponent,
    args: &RunArgs,
    inputs: &Inputs,
    outcome: &Outcome,
    output: &Output,
    out: &mut dyn Write,
) -> anyhow::Result<Ending> {
    let failure = match &outcome.end {
        Some(JobEnd { outcome: JobOutcome::Completed, usage }) => {
            let kept = certify(component, args, inputs, outcome, *usage, output)?;
            tell(outcome, &kept, output, out)?;
            return Ok(if outcome.is_stopped { Ending::Interrupted } else { Ending::Done });
        }
        Some(JobEnd { outcome: JobOutcome::Failed(failure), .. }) => Some(failure),
        None => None,
    };
    let kept = keep_records(&outcome.figures, output)?;
    match failure {
        Some(Failure::Internal(error)) => {
            Err(anyhow::anyhow!("{error:#}")).context(format!("the host failed while it ran the job; {kept}"))
        }
        Some(failure) if !matches!(failure, Failure::Cancelled(_)) => {
            if let Err(error) = &outcome.engine {
                return Err(error.clone()).with_context(|| format!("the engine failed while it ran the job; {kept}"));
            }
            Err(user(format!("the job failed: {}\n{kept}", escape_lines(&failure.to_string(), MESSAGE_CHARS_MAX))))
        }
        _ => {
            writeln!(out, "cancelled: {kept}").context("writing to standard output")?;
            Ok(Ending::Interrupted)
        }
    }
}

/// Keeps the records without the adapters; says so.
fn keep_records(figures: &Figures, output: &Output) -> anyhow::Result<String> {
    if figures.steps == 0 && figures.evaluations.is_empty() {
        return Ok("nothing was kept, since no step was taken".to_owned());
    }
    let remove = || -> io::Result<()> {
        for entry in output.dir().entries()? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                output.dir().remove_dir_all(entry.file_name())?;
            }
        }
        Ok(())
    };
    remove().context("removing the adapters of a failed job")?;
    output.publish()?;
    let (steps, path) = (count(figures.steps, "step"), shown(output.path()));
    Ok(format!("kept in {path}: {LOSSES} ({steps}), {HELD_OUT}, {METRICS}, {LOG}; no adapter"))
}

/// Writes the receipt and publishes everything; what there is, by name.
fn certify(
    component: &ValidComponent,
    args: &RunArgs,
    inputs: &Inputs,
    outcome: &Outcome,
    usage: Usage,
    output: &Output,
) -> anyhow::Result<Vec<String>> {
    let figures = &outcome.figures;
    let (subject, artifacts) = artifacts(figures, output.dir()).context("hashing the results")?;
    let kept = artifacts.iter().map(|artifact| format!("{}/", artifact.resource.name)).collect();
    let milliseconds = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let component_name = args.component.file_name().unwrap_or_default().to_string_lossy();
    let predicate = Predicate {
        component: Resource::new(escape(&component_name), component.digest()),
        contract: receipt::CONTRACT,
        engine: Program { name: env!("CARGO_PKG_NAME"), version: env!("CARGO_PKG_VERSION") },
        parameters: inputs.parameters.clone(),
        seed: args.seed,
        trunk: Resource::new(inputs.model_name.as_str(), inputs.digest),
        data: Resource::new(inputs.train.name.as_str(), inputs.train.digest),
        held_out: held_out(inputs),
        loaded_artifacts: inputs.adapters.iter().map(|(digest, _)| Resource::new("init_adapter", *digest)).collect(),
        device_class: outcome.class.clone(),
        lane: "solo",
        co_resident_jobs: 0,
        limits: Limits::DEFAULT,
        events: if outcome.is_stopped { vec![ExternalEvent::StopRequested] } else { Vec::new() },
        steps: figures.steps,
        losses: receipt::sha256(figures.loss_digest),
        held_out_losses: figures.evaluations.clone(),
        adapter_bytes: artifacts.iter().map(|artifact| artifact.bytes).sum(),
        artifacts,
        times: Times {
            started_unix_ms: outcome.started_unix_ms,
            wall_ms: milliseconds(usage.wall_time),
            component_cpu_ms: milliseconds(usage.cpu_time),
        },
    };
    let mut text = serde_json::to_string_pretty(&Statement::new(subject, predicate))?;
    text.push('\n');
    write_synced(output.dir(), receipt::FILE, text.as_bytes())?;
    output.publish()?;
    Ok(kept)
}

fn held_out(inputs: &Inputs) -> HeldOut {
    match &inputs.held_out {
        None => HeldOut::Nothing,
        Some(rows) => match &rows.lines {
            None => HeldOut::Dataset { resource: Resource::new(rows.name.as_str(), rows.digest) },
            Some(lines) => HeldOut::Data { rows: lines.len() as u64 },
        },
    }
}

/// Every file of every saved adapter; where nothing was saved, the records, since a statement must be about something.
fn artifacts(figures: &Figures, dir: &Dir) -> io::Result<(Vec<Resource>, Vec<Artifact>)> {
    let (mut subject, mut artifacts) = (Vec::new(), Vec::new());
    for (name, saved) in &figures.saved {
        let folder = dir.open_dir(name)?;
        let mut names: Vec<_> = folder.entries()?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<_>>()?;
        names.sort();
        let mut total = 0;
        for file in names {
            let (digest, bytes) = digest_of(folder.open(&file)?)?;
            subject.push(Resource::new(format!("{name}/{}", file.to_string_lossy()), digest));
            total += bytes;
        }
        let resource = Resource::new(name.as_str(), saved.digest);
        artifacts.push(Artifact { resource, adapter: saved.adapter, step: saved.step, bytes: total });
    }
    if subject.is_empty() {
        for name in [LOSSES, HELD_OUT, METRICS] {
            subject.push(Resource::new(name, digest_of(dir.open(name)?)?.0));
        }
    }
    Ok((subject, artifacts))
}

/// Says how it went and what was kept.
fn tell(outcome: &Outcome, kept: &[String], output: &Output, out: &mut dyn Write) -> anyhow::Result<()> {
    let figures = &outcome.figures;
    let mut lines = Vec::new();
    let how = if outcome.is_stopped { "stopped on request after" } else { "completed" };
    let loss = figures.last_loss.map_or_else(String::new, |loss| format!(", last loss {loss:.4}"));
    lines.push(format!("{how} {}{loss}, {} with a label", count(figures.steps, "step"), count(figures.tokens, "token")));
    if let Some((first, last)) = figures.held_out {
        lines.push(format!("held-out loss: {first:.4} first, {last:.4} last"));
    }
    let mut names = kept.to_vec();
    names.extend([LOSSES, HELD_OUT, METRICS, LOG, receipt::FILE].map(str::to_owned));
    lines.push(format!("kept in {}: {}", shown(output.path()), names.join(", ")));
    if !figures.saved.contains_key("adapter") {
        lines.push("the job saved no adapter named `adapter`".to_owned());
    }
    for line in lines {
        writeln!(out, "{line}").context("writing to standard output")?;
    }
    Ok(())
}
