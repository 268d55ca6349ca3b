//! What a tenant has and uses.
//!
//! Says nothing of anybody else, not even in sum.

use rusqlite::{OptionalExtension as _, Transaction};

use crate::error::{Result, StateError};
use crate::ids::TenantId;
use crate::state::State;
use crate::tenants::tenant;
use crate::words::JobState;

/// What a tenant has and uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Jobs that wait.
    pub queued_jobs: u64,
    /// Jobs that run.
    pub running_jobs: u64,
    /// Jobs of high priority that wait or run.
    pub high_jobs: u64,
    /// Bytes of everything it keeps, each content counted once, of what its jobs are made of and told, and of its uploads that broke off.
    pub stored_bytes: u64,
    /// Device memory that its running jobs are planned to hold.
    pub device_bytes: u64,
    /// Time on the device, in all.
    pub device_ms: u64,
}

/// What a tenant keeps, its uploads that broke off left out: a sum that the database itself changes with every row that it is a sum of.
pub(crate) fn stored_bytes(view: &Transaction<'_>, of: TenantId) -> Result<u64> {
    let found = view.prepare_cached("SELECT stored_bytes FROM tenants WHERE id = ?")?.query_row([of], |row| row.get(0));
    found.optional()?.ok_or(StateError::NotFound("tenant"))
}

pub(crate) fn jobs_in(view: &Transaction<'_>, of: TenantId, state: &str) -> Result<u64> {
    let mut statement = view.prepare_cached("SELECT count(*) FROM jobs WHERE tenant = ? AND state = ?")?;
    Ok(statement.query_row((of, state), |row| row.get(0))?)
}

pub(crate) fn high_jobs(view: &Transaction<'_>, of: TenantId) -> Result<u64> {
    let select = "SELECT count(*) FROM jobs WHERE tenant = ? AND state IN ('queued', 'running') AND priority = 'high'";
    Ok(view.prepare_cached(select)?.query_row([of], |row| row.get(0))?)
}

impl State {
    /// How many jobs there are in each state, of all tenants. The operator's: never answer a tenant's request with it.
    ///
    /// # Errors
    /// The disk's.
    pub fn jobs_by_state(&self) -> Result<Vec<(JobState, u64)>> {
        self.database.read(|view| {
            let mut statement = view.prepare_cached(
                "SELECT count(*) - (SELECT count(*) FROM jobs WHERE leaving = 1 AND state = ?1) FROM jobs WHERE state = ?1",
            )?;
            let count = |state: &JobState| Ok((*state, statement.query_row([state], |row| row.get(0))?));
            JobState::ALL.iter().map(count).collect()
        })
    }

    /// What a tenant has and uses.
    ///
    /// # Errors
    /// There is no such tenant.
    pub fn usage(&self, of: TenantId) -> Result<Usage> {
        let unfinished_bytes = self.blobs.unfinished_bytes(of);
        self.database.read(|view| {
            let held = "SELECT ifnull(sum(device_bytes + activation_bytes), 0) FROM jobs WHERE tenant = ? AND state = 'running'";
            Ok(Usage {
                queued_jobs: jobs_in(view, of, "queued")?,
                running_jobs: jobs_in(view, of, "running")?,
                high_jobs: high_jobs(view, of)?,
                stored_bytes: stored_bytes(view, of)?.saturating_add(unfinished_bytes),
                device_bytes: view.prepare_cached(held)?.query_row([of], |row| row.get(0))?,
                device_ms: tenant(view, of)?.device_ms,
            })
        })
    }
}
