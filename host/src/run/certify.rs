//! The receipt of a job that ended well: its files hashed, its component kept where nobody else keeps it, the statement signed.
//!
//! Never signs before all that the receipt speaks of is on the disk.

use std::io;

use anyhow::{Context as _, ensure};
use cap_std::fs::Dir;
use nodus_protocol::Digest;
use nodus_receipts::Envelope;
use nodus_receipts::statement::DigestSet;
use nodus_sandbox::Usage;

use super::conclude::Office;
use super::course::Ended;
use super::crew::{Fared, Post};
use super::inputs::Job;
use super::record::{Figures, HELD_OUT, LOSSES, METRICS};
use crate::books::Account;
use crate::receipt::{self, Artifact, ExternalEvent, HeldOut, Predicate, Program, Resource, Statement, Times};
use crate::store::{digest_of, write_synced};

/// Writes a job's receipt into its folder; the names of its adapters.
///
/// # Errors
/// Ours: the disk refuses.
pub(super) fn certify(
    office: &mut Office<'_>,
    account: &Account,
    post: &Post,
    (ended, fared, usage): (&Ended, &Fared, Usage),
) -> anyhow::Result<Vec<String>> {
    let Post { job, folder } = post;
    let (subject, artifacts) = artifacts(&ended.figures, folder.dir()).context("hashing the results")?;
    let kept = artifacts.iter().map(|artifact| artifact.resource.name.clone()).collect();
    if let Some(store) = office.components {
        store.keep_component(job.component.digest(), &job.component.bytes)?;
    }
    let mut predicate = predicate(job, (ended, fared, usage), artifacts);
    office.lane.clone_into(&mut predicate.lane);
    let statement = Statement::new(subject, predicate);
    let sealed = office.books.seal(account, |previous: Option<Digest>| {
        let mut statement = statement.clone();
        statement.predicate.previous_receipt = previous.map(DigestSet);
        serde_json::to_vec(&statement)
    })?;
    // One that was entered before a crash must be of the same result.
    let said: Statement = serde_json::from_slice(Envelope::parse(&sealed.envelope)?.payload()).context("reading the receipt again")?;
    ensure!(said.is_of_the_same_result(&statement)?, "run again after its receipt was entered, the job came to another result");
    if folder.dir().exists(receipt::FILE) {
        // Half of it, which the disk refused the rest of.
        folder.dir().remove_file(receipt::FILE).context("removing half a receipt")?;
    }
    write_synced(folder.dir(), receipt::FILE, &sealed.envelope)?;
    Ok(kept)
}

/// All but the lane and the receipt before.
fn predicate(job: &Job, (ended, fared, usage): (&Ended, &Fared, Usage), artifacts: Vec<Artifact>) -> Predicate {
    let figures = &ended.figures;
    let milliseconds = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    Predicate {
        component: Resource::new(job.component.name.as_str(), job.component.digest()),
        contract: receipt::CONTRACT.to_owned(),
        engine: Program { name: env!("CARGO_PKG_NAME").to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() },
        parameters: job.parameters.clone(),
        seed: job.seed,
        trunk: Resource::new(job.base.as_str(), job.model.digest),
        data: Resource::new(job.train.name().as_str(), job.train.digest()),
        held_out: held_out(job),
        loaded_artifacts: job.adapters.iter().map(|(digest, _)| Resource::new("init_adapter", *digest)).collect(),
        device_class: (*fared.class).clone(),
        lane: String::new(),
        co_resident_jobs: ended.neighbours,
        limits: job.limits,
        events: ended.stopped_at().map(|call| ExternalEvent::StopRequested { call }).into_iter().collect(),
        steps: figures.steps,
        losses: DigestSet(figures.loss_digest),
        held_out_losses: figures.evaluations.clone(),
        adapter_bytes: artifacts.iter().map(|artifact| artifact.bytes).sum(),
        artifacts,
        previous_receipt: None,
        times: Times {
            started_unix_ms: ended.started_unix_ms,
            wall_ms: milliseconds(usage.wall_time),
            component_cpu_ms: milliseconds(usage.cpu_time),
        },
    }
}

fn held_out(job: &Job) -> HeldOut {
    match &job.held_out {
        None => HeldOut::Nothing,
        Some(rows) => match rows.part_len() {
            None => HeldOut::Dataset { resource: Resource::new(rows.name().as_str(), rows.digest()) },
            Some(rows) => HeldOut::Data { rows },
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
