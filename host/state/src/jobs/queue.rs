//! What whoever runs the jobs reads: those that wait, those that run, and what one is made of.
//!
//! Shows all tenants' jobs: never answer a tenant's request with it.

use nodus_protocol::Digest;
use rusqlite::{OptionalExtension as _, Row, Transaction};

use crate::error::{Result, StateError};
use crate::ids::{CohortId, JobId, TenantId};
use crate::items::FileRef;
use crate::spec::{JobSpec, Named};
use crate::state::State;
use crate::submission::whole;
use crate::tenants::{Tenant, tenant};
use crate::words::{Lane, Priority, Role, Stop};

/// A job that waits.
#[derive(Clone, Debug, PartialEq)]
pub struct Queued {
    /// Which.
    pub job: JobId,
    /// Whose.
    pub tenant: TenantId,
    /// Of which cohort.
    pub cohort: CohortId,
    /// Who goes first.
    pub priority: Priority,
    /// On which model.
    pub model: Named,
    /// How it shares the device.
    pub lane: Lane,
    /// Device memory planned for its adapters.
    pub device_bytes: u64,
    /// Device memory planned for one pass.
    pub activation_bytes: u64,
    /// How often it was claimed before; above 0 it resumes.
    pub attempts: u64,
    /// What its owner asked for.
    pub stop: Option<Stop>,
    /// Why it waits, as it was said last.
    pub reason: Option<String>,
    /// When it came in.
    pub submitted_ms: u64,
}

/// A job that somebody holds a claim on, or held when the service ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Running {
    /// Which.
    pub job: JobId,
    /// Whose.
    pub tenant: TenantId,
    /// Of which cohort.
    pub cohort: CohortId,
    /// Where.
    pub placed: String,
    /// Of the claim.
    pub attempt: u64,
    /// What its owner asks for.
    pub stop: Option<Stop>,
}

/// All that is needed to run a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// Which.
    pub job: JobId,
    /// Whose.
    pub tenant: TenantId,
    /// The tenant's name, for the host's ledger.
    pub tenant_name: String,
    /// Of which cohort.
    pub cohort: CohortId,
    /// Which of its members, from 0.
    pub member: u64,
    /// What it is made of.
    pub spec: JobSpec,
    /// The files that `spec` names, by what they are for. [`State::open_file`] opens them.
    pub inputs: Vec<(Role, FileRef)>,
    /// How often it was claimed.
    pub attempts: u64,
    /// What its owner asks for.
    pub stop: Option<Stop>,
    /// The question at which it learnt, when it was run before, that it is to stop.
    pub stop_question: Option<u64>,
}

/// A job's own specification, and what it has in common with its cohort, are two rows.
pub(crate) const SPECS: &str = "JOIN specs ON job = jobs.number LEFT JOIN common_specs ON common_specs.cohort = jobs.cohort";

/// What a job is made of, from two columns: in common, which may be none, and its own.
pub(crate) fn spec(row: &Row<'_>, columns: (usize, usize)) -> rusqlite::Result<JobSpec> {
    let text = |column: usize| row.get_ref(column)?.as_str_or_null().map_err(rusqlite::Error::from);
    whole(text(columns.0)?, text(columns.1)?.unwrap_or_default())
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(columns.1, rusqlite::types::Type::Text, error.into()))
}

/// What went into a job, by what it is for.
pub(crate) fn inputs(view: &Transaction<'_>, number: i64) -> Result<Vec<(Role, FileRef)>> {
    let select = "SELECT role, path, digest, bytes FROM inputs JOIN blobs USING (digest) WHERE job = ? ORDER BY role, path";
    let mut statement = view.prepare_cached(select)?;
    let input =
        |row: &Row<'_>| Ok((row.get(0)?, FileRef { path: row.get(1)?, digest: Digest::from_bytes(row.get(2)?), bytes: row.get(3)? }));
    Ok(statement.query_map([number], input)?.collect::<rusqlite::Result<_>>()?)
}

