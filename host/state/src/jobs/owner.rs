//! What a job's owner sees and does.
//!
//! Never finds a job of another tenant.

use std::collections::HashMap;

use rusqlite::{OptionalExtension as _, Row, Rows, Transaction, params};
use serde_json::Value;

use super::queue::{SPECS, inputs, spec};
use super::transition::{end, job};
use crate::change::What;
use crate::error::{Result, StateError};
use crate::events::{push_state, state_body};
use crate::ids::{CohortId, JobId, TenantId};
use crate::items::{FileRef, file_refs};
use crate::spec::JobSpec;
use crate::state::State;
use crate::words::{JobState, Role, Stop};

/// A job, as its owner sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Which.
    pub id: JobId,
    /// Of which cohort.
    pub cohort: CohortId,
    /// Which of its members, from 0.
    pub member: u64,
    /// What it is made of.
    pub spec: JobSpec,
    /// Where it is in its life.
    pub state: JobState,
    /// How many of its owner's jobs go before it, while it waits.
    pub ahead: Option<u64>,
    /// Why it waits.
    pub reason: Option<String>,
    /// Where it runs, or ran last.
    pub placed: Option<String>,
    /// What was asked for.
    pub stop: Option<Stop>,
    /// How it ended, where it did not end well.
    pub message: Option<String>,
    /// How often it was started.
    pub attempts: u64,
    /// Whether it has a receipt.
    pub has_receipt: bool,
    /// Time on the device.
    pub device_ms: u64,
    /// When it came in.
    pub submitted_ms: u64,
    /// When it was started first.
    pub started_ms: Option<u64>,
    /// When it ended.
    pub ended_ms: Option<u64>,
}

/// Which jobs are listed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Of this state.
    pub state: Option<JobState>,
    /// Of this cohort.
    pub cohort: Option<CohortId>,
    /// On this model.
    pub model: Option<String>,
    /// Older than this one: the last of the page before.
    pub before: Option<JobId>,
}

/// Some of a tenant's jobs: as many as were asked for, or fewer, which together are not too much for one answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// In their order.
    pub jobs: Vec<Job>,
    /// Whether there are more after them.
    pub is_more: bool,
}

/// What the jobs of one page may be made of, together, in bytes; one alone may have more.
const PAGE_BYTES_MAX: usize = 4 << 20;

/// What asking a job to stop came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// It waited, and is cancelled.
    AtOnce,
    /// It was started: whoever runs it will hear.
    Asked,
}

const COLUMNS: &str =
    "jobs.id, cohorts.id, member, common_specs.spec, state, reason, placed, stop, message, attempts, receipt IS NOT NULL, device_ms,
    jobs.submitted_ms, started_ms, ended_ms, jobs.number, specs.spec";

const TABLES: &str = "jobs JOIN cohorts ON jobs.cohort = cohorts.number";

/// The numbers of a tenant's waiting jobs, in their order.
const LINE: &str = "SELECT number FROM jobs WHERE tenant = ? AND state = 'queued' ORDER BY priority, number";

/// A page of a tenant's jobs.
fn listed() -> String {
    format!(
        "SELECT {COLUMNS} FROM {TABLES} {SPECS}
         WHERE jobs.tenant = ?1 AND (?2 IS NULL OR state = ?2) AND (?3 IS NULL OR cohorts.id = ?3) AND (?4 IS NULL OR model = ?4)
         AND (?5 IS NULL OR jobs.number < ?5) AND leaving = 0 ORDER BY jobs.number DESC LIMIT ?6"
    )
}

