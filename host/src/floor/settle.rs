//! What becomes of a job after an attempt: its receipt and files are kept, or it goes back into the queue.
//!
//! Never keeps half of a result: all of it is one transaction.

use std::cell::Cell;
use std::io;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_schedule::Lane;
use nodus_state::{Claim, Finish, Kept as Blob, Outcome, StateError, Work};

use super::Shared;
use super::board::Backoff;
use super::engines::lane_name;
use super::numbers;
use crate::books::{Account, Again};
use crate::error::{exit_code, refusal_code};
use crate::journal::BegunElsewhere;
use crate::receipt;
use crate::run::conclude::{CANCELLED, INTERNAL, Kept, Office, REFUSED, Status, conclude, enter};
use crate::run::crew::{Fared, Post};
use crate::store::{Workspace, copy};

/// How the ledger calls a job whose guest process died, again and again.
const GUEST_PROCESS: &str = "guest-process";
/// How often a settlement is tried that the disk refuses.
const TRIES: u32 = 5;

/// Failures of the host that one job may meet in all, however far it got between them, over restarts of the service.
const FAILURES_MAX: u64 = 100;

/// An attempt that ended.
pub(super) struct Attempted {
    pub(super) work: Work,
    pub(super) post: Post,
    pub(super) fared: Fared,
    pub(super) ending: Ending,
    /// Whether the job was kept further on than it had been before.
    pub(super) is_further: bool,
    /// Time in passes.
    pub(super) device_ns: u64,
    pub(super) lane: &'static str,
    /// The job's folder; it goes with this.
    pub(super) workspace: Workspace,
}

/// How it ended.
pub(super) enum Ending {
    /// The job came to an end.
    Over,
    /// It made room.
    Paused,
    /// Its guest process died, which may be its own doing.
    GuestProcess(String),
    /// Its engine's process died, which may be the doing of a job that was at work in it.
    EngineProcess { how: String, was_at_work: bool },
    /// The host failed it.
    HostFault(String),
    /// It told something else than before.
    Diverged(String),
}

/// Settles an attempt.
///
/// # Errors
/// Ours: the state refuses, again and again; the job runs again when the service is started again.
pub(super) async fn settle(shared: &Arc<Shared>, claim: Claim, attempted: anyhow::Result<Attempted>) -> anyhow::Result<()> {
    let settler = shared.clone();
    let work = move || settle_blocking(&settler, claim, attempted);
    tokio::task::spawn_blocking(work).await.context("settling a job")?
}

fn settle_blocking(shared: &Shared, claim: Claim, attempted: anyhow::Result<Attempted>) -> anyhow::Result<()> {
    let attempted = match attempted {
        Ok(attempted) => attempted,
        // What its owner can put right: an input is not what it must be.
        Err(error) if exit_code(&error) == 2 => {
            let code = refusal_code(&error).unwrap_or(REFUSED);
            return end(shared, claim, (Outcome::Failed, &error.to_string(), code), 0);
        }
        Err(error) => {
            if let Some(BegunElsewhere { identity }) = error.downcast_ref() {
                shared.board().began.insert(claim.job, *identity);
                return requeue(shared, claim, ("class", "it waits for a device of the class that it began on"));
            }
            return again(shared, claim, (&format!("{error:#}"), Outcome::Broken), false, 0);
        }
    };
    let is_further = attempted.is_further;
    let device_ms = attempted.device_ns / 1_000_000;
    let account = account(claim, attempted.work.tenant_name.clone());
    match &attempted.ending {
        Ending::Over => conclude_over(shared, claim, &attempted, &account, device_ms),
        ending => {
            let mut books = shared.books.lock().unwrap_or_else(PoisonError::into_inner);
            enter(&mut books, &account, &attempted.fared.bytes)?;
            drop(books);
            match ending {
                Ending::Over | Ending::Paused => {
                    charge(shared, claim, device_ms)?;
                    requeue(shared, claim, ("room", "it made room, and goes on later"))
                }
                Ending::GuestProcess(how) => {
                    let why = format!("the process that ran the component {how}");
                    again(shared, claim, (&why, Outcome::Failed), is_further, device_ms)
                }
                Ending::EngineProcess { how, was_at_work } => {
                    let is_guilty = *was_at_work && shared.board().suspects.died(claim.job, attempted.lane == lane_name(Lane::Solo));
                    if is_guilty {
                        return quarantine(shared, claim, how, device_ms);
                    }
                    if !was_at_work {
                        // The death was others' doing: it does not count against the job.
                        tracing::error!(job = %claim.job, attempt = claim.attempt, "a job is to be run again: an engine process {how}");
                        charge(shared, claim, device_ms)?;
                        return requeue(shared, claim, (INTERNAL, "a fault of the host"));
                    }
                    again(shared, claim, (&format!("an engine process {how}"), Outcome::Broken), is_further, device_ms)
                }
                Ending::HostFault(why) => again(shared, claim, (why, Outcome::Broken), is_further, device_ms),
                Ending::Diverged(why) => {
                    tracing::error!(job = %claim.job, attempt = claim.attempt, "{why}");
                    end(shared, claim, (Outcome::Broken, OURS, INTERNAL), device_ms)
                }
            }
        }
    }
}

