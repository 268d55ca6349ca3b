//! What a job that is run again must find as it was: what it told before, and when it learnt that it is to stop.
//!
//! Serves who holds the claim on the job, and nobody else.

use rusqlite::{Row, params};

use crate::error::Result;
use crate::events::NewEvent;
use crate::jobs::{Claim, holder};
use crate::state::State;

impl State {
    /// What a job told when it was run before, after its own count `after`, in order, so many events at most.
    ///
    /// # Errors
    /// The claim is stale.
    pub fn told(&self, claim: &Claim, after: u64, count_max: usize) -> Result<Vec<NewEvent>> {
        self.database.read(|view| {
            let held = holder(view, claim)?;
            let select = "SELECT seq, ms, kind, body FROM events WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?";
            let mut statement = view.prepare_cached(select)?;
            let row = |row: &Row<'_>| Ok(NewEvent { seq: row.get(0)?, ms: row.get(1)?, kind: row.get(2)?, body: row.get(3)? });
            Ok(statement.query_map(params![held.number, after, count_max as u64], row)?.collect::<rusqlite::Result<_>>()?)
        })
    }

    /// Takes note of the question at which a job is about to learn that it is to stop. It stays what it was noted as first.
    ///
    /// # Errors
    /// The claim is stale; the disk refuses, and the job must not be told.
    pub fn note_stop(&self, claim: &Claim, question: u64) -> Result<()> {
        self.database.write(|transaction| {
            let held = holder(transaction, claim)?;
            let update = "UPDATE jobs SET stop_question = ifnull(stop_question, ?) WHERE number = ?";
            transaction.prepare_cached(update)?.execute((question, held.number))?;
            Ok(())
        })
    }
}
