//! What jobs tell, and what became of them, in the order it was told.
//!
//! Never holds what a replayed job tells again: its own count says that it was told. Positions count within a cohort, so that a reader of
//! one tenant's events learns nothing of how much others have.

use rusqlite::{OptionalExtension as _, Row, Transaction, params};
use serde_json::{Value, json};

use crate::change::What;
use crate::error::{Result, StateError};
use crate::ids::{CohortId, JobId, TenantId};
use crate::jobs::{Claim, cohort_number, holder};
use crate::state::{State, now_ms};
use crate::told::event_bytes;
use crate::words::EventKind;

/// An event that a job told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// The job's own count, from 1. Replayed, the same event has the same.
    pub seq: u64,
    /// When it was told first, Unix milliseconds.
    pub ms: u64,
    /// What it tells.
    pub kind: EventKind,
    /// A JSON object, as text.
    pub body: String,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Within its cohort, from 1; grows with time.
    pub position: u64,
    /// Of which job.
    pub job: JobId,
    /// When, Unix milliseconds.
    pub ms: u64,
    /// What it tells.
    pub kind: EventKind,
    /// A JSON object, as text.
    pub body: String,
}

/// Whose events are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// One job's.
    Job(JobId),
    /// Those of all members of a cohort.
    Cohort(CohortId),
}

const INSERT: &str = "INSERT INTO events (cohort, position, job, seq, ms, kind, body) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING";

/// Adds to the end of a cohort's events; how many were not there yet.
fn push<'a>(
    transaction: &Transaction<'_>,
    (cohort, job): (i64, i64),
    events: impl IntoIterator<Item = (Option<u64>, u64, EventKind, &'a str)>,
) -> Result<usize> {
    let last = "SELECT events FROM cohorts WHERE number = ?";
    let first: u64 = transaction.prepare_cached(last)?.query_row([cohort], |row| row.get(0))?;
    let (mut position, mut told_bytes) = (first, 0);
    let mut insert = transaction.prepare_cached(INSERT)?;
    for (seq, ms, kind, body) in events {
        let is_new = insert.execute(params![cohort, position + 1, job, seq, ms, kind, body])? as u64;
        position += is_new;
        // What the service says of a job is not the job's.
        told_bytes += if seq.is_some() { is_new * event_bytes(body) } else { 0 };
    }
    if told_bytes > 0 {
        transaction.prepare_cached("UPDATE jobs SET told_bytes = told_bytes + ? WHERE number = ?")?.execute((told_bytes, job))?;
    }
    transaction.prepare_cached("UPDATE cohorts SET events = ? WHERE number = ?")?.execute((position, cohort))?;
    usize::try_from(position - first).map_err(|_| StateError::Damaged("events cannot be counted".to_owned()))
}

/// Enters that a job's state changed.
pub(crate) fn push_state(transaction: &Transaction<'_>, job: (i64, i64), body: &Value) -> Result<()> {
    push(transaction, job, [(None, now_ms(), EventKind::State, body.to_string().as_str())]).map(drop)
}

pub(crate) fn append(transaction: &Transaction<'_>, job: (i64, i64), events: &[NewEvent]) -> Result<usize> {
    push(transaction, job, events.iter().map(|event| (Some(event.seq), event.ms, event.kind, event.body.as_str())))
}

fn from_row(row: &Row<'_>) -> rusqlite::Result<Event> {
    Ok(Event { position: row.get(0)?, job: row.get(1)?, ms: row.get(2)?, kind: row.get(3)?, body: row.get(4)? })
}

impl State {
    /// Appends what a running job told; how many of the events were not there yet. One transaction: give many at once.
    ///
    /// # Errors
    /// The claim is stale; the disk refuses, and nothing was appended.
    pub fn append(&self, claim: &Claim, events: &[NewEvent]) -> Result<usize> {
        self.change(|transaction, changes| {
            let held = holder(transaction, claim)?;
            let count = append(transaction, (held.cohort, held.number), events)?;
            if count > 0 {
                changes.push(held.change(claim.job, What::Events(events.iter().map(|event| event.kind).collect())));
            }
            Ok(count)
        })
    }

    /// Events after a position, of some kinds (of all where none is named), the oldest first.
    ///
    /// # Errors
    /// The tenant has no such job or cohort.
    pub fn events(&self, of: TenantId, stream: Stream, after: u64, kinds: &[EventKind], count_max: usize) -> Result<Vec<Event>> {
        self.database.read(|view| {
            let (cohort, job) = numbers(view, of, stream)?;
            let mut statement = view.prepare_cached(&select(job.is_some(), kinds))?;
            // Beyond what SQLite counts to is nothing.
            let after = i64::try_from(after).unwrap_or(i64::MAX);
            let rows = statement.query_map(params![job.unwrap_or(cohort), after, count_max as u64], from_row)?;
            Ok(rows.collect::<rusqlite::Result<_>>()?)
        })
    }

