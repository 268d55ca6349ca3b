//! A receipt for each arm: a signed in-toto statement of what was asked, of every job's losses, norms and adapter, and of the device.
//!
//! Not entered in the host's ledger, which is of tenants' jobs.

use std::collections::BTreeMap;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::Digest;
use nodus_receipts::envelope::ENVELOPE_BYTES_MAX;
use nodus_receipts::{Envelope, HostKey, KnownKeys};
use serde::{Deserialize, Serialize};

use super::arm::Arm;
use super::report::{Measurement, Row};
use super::variant::Variant;
use super::words::JobDone;
use super::work::Work;
use crate::error::user;
use crate::receipt::{Resource, STATEMENT_TYPE};
use crate::store::write_synced;

/// The folder in a measurement's own.
const FOLDER: &str = "receipts";
const PREDICATE_TYPE: &str = "https://nodus.dev/bench/v1";

#[derive(Serialize, Deserialize)]
struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Resource>,
    #[serde(rename = "predicateType")]
    predicate_type: String,
    predicate: Predicate,
}

/// What was asked of an arm, and what its jobs answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Predicate {
    arm: Arm,
    work: Work,
    variant: Variant,
    model_digest: Digest,
    device_class: BTreeMap<String, String>,
    jobs: Vec<JobDone>,
}

impl Predicate {
    pub(super) fn of(measured: &Measurement, row: &Row) -> Self {
        let setting = &measured.setting;
        Self {
            arm: row.arm,
            work: measured.work.clone(),
            variant: setting.variant,
            model_digest: setting.model_digest,
            device_class: setting.device_class.clone(),
            jobs: row.jobs.clone(),
        }
    }
}

/// Signs a receipt for every arm of ours.
///
/// # Errors
/// Ours: the disk refuses, or the host's key is not as it must be.
pub(super) fn seal(dir: &Dir, data: &Dir, measured: &Measurement) -> anyhow::Result<()> {
    let key = HostKey::open_or_create(data).context("opening the host's key")?;
    dir.create_dir_all(FOLDER).context("making the folder of receipts")?;
    for row in measured.rows.iter().filter(|row| row.arm.peer().is_none()) {
        let adapter = |job: &JobDone| Resource::new(format!("{}/{}", row.arm.name(), job.job), job.adapter);
        let (kind, predicate_type) = (STATEMENT_TYPE.to_owned(), PREDICATE_TYPE.to_owned());
        let subject = row.jobs.iter().map(adapter).collect();
        let statement = Statement { kind, subject, predicate_type, predicate: Predicate::of(measured, row) };
        let envelope = Envelope::sign(serde_json::to_vec(&statement)?, &key);
        write_synced(dir, &path(row.arm), &envelope.to_bytes()?)?;
    }
    Ok(())
}

/// Reads the receipt of an arm; its signature holds.
///
/// # Errors
/// The user's: there is none, or it is not what one of these keys signed.
pub(super) fn open(dir: &Dir, known: &KnownKeys, arm: Arm) -> anyhow::Result<Predicate> {
    let path = path(arm);
    let refuse = |error: &dyn std::fmt::Display| user(format!("{path}: {error}"));
    let size = dir.metadata(&path).map_err(|error| refuse(&error))?.len();
    if size > ENVELOPE_BYTES_MAX as u64 {
        return Err(refuse(&"too large for a receipt"));
    }
    let envelope = Envelope::parse(&dir.read(&path).map_err(|error| refuse(&error))?).map_err(|error| refuse(&error))?;
    envelope.verify(known).map_err(|error| refuse(&error))?;
    let statement: Statement = serde_json::from_slice(envelope.payload()).map_err(|error| refuse(&error))?;
    if statement.predicate_type != PREDICATE_TYPE {
        return Err(refuse(&format!("a statement of another kind than {PREDICATE_TYPE}")));
    }
    Ok(statement.predicate)
}

fn path(arm: Arm) -> String {
    format!("{FOLDER}/{}.json", arm.key())
}