impl State {
    /// The jobs that wait, in their order: high priority first, then by age. Those of disabled tenants are left out.
    ///
    /// # Errors
    /// The disk's.
    pub fn queued(&self) -> Result<Vec<Queued>> {
        self.database.read(|view| {
            let select = "SELECT jobs.id, jobs.tenant, cohorts.id, priority, model, model_digest, lane, device_bytes, activation_bytes,
                 attempts, stop, reason, jobs.submitted_ms FROM jobs JOIN cohorts ON cohort = cohorts.number JOIN tenants ON jobs.tenant = tenants.id
                 WHERE state = 'queued' AND disabled = 0 ORDER BY priority, jobs.number";
            let mut statement = view.prepare_cached(select)?;
            let row = |row: &Row<'_>| {
                Ok(Queued {
                    job: row.get(0)?,
                    tenant: row.get(1)?,
                    cohort: row.get(2)?,
                    priority: row.get(3)?,
                    model: Named { name: row.get(4)?, digest: Digest::from_bytes(row.get(5)?) },
                    lane: row.get(6)?,
                    device_bytes: row.get(7)?,
                    activation_bytes: row.get(8)?,
                    attempts: row.get(9)?,
                    stop: row.get(10)?,
                    reason: row.get(11)?,
                    submitted_ms: row.get(12)?,
                })
            };
            Ok(statement.query_map([], row)?.collect::<rusqlite::Result<_>>()?)
        })
    }

    /// The jobs that run. At the start of the service: those that it has to resume.
    ///
    /// # Errors
    /// The disk's.
    pub fn running(&self) -> Result<Vec<Running>> {
        self.database.read(|view| {
            let select = "SELECT jobs.id, jobs.tenant, cohorts.id, placed, attempts, stop
                 FROM jobs JOIN cohorts ON cohort = cohorts.number WHERE state = 'running' ORDER BY jobs.number";
            let mut statement = view.prepare_cached(select)?;
            let row = |row: &Row<'_>| {
                Ok(Running {
                    job: row.get(0)?,
                    tenant: row.get(1)?,
                    cohort: row.get(2)?,
                    placed: row.get(3)?,
                    attempt: row.get(4)?,
                    stop: row.get(5)?,
                })
            };
            Ok(statement.query_map([], row)?.collect::<rusqlite::Result<_>>()?)
        })
    }

    /// All that is needed to run a job.
    ///
    /// # Errors
    /// There is no such job.
    pub fn work(&self, job: JobId) -> Result<Work> {
        self.database.read(|view| {
            let select = format!(
                "SELECT jobs.number, jobs.tenant, tenants.name, cohorts.id, member, common_specs.spec, specs.spec, attempts, stop, stop_question
                 FROM jobs JOIN cohorts ON jobs.cohort = cohorts.number JOIN tenants ON jobs.tenant = tenants.id {SPECS} WHERE jobs.id = ?"
            );
            let row = |row: &Row<'_>| {
                let work = Work {
                    job,
                    tenant: row.get(1)?,
                    tenant_name: row.get(2)?,
                    cohort: row.get(3)?,
                    member: row.get(4)?,
                    spec: spec(row, (5, 6))?,
                    inputs: Vec::new(),
                    attempts: row.get(7)?,
                    stop: row.get(8)?,
                    stop_question: row.get(9)?,
                };
                Ok((row.get::<_, i64>(0)?, work))
            };
            let found = view.prepare_cached(&select)?.query_row([job], row).optional()?;
            let (number, work) = found.ok_or(StateError::NotFound("job"))?;
            Ok(Work { inputs: inputs(view, number)?, ..work })
        })
    }

    /// Whose a job is.
    ///
    /// # Errors
    /// There is no such job.
    pub fn owner(&self, job: JobId) -> Result<Tenant> {
        self.database.read(|view| {
            let found = view.prepare_cached("SELECT tenant FROM jobs WHERE id = ?")?.query_row([job], |row| row.get(0)).optional()?;
            tenant(view, found.ok_or(StateError::NotFound("job"))?)
        })
    }

    /// Whether a job is there and has not ended.
    ///
    /// # Errors
    /// The disk's.
    pub fn is_open(&self, job: JobId) -> Result<bool> {
        self.database.read(|view| {
            let found = view.prepare_cached("SELECT ended_ms IS NULL FROM jobs WHERE id = ?")?.query_row([job], |row| row.get(0));
            Ok(found.optional()?.unwrap_or(false))
        })
    }

    /// What a job's owner asks for, now.
    ///
    /// # Errors
    /// There is no such job.
    pub fn stop_of(&self, job: JobId) -> Result<Option<Stop>> {
        self.database.read(|view| {
            let found = view.prepare_cached("SELECT stop FROM jobs WHERE id = ?")?.query_row([job], |row| row.get(0)).optional()?;
            found.ok_or(StateError::NotFound("job"))
        })
    }

    /// Says why jobs wait, for their owners. Those that do not wait any more are passed over, and who reads it hears nothing of it: it changes often.
    ///
    /// # Errors
    /// The disk's.
    pub fn say_why(&self, reasons: &[(JobId, String)]) -> Result<()> {
        if reasons.is_empty() {
            return Ok(());
        }
        self.database.write(|transaction| {
            let update = "UPDATE jobs SET reason = ?2 WHERE id = ?1 AND state = 'queued' AND reason IS NOT ?2";
            let mut statement = transaction.prepare_cached(update)?;
            reasons.iter().try_for_each(|(job, reason)| statement.execute((job, reason)).map(drop))?;
            Ok(())
        })
    }
}
