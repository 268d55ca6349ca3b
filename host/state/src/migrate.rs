//! Versions of the schema: each step is one transaction.
//!
//! Never touches what a newer program, or another one, wrote.

use std::fs::File;

use rusqlite::{Connection, TransactionBehavior};

use crate::error::{Result, StateError};

/// The steps, in order; the version is how many were taken. A step that was released is never changed.
const STEPS: &[&str] = &[
    include_str!("../migrations/0001.sql"),
    include_str!("../migrations/0002.sql"),
    include_str!("../migrations/0003.sql"),
    include_str!("../migrations/0004.sql"),
    include_str!("../migrations/0005.sql"),
    include_str!("../migrations/0006.sql"),
    include_str!("../migrations/0007.sql"),
    include_str!("../migrations/0008.sql"),
];
/// `application_id` of the file: "nods".
const APPLICATION: i64 = 0x6e6f_6473;

/// Brings the schema to the newest version; `alone` takes the folder for that long, so that nobody has the rows under an older program that serves them.
pub(crate) fn migrate(connection: &mut Connection, alone: impl FnOnce() -> Result<Option<File>>) -> Result<()> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let pragma = |name: &str| transaction.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let (version, application) = (pragma("user_version")?, pragma("application_id")?);
    let tables: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if application != APPLICATION && (tables > 0 || version > 0) {
        return Err(StateError::Foreign);
    }
    let known = i64::try_from(STEPS.len()).unwrap_or(i64::MAX);
    if version > known {
        return Err(StateError::Newer { found: version, known });
    }
    drop(transaction);
    let _taken = if version < known { alone()? } else { None };
    for (step, number) in STEPS.iter().zip(1_i64..) {
        // Looked at again under the lock: another process may have taken the step.
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let version: i64 = transaction.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if version < number {
            transaction.execute_batch(step)?;
            transaction.pragma_update(None, "user_version", number)?;
            transaction.pragma_update(None, "application_id", APPLICATION)?;
            transaction.commit()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nodus_protocol::Digest;
    use rusqlite::Connection;

    use super::{STEPS, migrate};
    use crate::error::StateError;
    use crate::submission::whole;
    use crate::words::Lane;

    #[test]
    fn a_new_database_gets_every_step_once_and_a_newer_one_is_refused() {
        let mut connection = Connection::open_in_memory().unwrap();
        migrate(&mut connection, || Ok(None)).unwrap();
        migrate(&mut connection, || Ok(None)).unwrap();
        let version: usize = connection.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
        assert_eq!(version, STEPS.len());
        connection.pragma_update(None, "user_version", 99).unwrap();
        let error = migrate(&mut connection, || Ok(None)).unwrap_err();
        assert!(matches!(error, StateError::Newer { found: 99, .. }), "{error}");
    }

    #[test]
    fn jobs_of_before_are_made_of_what_they_were_made_of() {
        let mut connection = Connection::open_in_memory().unwrap();
        STEPS[..5].iter().for_each(|step| connection.execute_batch(step).unwrap());
        connection.execute_batch("PRAGMA user_version = 5; PRAGMA application_id = 0x6e6f6473").unwrap();
        let named = |text: &[u8]| serde_json::json!({ "name": "tiny", "digest": Digest::of(text) });
        let spec = serde_json::json!({
            "name": "", "varied": {}, "component": named(b"c"), "model": named(b"m"), "data": named(b"d"), "held_out": "nothing",
            "parameters": {"rank": 8}, "seed": 1, "limits": {}, "lane": "solo", "priority": "low", "init_adapter": null
        });
        connection
            .execute_batch(&format!(
                "INSERT INTO tenants (id, name, created_ms) VALUES (1, 'a', 0);
                 INSERT INTO cohorts (number, id, tenant, submitted_ms) VALUES (1, randomblob(16), 1, 0);
                 INSERT INTO jobs (number, id, tenant, cohort, member, spec, priority, model, device_bytes, activation_bytes, state, submitted_ms)
                 VALUES (7, randomblob(16), 1, 1, 0, '{spec}', 'low', 'tiny', 0, 0, 'queued', 0)"
            ))
            .unwrap();
        migrate(&mut connection, || Ok(None)).unwrap();
        let (lane, digest): (Lane, [u8; 32]) =
            connection.query_row("SELECT lane, model_digest FROM jobs", [], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        assert_eq!((lane, Digest::from_bytes(digest)), (Lane::Solo, Digest::of(b"m")));
        let text: String = connection.query_row("SELECT spec FROM specs WHERE job = 7", [], |row| row.get(0)).unwrap();
        assert_eq!(serde_json::to_value(whole(None, &text).unwrap()).unwrap(), spec);
    }

    #[test]
    fn another_programs_database_is_left_alone() {
        let mut connection = Connection::open_in_memory().unwrap();
        connection.execute_batch("CREATE TABLE theirs (x)").unwrap();
        assert!(matches!(migrate(&mut connection, || Ok(None)).unwrap_err(), StateError::Foreign));
    }
}
