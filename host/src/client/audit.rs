//! `audit job`: a job of a service, fetched with all that went into it, and checked.
//!
//! Believes nothing that the service sends but what a digest of the signed receipt says. Runs nothing: what was fetched is run again elsewhere.

use std::io::Write;

use anyhow::Context as _;
use nodus_api::JobLedger;
use nodus_receipts::envelope::{ENVELOPE_BYTES_MAX, receipt_digest};
use nodus_receipts::ledger::{BytesEvent, Event};
use nodus_receipts::statement::Statement;
use nodus_receipts::{Envelope, KnownKeys};
use serde_json::json;

use super::fetch::{archive, keys};
use super::http::{Remote, at_last, segment};
use super::landing::Landing;
use super::profile::profile;
use crate::app::Surroundings;
use crate::audit::{self, INPUTS};
use crate::cli::AuditJobArgs;
use crate::error::user;
use crate::paths::{Paths, shown};
use crate::receipt::FILE;
use crate::text::bytes;

/// Fetches and checks a job; the keys that were believed.
///
/// # Errors
/// The user's: what does not hold, or is missing. Ours: the service failed or cannot be reached.
pub(crate) fn audit(surroundings: &Surroundings, args: &AuditJobArgs, out: &mut dyn Write) -> anyhow::Result<KnownKeys> {
    let remote = Remote::new(&profile(surroundings, &args.remote)?)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("starting the runtime")?;
    runtime.block_on(fetch(&remote, surroundings.paths, args, out)).map_err(at_last)
}

async fn fetch(remote: &Remote, paths: Paths, args: &AuditJobArgs, out: &mut dyn Write) -> anyhow::Result<KnownKeys> {
    let place = format!("/v1/jobs/{}", segment(&args.id));
    let mut ledger: JobLedger = remote.get(&format!("{place}/ledger")).await?;
    while let Some(from) = ledger.next {
        let page: JobLedger = remote.get(&format!("{place}/ledger?from={from}")).await?;
        ledger.entries.extend(page.entries);
        ledger.next = page.next;
    }
    let (landing, as_json) = (Landing::open(paths, &args.out)?, args.remote.json);
    let dir = landing.dir().try_clone().context("opening the folder for what is fetched")?;
    archive(remote, &format!("{place}/artifacts.tar"), &dir).await?;
    if !dir.exists(FILE) {
        landing.settle()?;
        return Err(user(format!("the job has no receipt to hold anything against; what there is is in {}", shown(&args.out))));
    }
    dir.create_dir(INPUTS).context("making a folder for what went into the job")?;
    archive(remote, &format!("{place}/inputs.tar"), &dir.open_dir(INPUTS)?).await?;
    landing.settle()?;
    let known = keys(remote, paths, &args.keys, (as_json, out)).await?;
    audit::check(paths, &args.out, (&known, None), (as_json, out))?;
    let envelope = paths.read(&args.out.join(FILE), ENVELOPE_BYTES_MAX as u64)?;
    let entered = entered(&envelope, &args.id, &ledger)?;
    if as_json {
        writeln!(out, "{}", json!({ "ledger": "ok", "detail": entered }))?;
    } else {
        writeln!(out, "ledger: ok ({entered})")?;
    }
    Ok(known)
}

/// What the ledger's entries come to, held against the receipt.
fn entered(envelope: &[u8], id: &str, ledger: &JobLedger) -> anyhow::Result<String> {
    let wrong = |what: &str| Err(user(format!("the service's ledger does not hold: {what}")));
    let parsed = Envelope::parse(envelope).map_err(|error| user(error.to_string()))?;
    let statement = Statement::parse(parsed.payload()).map_err(|error| user(error.to_string()))?;
    let (mut receipts, mut allocated, mut zeroed) = (0, 0_u64, 0_u64);
    for entry in &ledger.entries {
        let event = serde_json::from_value::<Event>(entry.clone()).context("reading the service's ledger")?;
        if event.job() != Some(id) {
            return wrong("an entry is of another job");
        }
        match event {
            Event::Receipt { receipt, subjects, .. } => {
                receipts += 1;
                if receipt != receipt_digest(envelope) || !statement.subjects().eq(subjects.iter().copied()) {
                    return wrong("its receipt of the job is another");
                }
            }
            Event::AdapterBytes { event: BytesEvent::Allocated, bytes, .. } => allocated += bytes,
            Event::AdapterBytes { event: BytesEvent::Zeroed, bytes, .. } => zeroed += bytes,
            Event::JobFailed { .. } => return wrong("it has the job as failed too"),
            Event::KeyCreated { .. } | Event::AdapterBytes { .. } => {}
        }
    }
    match receipts {
        1 => {}
        0 => return wrong("the receipt is not in it"),
        _ => return wrong("the job has more than one receipt in it"),
    }
    if allocated != zeroed {
        return wrong(&format!("of {} of adapters on the device {} were zeroed", bytes(allocated), bytes(zeroed)));
    }
    let zeroed = format!("all {} of the job's adapters on the device were zeroed", bytes(allocated));
    Ok(format!("the service says that the receipt is in it, once, and that {zeroed}; its chain is for who has the ledger"))
}
