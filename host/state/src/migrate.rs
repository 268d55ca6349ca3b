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
    include_str!("../migrations/0009.sql"),
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
    use crate::fsck::rows_agree;
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

    /// As a program of before left it.
    fn of_version(version: usize) -> Connection {
        let connection = Connection::open_in_memory().unwrap();
        STEPS[..version].iter().for_each(|step| connection.execute_batch(step).unwrap());
        connection.execute_batch(&format!("PRAGMA user_version = {version}; PRAGMA application_id = 0x6e6f6473")).unwrap();
        connection.execute_batch("INSERT INTO tenants (id, name, created_ms) VALUES (1, 'a', 0), (2, 'b', 0)").unwrap();
        connection
    }

    /// Jobs of these numbers, tenants, cohorts and members.
    fn insert_jobs(connection: &Connection, jobs: &[[i64; 4]]) {
        for [number, tenant, cohort, member] in jobs {
            let select = "INSERT INTO cohorts (number, id, tenant, submitted_ms) VALUES (?, randomblob(16), ?, 0) ON CONFLICT DO NOTHING";
            connection.execute(select, (cohort, tenant)).unwrap();
            let insert = "INSERT INTO jobs (number, id, tenant, cohort, member, priority, model, device_bytes, activation_bytes, state, submitted_ms)
                 VALUES (?, randomblob(16), ?, ?, ?, 'low', 'tiny', 0, 0, 'queued', 0)";
            connection.execute(insert, (number, tenant, cohort, member)).unwrap();
        }
    }

    fn column(connection: &Connection, select: &str) -> Vec<i64> {
        let mut statement = connection.prepare(select).unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn events_of_before_are_counted_and_those_that_are_missing_are_known() {
        let mut connection = of_version(6);
        // Of the second cohort a member was deleted, the last events with it; of the third, which had none, too; the fourth is new.
        insert_jobs(&connection, &[[1, 1, 1, 0], [2, 1, 1, 1], [3, 2, 2, 0], [4, 2, 3, 0], [5, 2, 4, 0]]);
        connection
            .execute_batch(
                "INSERT INTO events (cohort, position, job, seq, ms, kind, body) VALUES
                   (1, 1, 1, NULL, 0, 'state', '{}'), (1, 2, 1, 1, 0, 'log', '\u{fc}'), (1, 3, 2, 1, 0, 'step', '{\"step\":1}'),
                   (1, 4, 1, 2, 0, 'step', ''), (2, 2, 3, NULL, 0, 'state', '{}');
                 UPDATE cohorts SET events = 4 WHERE number = 1;
                 UPDATE cohorts SET events = 3 WHERE number = 2;
                 UPDATE cohorts SET events = 1 WHERE number = 3",
            )
            .unwrap();
        migrate(&mut connection, || Ok(None)).unwrap();
        assert_eq!(column(&connection, "SELECT thinned FROM cohorts ORDER BY number"), [0, 1, 1, 0]);
        assert_eq!(column(&connection, "SELECT told_bytes FROM jobs ORDER BY number"), [256 + 2 + 256, 256 + 10, 0, 0, 0]);
        assert_eq!(column(&connection, "SELECT leaving FROM jobs"), [0; 5]);
        assert_eq!(column(&connection, "SELECT stored_bytes FROM tenants ORDER BY id"), [3 * 256 + 12, 0]);
    }

    #[test]
    fn what_tenants_stored_before_is_summed_up() {
        let mut connection = of_version(8);
        insert_jobs(&connection, &[[1, 1, 1, 0], [2, 1, 1, 1], [3, 1, 2, 0], [4, 2, 3, 0]]);
        let digest = |number: u8| format!("unhex(printf('%064d', {number}))");
        let [one, two, three, four] = [1, 2, 3, 4].map(digest);
        // The first content is twice one tenant's, once the other's and the operator's; the last one is nobody's. The third job leaves.
        connection
            .execute_batch(&format!(
                "INSERT INTO blobs VALUES ({one}, 1000), ({two}, 2000), ({three}, 4000), ({four}, 8000);
                 INSERT INTO items (id, kind, tenant, name, digest, about, created_ms) VALUES
                   (1, 'data', 1, 'd', {one}, '{{}}', 0), (2, 'data', NULL, 'd', {one}, '{{}}', 0), (3, 'data', NULL, 'e', {three}, '{{}}', 0);
                 INSERT INTO item_files VALUES (1, 'content', {one}), (2, 'content', {one}), (3, 'content', {three});
                 INSERT INTO inputs VALUES (1, 'data', 'content', {one}), (1, 'component', 'content', {two}), (4, 'component', 'content', {one}),
                   (2, 'component', 'content', {two});
                 INSERT INTO artifacts VALUES (1, 'losses.jsonl', {three});
                 INSERT INTO specs VALUES (1, '\u{fc}'), (2, 'four'), (4, 'x');
                 INSERT INTO common_specs VALUES (1, 'in common'), (3, 'y');
                 UPDATE cohorts SET events = 2, thinned = 1;
                 INSERT INTO events (cohort, position, job, seq, ms, kind, body) VALUES
                   (1, 1, 1, NULL, 0, 'state', '{{}}'), (1, 2, 1, 1, 0, 'log', 'four'), (2, 2, 3, 2, 0, 'log', 'four');
                 UPDATE jobs SET told_bytes = 260 WHERE number IN (1, 3);
                 UPDATE jobs SET receipt = x'72656365697074', ended_ms = 0, state = 'stopped' WHERE number IN (1, 3);
                 UPDATE jobs SET leaving = 1 WHERE number = 3"
            ))
            .unwrap();
        migrate(&mut connection, || Ok(None)).unwrap();
        let own = [1000 + 2000 + 4000 + 2 + 4 + 9 + 260 + 7, 1000 + 1 + 1];
        assert_eq!(column(&connection, "SELECT stored_bytes FROM tenants ORDER BY id"), own);
        // What is kept afterwards is counted in the same way.
        connection.execute_batch("DELETE FROM items WHERE id = 1; DELETE FROM inputs WHERE job = 1").unwrap();
        assert_eq!(column(&connection, "SELECT stored_bytes FROM tenants ORDER BY id"), [own[0] - 1000, own[1]]);
        let counted = |faults: Vec<crate::Fault>| {
            faults.into_iter().map(|fault| fault.to_string()).filter(|fault| fault.contains("count")).collect::<Vec<_>>()
        };
        let agree = |connection: &mut Connection| counted(rows_agree(&connection.transaction().unwrap()).unwrap());
        assert_eq!(agree(&mut connection), Vec::<String>::new());
        connection
            .execute_batch("UPDATE tenants SET stored_bytes = 1 WHERE id = 2; UPDATE holdings SET times = times + 1 WHERE tenant = 1")
            .unwrap();
        let faults = agree(&mut connection);
        assert!(faults.len() == 3 && faults[0].ends_with("bytes than are counted: b"), "{faults:?}");
    }

    #[test]
    fn jobs_of_before_are_made_of_what_they_were_made_of() {
        let mut connection = of_version(5);
        let named = |text: &[u8]| serde_json::json!({ "name": "tiny", "digest": Digest::of(text) });
        let spec = serde_json::json!({
            "name": "", "varied": {}, "component": named(b"c"), "model": named(b"m"), "data": named(b"d"), "held_out": "nothing",
            "parameters": {"rank": 8}, "seed": 1, "limits": {}, "lane": "solo", "priority": "low", "init_adapter": null
        });
        connection
            .execute_batch(&format!(
                "INSERT INTO cohorts (number, id, tenant, submitted_ms) VALUES (1, randomblob(16), 1, 0);
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