/// Jobs of a query, so many at most, with what goes before each. The line is read once for all of them, and never by those that do not wait.
fn page(view: &Transaction<'_>, of: TenantId, mut rows: Rows<'_>, count_max: usize) -> Result<Page> {
    let (mut found, mut bytes, mut is_more) = (Vec::new(), 0_usize, false);
    while let Some(row) = rows.next()? {
        let length = |column: usize| Ok::<_, rusqlite::Error>(row.get_ref(column)?.as_bytes_or_null()?.map_or(0, <[u8]>::len));
        bytes = bytes.saturating_add(length(3)?).saturating_add(length(16)?);
        is_more = found.len() >= count_max || (!found.is_empty() && bytes > PAGE_BYTES_MAX);
        if is_more {
            break;
        }
        found.push(from_row(row)?);
    }
    if found.iter().any(|(_, job)| job.state == JobState::Queued) {
        let mut statement = view.prepare_cached(LINE)?;
        let line = statement.query_map([of], |row| row.get(0))?.collect::<rusqlite::Result<Vec<i64>>>()?;
        let places: HashMap<i64, u64> = line.into_iter().zip(0..).collect();
        found.iter_mut().for_each(|(number, job)| job.ahead = places.get(number).copied());
    }
    Ok(Page { jobs: found.into_iter().map(|(_, job)| job).collect(), is_more })
}

fn from_row(row: &Row<'_>) -> rusqlite::Result<(i64, Job)> {
    let job = Job {
        id: row.get(0)?,
        cohort: row.get(1)?,
        member: row.get(2)?,
        spec: spec(row, (3, 16))?,
        state: row.get(4)?,
        reason: row.get(5)?,
        placed: row.get(6)?,
        stop: row.get(7)?,
        message: row.get(8)?,
        attempts: row.get(9)?,
        has_receipt: row.get(10)?,
        device_ms: row.get(11)?,
        submitted_ms: row.get(12)?,
        started_ms: row.get(13)?,
        ended_ms: row.get(14)?,
        ahead: None,
    };
    Ok((row.get(15)?, job))
}

impl State {
    /// A tenant's job.
    ///
    /// # Errors
    /// The tenant has no such job.
    pub fn job(&self, of: TenantId, id: JobId) -> Result<Job> {
        let found = self.database.read(|view| {
            let select = format!("SELECT {COLUMNS} FROM {TABLES} {SPECS} WHERE jobs.id = ? AND jobs.tenant = ? AND leaving = 0");
            let mut statement = view.prepare_cached(&select)?;
            page(view, of, statement.query((id, of))?, 1)
        })?;
        self.excused(found.jobs).pop().ok_or(StateError::NotFound("job"))
    }

    /// A tenant's jobs, the newest first.
    ///
    /// # Errors
    /// `before` is no job of the tenant's.
    pub fn jobs(&self, of: TenantId, filter: &Filter, count_max: usize) -> Result<Page> {
        let found = self.database.read(|view| {
            let before = filter.before.map(|id| job(view, id, Some(of)).map(|held| held.number)).transpose()?;
            let mut statement = view.prepare_cached(&listed())?;
            // One more than is shown says whether there is another page.
            let count = (count_max as u64).saturating_add(1);
            page(view, of, statement.query(params![of, filter.state, filter.cohort, filter.model, before, count])?, count_max)
        })?;
        Ok(Page { jobs: self.excused(found.jobs), ..found })
    }

    /// The members of a tenant's cohort after one, or from the first on, in order.
    ///
    /// # Errors
    /// The tenant has no such cohort.
    pub fn members(&self, of: TenantId, cohort: CohortId, after: Option<u64>, count_max: usize) -> Result<Page> {
        let members = self.database.read(|view| {
            cohort_number(view, of, cohort)?;
            let select = format!(
                "SELECT {COLUMNS} FROM {TABLES} {SPECS} WHERE cohorts.id = ? AND cohorts.tenant = ? AND member > ? AND leaving = 0 ORDER BY member LIMIT ?"
            );
            let mut statement = view.prepare_cached(&select)?;
            let after = after.map_or(-1, |after| i64::try_from(after).unwrap_or(i64::MAX));
            page(view, of, statement.query(params![cohort, of, after, (count_max as u64).saturating_add(1)])?, count_max)
        })?;
        Ok(Page { jobs: self.excused(members.jobs), ..members })
    }

