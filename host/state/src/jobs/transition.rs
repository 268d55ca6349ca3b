//! What whoever runs the jobs does with them: claims, requeues, finishes.
//!
//! Never lets a holder write whose claim was taken from it.

use rusqlite::{OptionalExtension as _, Row, Transaction, params};
use serde_json::Value;

use crate::blobs::Kept;
use crate::change::{Change, What};
use crate::error::{Result, StateError};
use crate::events::{NewEvent, append, push_state, state_body};
use crate::ids::{CohortId, JobId, TenantId};
use crate::items::enter_blob;
use crate::state::{State, now_ms};
use crate::tokens::digest_sql;
use crate::words::{JobState, Outcome, Stop};

/// The right to run a job, for one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Which.
    pub job: JobId,
    /// The how-manieth, from 1.
    pub attempt: u64,
}

/// How a job ends for good.
#[derive(Debug)]
pub struct Finish<'a> {
    /// How.
    pub outcome: Outcome,
    /// What its owner is told, where it did not end well.
    pub message: Option<&'a str>,
    /// The signed receipt's bytes: of a job that ended well, and of no other.
    pub receipt: Option<&'a [u8]>,
    /// Every file that is kept, by its path in the results (`adapter/adapter_model.safetensors`, `losses.jsonl`).
    pub artifacts: &'a [(String, Kept)],
    /// What it told last.
    pub events: &'a [NewEvent],
    /// Time on the device that was not charged yet.
    pub device_ms: u64,
}

/// A job whose state may be changed, as it is in this transaction.
pub(crate) struct Held {
    pub(crate) number: i64,
    pub(crate) cohort: i64,
    pub(crate) cohort_id: CohortId,
    pub(crate) tenant: TenantId,
    pub(crate) state: JobState,
    pub(crate) attempts: u64,
    pub(crate) stop: Option<Stop>,
}

/// Any job, whoever owns it; `of` narrows it to one tenant's.
pub(crate) fn job(view: &Transaction<'_>, id: JobId, of: Option<TenantId>) -> Result<Held> {
    let select = "SELECT jobs.number, cohort, cohorts.id, jobs.tenant, state, attempts, stop
         FROM jobs JOIN cohorts ON cohort = cohorts.number WHERE jobs.id = ?1 AND jobs.tenant = ifnull(?2, jobs.tenant) AND leaving = 0";
    let row = |row: &Row<'_>| {
        Ok(Held {
            number: row.get(0)?,
            cohort: row.get(1)?,
            cohort_id: row.get(2)?,
            tenant: row.get(3)?,
            state: row.get(4)?,
            attempts: row.get(5)?,
            stop: row.get(6)?,
        })
    };
    view.prepare_cached(select)?.query_row((id, of), row).optional()?.ok_or(StateError::NotFound("job"))
}

/// The job of a claim that still holds.
pub(crate) fn holder(view: &Transaction<'_>, claim: &Claim) -> Result<Held> {
    match job(view, claim.job, None) {
        Ok(held) if held.state == JobState::Running && held.attempts == claim.attempt => Ok(held),
        Ok(_) | Err(StateError::NotFound(_)) => Err(StateError::StaleClaim),
        Err(error) => Err(error),
    }
}

impl Held {
    pub(crate) fn expect(&self, state: JobState, expected: &'static str) -> Result<()> {
        if self.state == state { Ok(()) } else { Err(StateError::WrongState { found: self.state, expected }) }
    }

    pub(crate) fn place(&self) -> (i64, i64) {
        (self.cohort, self.number)
    }

    pub(crate) fn change(&self, job: JobId, what: What) -> Change {
        Change { tenant: self.tenant, cohort: self.cohort_id, job: Some(job), what }
    }
}

impl State {
    /// Claims waiting jobs: all of them or none, so that the members of a sweep go together.
    ///
    /// # Errors
    /// One of them does not wait any more: none was claimed.
    pub fn claim(&self, jobs: &[JobId], placed: &str) -> Result<Vec<Claim>> {
        self.change(|transaction, changes| {
            let claim = |id: &JobId| {
                let held = job(transaction, *id, None)?;
                held.expect(JobState::Queued, "queued")?;
                run(transaction, changes, *id, &held, placed)
            };
            jobs.iter().map(claim).collect()
        })
    }

    /// Takes over a running job whose holder is gone: the service was ended, or lost the process.
    ///
    /// # Errors
    /// It does not run.
    pub fn reclaim(&self, id: JobId, placed: &str) -> Result<Claim> {
        self.change(|transaction, changes| {
            let held = job(transaction, id, None)?;
            held.expect(JobState::Running, "running")?;
            run(transaction, changes, id, &held, placed)
        })
    }

