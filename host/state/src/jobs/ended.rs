//! Jobs that ended, with what the host's books must say of them.
//!
//! Shows all tenants' jobs: never answer a tenant's request with it.

use nodus_protocol::Digest;
use rusqlite::Row;

use crate::error::Result;
use crate::ids::JobId;
use crate::state::State;
use crate::words::JobState;

/// A job that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub job: JobId,
    /// Whose, by name.
    pub tenant: String,
    /// How.
    pub state: JobState,
    /// The signed receipt's bytes, where it has one.
    pub receipt: Option<Vec<u8>>,
    /// Every file that was kept of it.
    pub artifacts: Vec<(String, Digest)>,
}

impl State {
    /// Gives every job that ended, in their order, as all of them are at one moment.
    ///
    /// # Errors
    /// The disk's.
    pub fn ended(&self, mut take: impl FnMut(Ended)) -> Result<()> {
        self.database.read(|view| {
            let mut jobs = view.prepare(
                "SELECT number, jobs.id, name, state, receipt FROM jobs JOIN tenants ON tenant = tenants.id
                 WHERE ended_ms IS NOT NULL AND leaving = 0 ORDER BY number",
            )?;
            let mut artifacts = view.prepare("SELECT path, digest FROM artifacts WHERE job = ? ORDER BY path")?;
            let mut rows = jobs.query([])?;
            while let Some(row) = rows.next()? {
                let file = |row: &Row<'_>| Ok((row.get(0)?, Digest::from_bytes(row.get(1)?)));
                let artifacts = artifacts.query_map([row.get::<_, i64>(0)?], file)?.collect::<rusqlite::Result<_>>()?;
                take(Ended { job: row.get(1)?, tenant: row.get(2)?, state: row.get(3)?, receipt: row.get(4)?, artifacts });
            }
            Ok(())
        })
    }
}
