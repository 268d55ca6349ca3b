//! What becomes of a job after an attempt: its receipt and files are kept, or it goes back into the queue.
//!
//! Never keeps half of a result: all of it is one transaction.

use std::io;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_schedule::Lane;
use nodus_state::{Claim, Finish, Kept as Blob, Outcome, Work};

use super::Shared;
use super::board::Backoff;
use super::engines::lane_name;
use super::numbers;
use super::settler::{NO_WRITES, Settler, is_stale};
use crate::books::{Account, Again};
use crate::error::{exit_code, is_disk, is_unsealable, over_quota, refusal_code};
use crate::journal::BegunElsewhere;
use crate::receipt;
use crate::run::conclude::{CANCELLED, INTERNAL, Kept, Office, REFUSED, Status, Verdict, decide, enter};
use crate::run::crew::{Fared, Post};
use crate::store::{Workspace, copy};

/// How the ledger calls a job whose guest process died, again and again.
const GUEST_PROCESS: &str = "guest-process";

/// How it calls a job whose tenant has no room for what it leaves.
const STORED_BYTES: &str = "stored-bytes";

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
    /// What it did could not be written, since the disk took no writes.
    Refused(String),
    /// Its tenant's quota has no room for what it told.
    OverQuota(String),
    /// It told something else than before.
    Diverged(String),
}

/// Settles an attempt, be it after the disk took no writes for a while.
///
/// # Errors
/// Ours: the service ends before; the job runs again when it is started again.
pub(super) async fn settle(settler: Settler, attempted: anyhow::Result<Attempted>) -> anyhow::Result<()> {
    let work = move || match settle_blocking(&settler, attempted) {
        // A job that was taken from this attempt is another's to settle.
        Err(error) if is_stale(&error) => Ok(()),
        done => done,
    };
    tokio::task::spawn_blocking(work).await.context("settling a job")?
}

fn settle_blocking(settler: &Settler, attempted: anyhow::Result<Attempted>) -> anyhow::Result<()> {
    let (shared, claim) = (&settler.shared, settler.claim);
    if let Ok(Attempted { work, fared, .. }) = &attempted {
        settler.persist(|| enter(&mut shared.books(), &account(claim, work.tenant_name.clone()), &fared.bytes))?;
    }
    if end_as_entered(settler, attempted.as_ref().map_or(0, |attempted| attempted.device_ns / 1_000_000))? {
        return Ok(());
    }
    let attempted = match attempted {
        Ok(attempted) => attempted,
        // What its owner can put right: an input is not what it must be.
        Err(error) if exit_code(&error) == 2 => {
            let code = refusal_code(&error).unwrap_or(REFUSED);
            return end(settler, (Outcome::Failed, &error.to_string(), code), 0);
        }
        Err(error) => {
            if let Some(BegunElsewhere { identity }) = error.downcast_ref() {
                shared.board().began.insert(claim.job, *identity);
                return requeue(settler, ("class", "it waits for a device of the class that it began on"));
            }
            let why = format!("{error:#}");
            return if is_disk(&error) { refused(settler, &why, false, 0) } else { again(settler, (&why, Outcome::Broken), false, 0) };
        }
    };
    let is_further = attempted.is_further;
    let device_ms = attempted.device_ns / 1_000_000;
    match &attempted.ending {
        Ending::Over => conclude_over(settler, &attempted, device_ms),
        Ending::Paused => {
            charge(settler, device_ms)?;
            requeue(settler, ("room", "it made room, and goes on later"))
        }
        Ending::GuestProcess(how) => {
            let why = format!("the process that ran the component {how}");
            again(settler, (&why, Outcome::Failed), is_further, device_ms)
        }
        Ending::EngineProcess { how, was_at_work } => {
            let is_guilty = *was_at_work && shared.board().suspects.died(claim.job, attempted.lane == lane_name(Lane::Solo));
            if is_guilty {
                return quarantine(settler, how, device_ms);
            }
            if !was_at_work {
                // The death was others' doing: it does not count against the job.
                tracing::error!(job = %claim.job, attempt = claim.attempt, "a job is to be run again: an engine process {how}");
                charge(settler, device_ms)?;
                return requeue(settler, (INTERNAL, "a fault of the host"));
            }
            again(settler, (&format!("an engine process {how}"), Outcome::Broken), is_further, device_ms)
        }
        Ending::HostFault(why) => again(settler, (why, Outcome::Broken), is_further, device_ms),
        Ending::Refused(why) => refused(settler, why, is_further, device_ms),
        Ending::OverQuota(why) => end(settler, (Outcome::Failed, why, STORED_BYTES), device_ms),
        Ending::Diverged(why) => {
            tracing::error!(job = %claim.job, attempt = claim.attempt, "{why}");
            end(settler, (Outcome::Broken, OURS, INTERNAL), device_ms)
        }
    }
}

