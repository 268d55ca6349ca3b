//! Whether what is on the disk agrees with itself: database, rows, blobs.
//!
//! Changes nothing. What nothing refers to is no fault: it goes with the last row that does, and `gc` removes what a crash left of that.
//! Nor is what is left of a deleted job: it goes piece by piece.

use std::fmt;

use nodus_protocol::Digest;
use rusqlite::Transaction;

use crate::error::{Result, StateError};
use crate::state::State;

/// How deep it looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Rows, and the lengths of files.
    Lengths,
    /// Every byte of every file.
    Contents,
}

/// Something that does not agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SQLite finds its file damaged.
    Database(String),
    /// A row names one that is not there.
    Foreign(String),
    /// A blob's file is missing.
    Missing(Digest),
    /// A blob's file has another length than its row says.
    Length {
        /// Which.
        digest: Digest,
        /// Of the file.
        found: u64,
        /// Of the row.
        expected: u64,
    },
    /// A blob's file holds something else.
    Content {
        /// Which.
        digest: Digest,
        /// Of what it holds.
        found: Digest,
    },
    /// Rows contradict each other.
    Rows(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Database(what) => write!(f, "database: {what}"),
            Self::Foreign(what) => write!(f, "a row of {what} names one that is not there"),
            Self::Missing(digest) => write!(f, "blob {digest} is missing"),
            Self::Length { digest, found, expected } => write!(f, "blob {digest} has {found} bytes, expected {expected}"),
            Self::Content { digest, found } => write!(f, "blob {digest} holds {found}"),
            Self::Rows(what) => write!(f, "rows: {what}"),
        }
    }
}

/// What must find nothing, and what it means where it does.
const CONTRADICTIONS: [(&str, &str); 9] = [
    (
        "SELECT hex(id) FROM cohorts WHERE events != ifnull((SELECT max(position) FROM events WHERE cohort = number), 0)
        AND (thinned = 0 OR events < (SELECT max(position) FROM events WHERE cohort = number))",
        "a cohort counts other events than it has",
    ),
    (
        "SELECT hex(jobs.id) FROM jobs JOIN cohorts ON cohort = cohorts.number WHERE jobs.tenant != cohorts.tenant",
        "a job and its cohort have different owners",
    ),
    (
        "SELECT hex(jobs.id) FROM events JOIN jobs ON job = jobs.number WHERE events.cohort != jobs.cohort",
        "an event is of another cohort than its job",
    ),
    (
        "SELECT hex(id) FROM jobs WHERE leaving = 0 AND NOT EXISTS (SELECT 1 FROM inputs WHERE job = number AND role = 'component')",
        "a job has no component",
    ),
    (
        "SELECT hex(id) FROM jobs WHERE leaving = 0 AND NOT EXISTS (SELECT 1 FROM specs WHERE job = number)",
        "it is not said what a job is made of",
    ),
    ("SELECT hex(id) FROM jobs WHERE leaving = 1 AND ended_ms IS NULL", "a job that was deleted has not ended"),
    (
        "SELECT name FROM tenants WHERE device_ms < (SELECT ifnull(sum(device_ms), 0) FROM jobs WHERE tenant = tenants.id)",
        "a tenant was charged less than its jobs",
    ),
    (
        "SELECT name FROM tenants WHERE stored_bytes != (SELECT ifnull(sum(bytes), 0) FROM blobs WHERE digest IN (
                SELECT item_files.digest FROM items JOIN item_files ON item = items.id WHERE tenant = tenants.id
                UNION SELECT inputs.digest FROM jobs JOIN inputs ON job = number WHERE tenant = tenants.id
                UNION SELECT artifacts.digest FROM jobs JOIN artifacts ON job = number WHERE tenant = tenants.id))
            + (SELECT ifnull(sum(octet_length(spec)), 0) FROM jobs JOIN specs ON job = number WHERE tenant = tenants.id)
            + (SELECT ifnull(sum(octet_length(spec)), 0) FROM cohorts JOIN common_specs ON cohort = number WHERE tenant = tenants.id)
            + (SELECT ifnull(sum(told_bytes + ifnull(octet_length(receipt), 0)), 0) FROM jobs WHERE tenant = tenants.id AND leaving = 0)",
        "a tenant stores other bytes than are counted",
    ),
    (
        "SELECT hex(digest) FROM (
            SELECT tenant, digest, count(*) AS found FROM (
                SELECT tenant, item_files.digest FROM items JOIN item_files ON item = items.id WHERE tenant IS NOT NULL
                UNION ALL SELECT tenant, digest FROM jobs JOIN inputs ON job = number
                UNION ALL SELECT tenant, digest FROM jobs JOIN artifacts ON job = number)
            GROUP BY tenant, digest) AS named FULL JOIN holdings USING (tenant, digest) WHERE found IS NOT times",
        "a content is referred to another number of times than is counted",
    ),
];

impl State {
    /// Everything that does not agree.
    ///
    /// # Errors
    /// The disk cannot be read.
    pub fn fsck(&self, depth: Depth) -> Result<Vec<Fault>> {
        let (mut faults, rows) = self.database.read(|view| {
            let mut faults = rows_agree(view)?;
            let mut statement = view.prepare("SELECT digest, bytes FROM blobs ORDER BY digest")?;
            let blobs = statement.query_map([], |row| Ok((Digest::from_bytes(row.get(0)?), row.get::<_, u64>(1)?)))?;
            let blobs = blobs.collect::<rusqlite::Result<Vec<_>>>()?;
            faults.dedup();
            Ok((faults, blobs))
        })?;
        let (there, mut missing) = (self.blobs.all()?, Vec::new());
        for (digest, expected) in rows {
            match there.get(&digest) {
                None => missing.push(digest),
                Some(&found) if found != expected => faults.push(Fault::Length { digest, found, expected }),
                Some(_) if depth == Depth::Contents => match self.blobs.digest_now(digest) {
                    Ok(found) if found != digest => faults.push(Fault::Content { digest, found }),
                    Err(StateError::Damaged(_)) => missing.push(digest),
                    looked => drop(looked?),
                },
                Some(_) => {}
            }
        }
        // What nobody refers to by now was let go meanwhile, beside a running service.
        for digest in missing {
            if self.is_named(digest)? {
                faults.push(Fault::Missing(digest));
            }
        }
        Ok(faults)
    }
}

/// Whether the rows do.
pub(crate) fn rows_agree(view: &Transaction<'_>) -> Result<Vec<Fault>> {
    let mut faults = Vec::new();
    let texts = |select: &str| -> Result<Vec<String>> {
        let mut statement = view.prepare(select)?;
        Ok(statement.query_map([], |row| row.get::<_, String>(0))?.collect::<rusqlite::Result<_>>()?)
    };
    faults.extend(texts("PRAGMA integrity_check")?.into_iter().filter(|said| said != "ok").map(Fault::Database));
    faults.extend(texts("PRAGMA foreign_key_check")?.into_iter().map(Fault::Foreign));
    for (select, meaning) in CONTRADICTIONS {
        faults.extend(texts(select)?.into_iter().map(|which| Fault::Rows(format!("{meaning}: {which}"))));
    }
    Ok(faults)
}