/// Ends a job that ends engines.
fn quarantine(shared: &Shared, claim: Claim, how: &str, device_ms: u64) -> anyhow::Result<()> {
    tracing::error!(job = %claim.job, attempt = claim.attempt, "a job ended its engine's process alone too, and is not run again: it {how}");
    let why = format!("{QUARANTINED}: engines that the job was at work in died again and again, at last one that it had to itself ({how})");
    end(shared, claim, (Outcome::Failed, &why, QUARANTINED), device_ms)
}

/// How the ledger calls a job that is not run again since it ends engines.
const QUARANTINED: &str = "quarantined";

/// What owners are told of a fault that is not theirs.
const OURS: &str = "the host failed; its operator's log says how";

/// Signs, and keeps what there is to keep.
fn conclude_over(shared: &Shared, claim: Claim, attempted: &Attempted, account: &Account, device_ms: u64) -> anyhow::Result<()> {
    let Attempted { post, fared, .. } = attempted;
    let verdict = {
        let mut books = shared.books.lock().unwrap_or_else(PoisonError::into_inner);
        let mut office = Office { store: &shared.store, books: &mut books, lane: attempted.lane };
        conclude(&mut office, account, post, fared)
    };
    let (outcome, message) = match &verdict.status {
        Status::Completed => (Outcome::Succeeded, None),
        Status::Stopped => (Outcome::Stopped, None),
        Status::Cancelled | Status::NotStarted => (Outcome::Cancelled, None),
        Status::Failed(why) => (Outcome::Failed, Some(why.as_str())),
        Status::Broken(error) => return again(shared, claim, (&format!("{error:#}"), Outcome::Broken), attempted.is_further, device_ms),
    };
    let dir = attempted.workspace.dir();
    let is_kept = !matches!(verdict.kept, Kept::Nothing | Kept::Left);
    let receipt = outcome.has_receipt().then(|| dir.read(receipt::FILE)).transpose().context("reading the receipt")?;
    let artifacts = if is_kept { artifacts(shared, dir)? } else { Vec::new() };
    let finish = Finish { outcome, message, receipt: receipt.as_deref(), artifacts: &artifacts, events: &[], device_ms };
    finish_job(shared, claim, &finish)
}

/// Puts a job that was no fault of its own back into the queue; where that was so too often, it ends as `last`. Where it was kept further on
/// since it failed before, this failure is the first of those that count together.
fn again(shared: &Shared, claim: Claim, (why, last): (&str, Outcome), is_further: bool, device_ms: u64) -> anyhow::Result<()> {
    tracing::error!(job = %claim.job, attempt = claim.attempt, "a job is to be run again: {why}");
    let (told, code) = if last == Outcome::Failed { (why, GUEST_PROCESS) } else { ("a fault of the host", INTERNAL) };
    let backoff = {
        let mut board = shared.board();
        let before = board.jobs_later.get(&claim.job).filter(|_| !is_further);
        let backoff = Backoff::after(before, shared.options.backoff, told.to_owned());
        board.jobs_later.insert(claim.job, backoff.clone());
        backoff
    };
    let failures = Cell::new(0);
    persist(|| shared.state.count_failure(&claim).map(|count| failures.set(count)))?;
    if backoff.count >= shared.options.faults_max || failures.get() >= FAILURES_MAX {
        let times = u64::from(backoff.count).max(failures.get());
        let message = if last == Outcome::Failed { format!("{why}, {times} times") } else { OURS.to_owned() };
        return end(shared, claim, (last, &message, code), device_ms);
    }
    charge(shared, claim, device_ms)?;
    requeue(shared, claim, (code, told))
}