/// Ends a job that ends engines.
fn quarantine(settler: &Settler, how: &str, device_ms: u64) -> anyhow::Result<()> {
    let Claim { job, attempt } = settler.claim;
    tracing::error!(%job, attempt, "a job ended its engine's process alone too, and is not run again: it {how}");
    let why = format!("{QUARANTINED}: engines that the job was at work in died again and again, at last one that it had to itself ({how})");
    end(settler, (Outcome::Failed, &why, QUARANTINED), device_ms)
}

/// How the ledger calls a job that is not run again since it ends engines.
const QUARANTINED: &str = "quarantined";

/// What owners are told of a fault that is not theirs.
const OURS: &str = "the host failed; its operator's log says how";

/// Signs, and keeps what there is to keep.
fn conclude_over(settler: &Settler, attempted: &Attempted, device_ms: u64) -> anyhow::Result<()> {
    let Attempted { work, post, fared, workspace, lane, is_further, .. } = attempted;
    let (shared, account) = (&settler.shared, account(settler.claim, work.tenant_name.clone()));
    let broken = |error: &anyhow::Error| again(settler, (&format!("{error:#}"), Outcome::Broken), *is_further, device_ms);
    let no_room = settler.persist(|| no_room(shared, settler.claim, workspace.dir()))?;
    if let Some(why) = no_room.as_ref().filter(|_| fared.has_completed()) {
        return end(settler, (Outcome::Failed, why, STORED_BYTES), device_ms);
    }
    let verdict = settler.persist(|| {
        let mut books = shared.books();
        match decide(&mut Office { components: None, books: &mut books, lane }, &account, post, Ok(fared)) {
            Verdict { status: Status::Broken(error), .. } if is_disk(&error) => Err(error),
            verdict => Ok(verdict),
        }
    })?;
    let (outcome, message) = match &verdict.status {
        Status::Completed => (Outcome::Succeeded, None),
        Status::Stopped => (Outcome::Stopped, None),
        Status::Cancelled | Status::NotStarted => (Outcome::Cancelled, None),
        Status::Failed(why) => (Outcome::Failed, Some(why.as_str())),
        Status::Broken(error) if is_unsealable(error) => {
            let Claim { job, attempt } = settler.claim;
            tracing::error!(%job, attempt, "a job has a receipt that cannot be, and is not run again for it: {error:#}");
            return end(settler, (Outcome::Broken, OURS, INTERNAL), device_ms);
        }
        Status::Broken(error) => return broken(error),
    };
    let is_kept = no_room.is_none() && !matches!(verdict.kept, Kept::Nothing | Kept::Left);
    let kept = settler.persist(|| match kept(shared, workspace.dir(), outcome.has_receipt(), is_kept) {
        Err(error) if is_disk(&error) => Err(error),
        kept => Ok(kept),
    })?;
    let (receipt, artifacts) = match kept {
        Ok(kept) => kept,
        Err(error) => return broken(&error),
    };
    let finish = Finish { outcome, message, receipt: receipt.as_deref(), artifacts: &artifacts, events: &[], device_ms };
    finish_job(settler, &finish)
}

/// Puts a job that was no fault of its own back into the queue; where that was so too often, it ends as `last`. Where it was kept further on
/// since it failed before, this failure is the first of those that count together.
fn again(settler: &Settler, (why, last): (&str, Outcome), is_further: bool, device_ms: u64) -> anyhow::Result<()> {
    let (shared, Claim { job, attempt }) = (&settler.shared, settler.claim);
    tracing::error!(%job, attempt, "a job is to be run again: {why}");
    let (told, code) = if last == Outcome::Failed { (why, GUEST_PROCESS) } else { ("a fault of the host", INTERNAL) };
    let backoff = {
        let mut board = shared.board();
        let before = board.jobs_later.get(&job).filter(|_| !is_further);
        let backoff = Backoff::after(before, shared.options.backoff, told.to_owned());
        board.jobs_later.insert(job, backoff.clone());
        backoff
    };
    let failures = settler.persist(|| Ok(shared.state.count_failure(&settler.claim)?))?;
    if backoff.count >= shared.options.faults_max || failures >= FAILURES_MAX {
        let times = u64::from(backoff.count).max(failures);
        let message = if last == Outcome::Failed { format!("{why}, {times} times") } else { OURS.to_owned() };
        return end(settler, (last, &message, code), device_ms);
    }
    charge(settler, device_ms)?;
    requeue(settler, (code, told))
}

/// Puts a job back into the queue whose attempt was cut off since the disk took no writes: it goes on from what is there, however often that is.
fn refused(settler: &Settler, why: &str, is_further: bool, device_ms: u64) -> anyhow::Result<()> {
    let (shared, Claim { job, attempt }) = (&settler.shared, settler.claim);
    tracing::warn!(%job, attempt, "a job was cut off, and goes on once the disk takes writes: {why}");
    {
        let mut board = shared.board();
        let before = board.jobs_later.get(&job).filter(|_| !is_further);
        let backoff = Backoff::refused(before, shared.options.backoff, NO_WRITES.to_owned());
        board.jobs_later.insert(job, backoff);
    }
    charge(settler, device_ms)?;
    requeue(settler, ("disk", NO_WRITES))
}

