//! Jobs go: at once for their owners, and their events, which may be very many, a piece at a time.
//!
//! Never holds the database for longer than a piece takes. What is half done when the process ends is gone on with by whoever calls
//! [`State::delete_piece`] next.

use rusqlite::{OptionalExtension as _, Transaction};

use super::transition::job;
use crate::change::What;
use crate::error::{Result, StateError};
use crate::gc::unnamed;
use crate::ids::{JobId, TenantId};
use crate::items::{contents, forget_adapters};
use crate::state::State;

/// Events that one transaction deletes: some ten milliseconds.
const PIECE: usize = 2000;

impl State {
    /// Deletes a job that ended, with its events, receipt and the contents that nothing else is given or leaves. The ledger keeps that it was. Of its events those go now that are one piece;
    /// [`State::delete_piece`] deletes the others, which nobody sees any more.
    ///
    /// # Errors
    /// The tenant has no such job, or it did not end yet.
    pub fn delete_job(&self, of: TenantId, id: JobId) -> Result<()> {
        let gone = self.change(|transaction, changes| {
            let held = job(transaction, id, Some(of))?;
            if !held.state.is_ended() {
                return Err(StateError::WrongState { found: held.state, expected: "ended: cancel it first" });
            }
            transaction.execute("UPDATE jobs SET leaving = 1 WHERE number = ?", [held.number])?;
            transaction.execute("UPDATE cohorts SET thinned = 1 WHERE number = ?", [held.cohort])?;
            let select = "SELECT digest FROM inputs WHERE job = ?1 UNION SELECT digest FROM artifacts WHERE job = ?1";
            let contents = contents(transaction, select, [held.number])?;
            for kept in ["specs", "inputs", "artifacts"] {
                transaction.execute(&format!("DELETE FROM {kept} WHERE job = ?"), [held.number])?;
            }
            forget_adapters(transaction, of)?;
            // With the last of its members a cohort is gone for its owner too: its key may come again.
            let is_empty = "NOT EXISTS (SELECT 1 FROM jobs WHERE cohort = ?1 AND leaving = 0)";
            transaction
                .execute(&format!("UPDATE cohorts SET key = NULL, request = NULL WHERE number = ?1 AND {is_empty}"), [held.cohort])?;
            transaction.execute(&format!("DELETE FROM common_specs WHERE cohort = ?1 AND {is_empty}"), [held.cohort])?;
            changes.push(held.change(id, What::Deleted));
            delete(transaction, held.place())?;
            unnamed(transaction, contents)
        })?;
        self.let_go(gone);
        Ok(())
    }

    /// Deletes a piece of what is left of deleted jobs; whether there was one, so that there may be more.
    ///
    /// # Errors
    /// The disk's.
    pub fn delete_piece(&self) -> Result<bool> {
        let leaving = |view: &Transaction<'_>| -> Result<Option<(i64, i64)>> {
            let select = "SELECT cohort, number FROM jobs WHERE leaving = 1 LIMIT 1";
            Ok(view.prepare_cached(select)?.query_row([], |row| Ok((row.get(0)?, row.get(1)?))).optional()?)
        };
        // Most often there is none, and no write is to be waited for.
        if self.database.read(leaving)?.is_none() {
            return Ok(false);
        }
        self.database.write(|transaction| leaving(transaction)?.map_or(Ok(()), |job| delete(transaction, job)))?;
        Ok(true)
    }
}

/// Deletes a piece of a job that leaves; with the last one its row, and that of a cohort that has no others.
fn delete(transaction: &Transaction<'_>, (cohort, job): (i64, i64)) -> Result<()> {
    let piece = "DELETE FROM events WHERE (cohort, position) IN (SELECT cohort, position FROM events WHERE job = ? LIMIT ?)";
    if transaction.prepare_cached(piece)?.execute((job, PIECE))? < PIECE {
        transaction.execute("DELETE FROM jobs WHERE number = ?", [job])?;
        let empty = "DELETE FROM cohorts WHERE number = ?1 AND NOT EXISTS (SELECT 1 FROM jobs WHERE cohort = ?1)";
        transaction.execute(empty, [cohort])?;
    }
    Ok(())
}