    /// Puts a running job back where it was in the queue: our fault, and it is to be tried again. One that is to be cut off stays as it is: whoever
    /// holds it ends it. Whether it waits now.
    ///
    /// # Errors
    /// The claim is stale.
    pub fn requeue(&self, claim: &Claim, reason: &str) -> Result<bool> {
        self.change(|transaction, changes| {
            let held = holder(transaction, claim)?;
            if held.stop == Some(Stop::Cancel) {
                return Ok(false);
            }
            changes.push(held.change(claim.job, What::State));
            let update = "UPDATE jobs SET state = 'queued', reason = ? WHERE number = ?";
            transaction.prepare_cached(update)?.execute((reason, held.number))?;
            push_state(transaction, held.place(), &state_body("queued", &[("reason", Value::from(reason))]))?;
            Ok(true)
        })
    }

    /// Ends a running job, with all that is kept of it, in one transaction.
    ///
    /// # Errors
    /// The claim is stale; the disk refuses, and the job still runs.
    pub fn finish(&self, claim: &Claim, finish: &Finish<'_>) -> Result<()> {
        self.change(|transaction, changes| {
            let held = holder(transaction, claim)?;
            append(transaction, held.place(), finish.events)?;
            for (path, blob) in finish.artifacts {
                enter_blob(transaction, blob)?;
                let insert = "INSERT INTO artifacts (job, path, digest) VALUES (?, ?, ?)";
                transaction.prepare_cached(insert)?.execute((held.number, path, digest_sql(blob.digest())))?;
            }
            charge(transaction, &held, finish.device_ms)?;
            end(transaction, &held, (finish.outcome.into(), finish.message, finish.receipt))?;
            changes.push(held.change(claim.job, What::State));
            Ok(())
        })
    }

    /// Counts a failure of the host that a running job met; how many it met in all.
    ///
    /// # Errors
    /// The claim is stale.
    pub fn count_failure(&self, claim: &Claim) -> Result<u64> {
        self.database.write(|transaction| {
            let held = holder(transaction, claim)?;
            let update = "UPDATE jobs SET failures = failures + 1 WHERE number = ? RETURNING failures";
            Ok(transaction.prepare_cached(update)?.query_row([held.number], |row| row.get(0))?)
        })
    }

    /// Charges time on the device to a running job and its tenant.
    ///
    /// # Errors
    /// The claim is stale.
    pub fn charge(&self, claim: &Claim, device_ms: u64) -> Result<()> {
        self.database.write(|transaction| charge(transaction, &holder(transaction, claim)?, device_ms))
    }
}

fn run(transaction: &Transaction<'_>, changes: &mut Vec<Change>, id: JobId, held: &Held, placed: &str) -> Result<Claim> {
    let attempt = held.attempts + 1;
    let update = "UPDATE jobs SET state = 'running', attempts = ?1, placed = ?2, reason = NULL, started_ms = ifnull(started_ms, ?3)
         WHERE number = ?4";
    transaction.prepare_cached(update)?.execute(params![attempt, placed, now_ms(), held.number])?;
    let body = state_body("running", &[("attempt", Value::from(attempt)), ("placed", Value::from(placed))]);
    push_state(transaction, held.place(), &body)?;
    changes.push(held.change(id, What::State));
    Ok(Claim { job: id, attempt })
}

/// Ends a job that waits or runs.
pub(crate) fn end(
    transaction: &Transaction<'_>,
    held: &Held,
    (state, message, receipt): (JobState, Option<&str>, Option<&[u8]>),
) -> Result<()> {
    let update = "UPDATE jobs SET state = ?, message = ?, receipt = ?, reason = NULL, ended_ms = ? WHERE number = ?";
    transaction.prepare_cached(update)?.execute(params![state, message, receipt, now_ms(), held.number])?;
    push_state(transaction, held.place(), &state_body(state.as_str(), &[("message", Value::from(message))]))
}

fn charge(transaction: &Transaction<'_>, held: &Held, device_ms: u64) -> Result<()> {
    let job = "UPDATE jobs SET device_ms = device_ms + ? WHERE number = ?";
    transaction.prepare_cached(job)?.execute((device_ms, held.number))?;
    let tenant = "UPDATE tenants SET device_ms = device_ms + ? WHERE id = ?";
    transaction.prepare_cached(tenant)?.execute((device_ms, held.tenant))?;
    Ok(())
}