/// Takes up a job that ran when the service ended: it goes back into the queue, unless it had come to an end that only its rows lack.
pub(super) fn recover(settler: &Settler) -> anyhow::Result<()> {
    if end_as_entered(settler, 0)? { Ok(()) } else { requeue(settler, ("restart", "the service was started again")) }
}

/// Ends a job of which the ledger says already that it ended without a receipt: that is final, whatever it would come to now. Whether it says so.
fn end_as_entered(settler: &Settler, device_ms: u64) -> anyhow::Result<bool> {
    let Claim { job, attempt } = settler.claim;
    let Some(code) = settler.persist(|| settler.shared.books().failed(&job.to_string()))? else { return Ok(false) };
    tracing::warn!(%job, attempt, code, "a job had ended, and the service before that was written: it ends as the ledger has it");
    let (outcome, message) = match code.as_str() {
        CANCELLED => (Outcome::Cancelled, None),
        INTERNAL => (Outcome::Broken, Some(OURS.to_owned())),
        code => (Outcome::Failed, Some(format!("it ended by `{code}`; the service ended before more of that was written down"))),
    };
    finish_job(settler, &Finish { outcome, message: message.as_deref(), receipt: None, artifacts: &[], events: &[], device_ms })?;
    Ok(true)
}

/// Puts a job back into the queue. One that is to be cut off ends there.
pub(super) fn requeue(settler: &Settler, (why, reason): (&'static str, &str)) -> anyhow::Result<()> {
    numbers::again(why);
    let is_waiting = settler.persist(|| Ok(settler.shared.state.requeue(&settler.claim, reason)?))?;
    if is_waiting {
        return Ok(());
    }
    fail(settler, CANCELLED)?;
    let (outcome, message) = (Outcome::Cancelled, None);
    finish_job(settler, &Finish { outcome, message, receipt: None, artifacts: &[], events: &[], device_ms: 0 })
}

/// Ends a job without a result; `code` is the ledger's word for why.
pub(super) fn end(settler: &Settler, (outcome, message, code): (Outcome, &str, &str), device_ms: u64) -> anyhow::Result<()> {
    fail(settler, code)?;
    finish_job(settler, &Finish { outcome, message: Some(message), receipt: None, artifacts: &[], events: &[], device_ms })
}

/// Enters that a job ended without a receipt, before it has its end: what a crash keeps from coming to the second is ended by the first.
fn fail(settler: &Settler, code: &str) -> anyhow::Result<()> {
    let (shared, claim) = (&settler.shared, settler.claim);
    settler.persist(|| {
        let tenant = shared.state.owner(claim.job).context("reading whose the job is")?.name;
        shared.books().fail(&account(claim, tenant), code)
    })
}

/// As the ledger knows an attempt's job.
fn account(claim: Claim, tenant: String) -> Account {
    Account { job: claim.job.to_string(), tenant, again: Again::Attempt }
}

/// The last transaction: the end and all that is kept; what was kept for another attempt goes. The ledger has its line by then: should the
/// process die before this, a job that ended well is run again, to the same bytes and the same line, and any other ends as its line says.
fn finish_job(settler: &Settler, finish: &Finish<'_>) -> anyhow::Result<()> {
    let (shared, job) = (&settler.shared, settler.claim.job);
    settler.persist(|| Ok(shared.state.finish(&settler.claim, finish)?))?;
    numbers::ended(finish.outcome);
    shared.shelf.remove(&job.to_string());
    shared.board().jobs_later.remove(&job);
    settler.persist(|| shared.books().settle(&job.to_string()))
}

fn charge(settler: &Settler, device_ms: u64) -> anyhow::Result<()> {
    settler.persist(|| Ok(settler.shared.state.charge(&settler.claim, device_ms)?))
}

/// Receipt and files of a job that ended, in the state's keeping.
type Keeping = (Option<Vec<u8>>, Vec<(String, Blob)>);

fn kept(shared: &Shared, dir: &Dir, has_receipt: bool, has_files: bool) -> anyhow::Result<Keeping> {
    let receipt = has_receipt.then(|| dir.read(receipt::FILE)).transpose().context("reading the receipt")?;
    let artifacts = if has_files { artifacts(shared, dir)? } else { Vec::new() };
    Ok((receipt, artifacts))
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

/// Why there is no room for a job's results, if there is none. One whose receipt is in the ledger has had it.
fn no_room(shared: &Shared, claim: Claim, dir: &Dir) -> anyhow::Result<Option<String>> {
    if shared.books().unsettled()?.contains(&claim.job.to_string()) {
        return Ok(None);
    }
    let mut paths = Vec::new();
    list(dir, "", &mut paths).context("listing the results")?;
    let sizes = paths.iter().map(|path| Ok(dir.metadata(path)?.len())).sum::<io::Result<u64>>();
    let granted = shared.state.grant(&claim, sizes.context("measuring the results")?, 0).context("asking for room for the results");
    match granted {
        Ok(_) => Ok(None),
        Err(error) => over_quota(&error).map(Some).ok_or(error),
    }
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