/// Puts a job back into the queue. One that is to be cut off ends there.
pub(super) fn requeue(shared: &Shared, claim: Claim, why: (&'static str, &str)) -> anyhow::Result<()> {
    put_back(shared, claim, why, claim.attempt > 1)
}

/// The same of a job that ran when the service ended. It may have come to its end then, and the ledger have its line.
pub(super) fn take_up(shared: &Shared, claim: Claim) -> anyhow::Result<()> {
    put_back(shared, claim, ("restart", "the service was started again"), true)
}

fn put_back(shared: &Shared, claim: Claim, (why, reason): (&'static str, &str), may_have_ended: bool) -> anyhow::Result<()> {
    numbers::again(why);
    let waits = Cell::new(true);
    persist(|| shared.state.requeue(&claim, reason).map(|is_waiting| waits.set(is_waiting)))?;
    if waits.get() {
        return Ok(());
    }
    fail(shared, claim, CANCELLED, may_have_ended)?;
    finish_job(
        shared,
        claim,
        &Finish { outcome: Outcome::Cancelled, message: None, receipt: None, artifacts: &[], events: &[], device_ms: 0 },
    )
}

/// Ends a job without a result; `code` is the ledger's word for why.
pub(super) fn end(shared: &Shared, claim: Claim, (outcome, message, code): (Outcome, &str, &str), device_ms: u64) -> anyhow::Result<()> {
    fail(shared, claim, code, claim.attempt > 1)?;
    finish_job(shared, claim, &Finish { outcome, message: Some(message), receipt: None, artifacts: &[], events: &[], device_ms })
}

/// Enters that a job ended without a receipt, before it has its end: a crash between the two does both again, and enters it once.
fn fail(shared: &Shared, claim: Claim, code: &str, may_have_ended: bool) -> anyhow::Result<()> {
    let tenant = shared.state.work(claim.job).context("reading the job")?.tenant_name;
    let account = Account { again: Again::Attempt(may_have_ended), ..account(claim, tenant) };
    shared.books.lock().unwrap_or_else(PoisonError::into_inner).fail(&account, code)
}

/// As the ledger knows an attempt's job.
fn account(claim: Claim, tenant: String) -> Account {
    Account { job: claim.job.to_string(), tenant, again: Again::Attempt(claim.attempt > 1) }
}

/// The last transaction: the end and all that is kept; what was kept for another attempt goes. The ledger has its line by then: should the
/// process die before this, the job is run again, to the same bytes and the same line.
fn finish_job(shared: &Shared, claim: Claim, finish: &Finish<'_>) -> anyhow::Result<()> {
    persist(|| shared.state.finish(&claim, finish))?;
    numbers::ended(finish.outcome);
    shared.shelf.remove(&claim.job.to_string());
    shared.board().jobs_later.remove(&claim.job);
    shared.books.lock().unwrap_or_else(PoisonError::into_inner).settle(&claim.job.to_string())
}

fn charge(shared: &Shared, claim: Claim, device_ms: u64) -> anyhow::Result<()> {
    persist(|| shared.state.charge(&claim, device_ms))
}

/// Tries again what the disk refuses for a while.
fn persist(write: impl Fn() -> Result<(), StateError>) -> anyhow::Result<()> {
    let mut tries = 0;
    loop {
        match write() {
            Err(error) if tries < TRIES && !matches!(error, StateError::StaleClaim) => {
                tries += 1;
                tracing::warn!("the state refuses, and is asked again: {error}");
                std::thread::sleep(Duration::from_millis(200) * 2_u32.pow(tries));
            }
            done => return done.or_else(unless_stale),
        }
    }
}

/// A job that was taken from this attempt is another's to settle.
fn unless_stale(error: StateError) -> anyhow::Result<()> {
    match error {
        StateError::StaleClaim => Ok(()),
        other => Err(other).context("settling a job"),
    }
}

/// Every file of a job's folder, by its path in it; the receipt apart.
fn artifacts(shared: &Shared, dir: &Dir) -> anyhow::Result<Vec<(String, Blob)>> {
    let mut paths = Vec::new();
    list(dir, "", &mut paths).context("listing the results")?;
    paths.retain(|path| path != receipt::FILE);
    paths.sort();
    let keep = |path: String| {
        let mut staged = shared.state.stage(u64::MAX)?;
        copy(&mut dir.open(&path)?, &mut staged).with_context(|| format!("keeping {path}"))?;
        Ok((path, staged.keep()?))
    };
    paths.into_iter().map(keep).collect()
}

fn list(dir: &Dir, above: &str, found: &mut Vec<String>) -> io::Result<()> {
    for entry in dir.entries()? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() {
            list(&entry.open_dir()?, &format!("{above}{name}/"), found)?;
        } else {
            found.push(format!("{above}{name}"));
        }
    }
    Ok(())
}