    /// Whether all jobs of a stream ended: what is there then is all that there will be.
    ///
    /// # Errors
    /// The tenant has no such job or cohort.
    pub fn has_ended(&self, of: TenantId, stream: Stream) -> Result<bool> {
        self.database.read(|view| {
            let (cohort, job) = numbers(view, of, stream)?;
            let column = if job.is_some() { "number" } else { "cohort" };
            let select = format!("SELECT NOT EXISTS (SELECT 1 FROM jobs WHERE {column} = ? AND state IN ('queued', 'running'))");
            Ok(view.prepare_cached(&select)?.query_row([job.unwrap_or(cohort)], |row| row.get(0))?)
        })
    }

    /// A job's latest event of a kind.
    ///
    /// # Errors
    /// The tenant has no such job.
    pub fn latest_event(&self, of: TenantId, job: JobId, kind: EventKind) -> Result<Option<Event>> {
        self.database.read(|view| {
            let (_, number) = numbers(view, of, Stream::Job(job))?;
            let select = "SELECT position, jobs.id, ms, kind, body FROM events JOIN jobs ON jobs.number = events.job
                 WHERE events.job = ? AND kind = ? ORDER BY position DESC LIMIT 1";
            let mut statement = view.prepare_cached(select)?;
            let mut rows = statement.query_map(params![number, kind], from_row)?;
            Ok(rows.next().transpose()?)
        })
    }
}

/// Events after a position, of some kinds or of all. Of a kind as many as are wanted are looked up in an index: a job tells much that a stream
/// leaves out, and none of that is read.
fn select(is_jobs: bool, kinds: &[EventKind]) -> String {
    let (column, index) = if is_jobs { ("job", "events_by_kind") } else { ("cohort", "events_of_cohort_by_kind") };
    // Those of deleted jobs are left out before they are counted: a page that is not full is the last.
    let left = if is_jobs { "" } else { "AND job NOT IN (SELECT number FROM jobs WHERE leaving = 1)" };
    let some = |from: &str, more: &str| {
        format!(
            "SELECT position, job, ms, kind, body FROM {from} WHERE {column} = ?1 AND position > ?2 {more} {left} ORDER BY position LIMIT ?3"
        )
    };
    // Named twice, it is told once.
    let each = kinds.iter().enumerate().filter(|(at, kind)| kinds.iter().position(|first| first == *kind) == Some(*at));
    let of_kind = |(_, kind): (usize, &EventKind)| {
        let found = some(&format!("events INDEXED BY {index}"), &format!("AND kind = '{}'", kind.as_str()));
        format!("SELECT * FROM ({found})")
    };
    let told = if kinds.is_empty() { some("events", "") } else { each.map(of_kind).collect::<Vec<_>>().join(" UNION ALL ") };
    format!("SELECT position, jobs.id, ms, kind, body FROM ({told}) AS told JOIN jobs ON jobs.number = told.job ORDER BY position LIMIT ?3")
}

/// The cohort's number, and the job's where it is one job's stream.
fn numbers(view: &Transaction<'_>, of: TenantId, stream: Stream) -> Result<(i64, Option<i64>)> {
    let found = match stream {
        Stream::Job(id) => view
            .prepare_cached("SELECT cohort, number FROM jobs WHERE id = ? AND tenant = ? AND leaving = 0")?
            .query_row((id, of), |row| Ok((row.get(0)?, row.get(1)?))),
        Stream::Cohort(id) => return Ok((cohort_number(view, of, id)?, None)),
    };
    found.optional()?.ok_or(StateError::NotFound("job"))
}

/// What an event of a changed state says.
pub(crate) fn state_body(state: &str, more: &[(&str, Value)]) -> Value {
    let mut body = json!({ "state": state });
    for (key, value) in more {
        if let Some(body) = body.as_object_mut().filter(|_| !value.is_null()) {
            body.insert((*key).to_owned(), value.clone());
        }
    }
    body
}

#[cfg(test)]
mod tests {
    use rusqlite::{Connection, params};

    use super::{EventKind, select};
    use crate::migrate::migrate;

    #[test]
    fn events_of_kinds_are_looked_up_and_nothing_else_is_read() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, || Ok(None)).unwrap();
        let kinds = [EventKind::State, EventKind::Evaluation, EventKind::State];
        for (is_jobs, looked_up) in [(true, "(job=? AND kind=? AND position>?)"), (false, "(cohort=? AND kind=? AND position>?)")] {
            let mut explain = connection.prepare(&format!("EXPLAIN QUERY PLAN {}", select(is_jobs, &kinds))).unwrap();
            let steps = explain.query_map(params![1, 0, 10], |row| row.get::<_, String>(3)).unwrap();
            let of_events: Vec<String> = steps.map(Result::unwrap).filter(|step| step.contains(" events ")).collect();
            assert_eq!(of_events.len(), 2, "{of_events:?}");
            assert!(of_events.iter().all(|step| step.starts_with("SEARCH events ") && step.ends_with(looked_up)), "{of_events:?}");
        }
    }
}