    /// Asks a job to stop. One that was never started is cancelled at once; one that ended is left as it is.
    ///
    /// # Errors
    /// The tenant has no such job, or it ended.
    pub fn cancel(&self, of: TenantId, id: JobId, how: Stop) -> Result<Cancelled> {
        self.change(|transaction, changes| {
            let held = job(transaction, id, Some(of))?;
            let is_waiting = held.state == JobState::Queued && (held.attempts == 0 || how == Stop::Cancel);
            if is_waiting {
                end(transaction, &held, (JobState::Cancelled, None, None))?;
                changes.push(held.change(id, What::State));
                return Ok(Cancelled::AtOnce);
            }
            if held.state.is_ended() {
                return Err(StateError::WrongState { found: held.state, expected: "queued or running" });
            }
            // What cuts a job off is not taken back by asking it to end well.
            if held.stop.is_none() || (held.stop, how) == (Some(Stop::Stop), Stop::Cancel) {
                transaction.prepare_cached("UPDATE jobs SET stop = ? WHERE number = ?")?.execute((how, held.number))?;
                let body = state_body(held.state.as_str(), &[("stop", Value::from(how.as_str()))]);
                push_state(transaction, held.place(), &body)?;
                changes.push(held.change(id, What::Stop));
            }
            Ok(Cancelled::Asked)
        })
    }

    /// The files that were kept of a tenant's job, by path.
    ///
    /// # Errors
    /// The tenant has no such job.
    pub fn artifacts(&self, of: TenantId, id: JobId) -> Result<Vec<FileRef>> {
        self.database.read(|view| {
            let held = job(view, id, Some(of))?;
            file_refs(view, "SELECT path, digest, bytes FROM artifacts JOIN blobs USING (digest) WHERE job = ? ORDER BY path", held.number)
        })
    }

    /// What went into a tenant's job, by what it is for.
    ///
    /// # Errors
    /// The tenant has no such job.
    pub fn inputs(&self, of: TenantId, id: JobId) -> Result<Vec<(Role, FileRef)>> {
        self.database.read(|view| inputs(view, job(view, id, Some(of))?.number))
    }

    /// The receipt of a tenant's job.
    ///
    /// # Errors
    /// The tenant has no such job, or it has no receipt.
    pub fn receipt(&self, of: TenantId, id: JobId) -> Result<Vec<u8>> {
        self.database.read(|view| {
            let held = job(view, id, Some(of))?;
            receipt(view, held.number)
        })
    }
}

/// A tenant's cohort that has members.
pub(crate) fn cohort_number(view: &Transaction<'_>, of: TenantId, cohort: CohortId) -> Result<i64> {
    let select = "SELECT number FROM cohorts WHERE id = ? AND tenant = ? AND EXISTS (SELECT 1 FROM jobs WHERE cohort = cohorts.number AND leaving = 0)";
    let found = view.prepare_cached(select)?.query_row((cohort, of), |row| row.get(0)).optional()?;
    found.ok_or(StateError::NotFound("cohort"))
}

fn receipt(view: &Transaction<'_>, number: i64) -> Result<Vec<u8>> {
    let found: Option<Vec<u8>> = view.query_row("SELECT receipt FROM jobs WHERE number = ?", [number], |row| row.get(0))?;
    found.ok_or(StateError::NotFound("receipt"))
}

#[cfg(test)]
mod tests {
    use rusqlite::{Connection, params};

    use super::{LINE, listed};
    use crate::migrate::migrate;

    /// Neither sorts, and the line is read without any job's own words.
    #[test]
    fn a_page_reads_no_more_than_it_shows_and_the_line_is_an_index() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, || Ok(None)).unwrap();
        let steps = |select: &str, values: &[&dyn rusqlite::ToSql]| {
            let mut explain = connection.prepare(&format!("EXPLAIN QUERY PLAN {select}")).unwrap();
            let steps = explain.query_map(values, |row| row.get::<_, String>(3)).unwrap().map(Result::unwrap).collect::<Vec<_>>();
            steps.join("; ")
        };
        let page = steps(&listed(), params![1, None::<i64>, None::<i64>, None::<i64>, None::<i64>, 1]);
        assert!(page.contains("INDEX jobs_by_age (tenant=?)") && !page.contains("B-TREE"), "{page}");
        assert_eq!(steps(LINE, params![1]), "SEARCH jobs USING COVERING INDEX jobs_in_line (tenant=? AND state=?)");
    }
}
