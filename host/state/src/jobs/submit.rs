//! Jobs come in: one, or the members of a sweep, all or none.
//!
//! Never takes what the tenant may not use, and never the same request twice under one key.

use nodus_protocol::Digest;
use rusqlite::{OptionalExtension as _, Transaction, params};
use serde_json::Value;

use crate::change::{Change, What};
use crate::error::{Result, StateError};
use crate::events::{push_state, state_body};
use crate::ids::{CohortId, JobId, TenantId};
use crate::items::{NewItem, Reference, add, files, find};
use crate::quota::within;
use crate::spec::{Common, HeldOut};
use crate::state::{State, now_ms};
use crate::submission::{Member, Submission};
use crate::tenants::{Tenant, tenant};
use crate::tokens::digest_sql;
use crate::usage::{high_jobs, jobs_in, stored_bytes};
use crate::words::{ItemKind, Priority, Role};

/// What the members of one submission may have of their own, together, in bytes.
const MEMBERS_BYTES_MAX: u64 = 4 << 20;

/// What makes a repeated request the same one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// As the client chose it.
    pub key: String,
    /// Of the request that came with it.
    pub request: Digest,
}

/// What a submission came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// The sweep, or the one job's own.
    pub cohort: CohortId,
    /// Its members that are there, in order.
    pub jobs: Vec<JobId>,
    /// Their names within it.
    pub names: Vec<String>,
    /// Whether it was submitted now, and not under the same key before.
    pub is_new: bool,
}

impl State {
    /// What was submitted under a key before; nothing where it is new. Whoever asks before anything is looked up answers a repetition though what it
    /// names is gone by now.
    ///
    /// # Errors
    /// The key came with another request.
    pub fn submitted(&self, of: TenantId, key: &Key) -> Result<Option<Submitted>> {
        self.database.read(|view| submitted_before(view, of, key))
    }

    /// Whether a tenant may have so many more jobs queued, before anything is reckoned for them. A submission is held to it again.
    ///
    /// # Errors
    /// A quota.
    pub fn admits(&self, of: TenantId, priority: Priority, members: u64) -> Result<()> {
        self.database.read(|view| admit_so_many(view, &tenant(view, of)?, priority, members))
    }

    /// Submits the members of a sweep, or one job.
    ///
    /// # Errors
    /// What the jobs name is not there for this tenant; a quota; the key came with another request; the disk refuses. Nothing was submitted.
    pub fn submit(&self, of: TenantId, key: Option<&Key>, submission: &Submission) -> Result<Submitted> {
        self.submit_from(of, key, submission, &[])
    }

    /// As [`State::submit`], with the adapters that the jobs start from: each stays as long as a job of the tenant's that starts from it.
    ///
    /// # Errors
    /// As [`State::submit`]; then none of the adapters stays either.
    pub fn submit_from(
        &self,
        of: TenantId,
        key: Option<&Key>,
        Submission { common, members }: &Submission,
        adapters: &[NewItem<'_>],
    ) -> Result<Submitted> {
        let texts = members.iter().map(serde_json::to_string).collect::<serde_json::Result<Vec<_>>>()?;
        let bytes = texts.iter().map(|text| text.len() as u64).sum();
        if bytes > MEMBERS_BYTES_MAX {
            return Err(StateError::Sweep { bytes, max: MEMBERS_BYTES_MAX });
        }
        let common_text = serde_json::to_string(common)?;
        self.change(|transaction, changes| {
            if let Some(before) = key.map(|key| submitted_before(transaction, of, key)).transpose()?.flatten() {
                return Ok(before);
            }
            let tenant = tenant(transaction, of)?;
            admit(transaction, &tenant, common, members)?;
            let rows = bytes + common_text.len() as u64;
            let used = stored_bytes(transaction, of)?.saturating_add(self.blobs.unfinished_bytes(of));
            within("stored-bytes", tenant.quota.stored_bytes, used, rows)?;
            adapters.iter().try_for_each(|adapter| add(transaction, adapter).map(drop))?;
            let (id, now) = (CohortId::new(), now_ms());
            let insert = "INSERT INTO cohorts (id, tenant, key, request, submitted_ms) VALUES (?, ?, ?, ?, ?)";
            let (text, request) = (key.map(|key| &key.key), key.map(|key| digest_sql(key.request)));
            transaction.execute(insert, params![id, of, text, request, now])?;
            let cohort = transaction.last_insert_rowid();
            transaction.execute("INSERT INTO common_specs (cohort, spec) VALUES (?, ?)", (cohort, &common_text))?;
            let job = |(number, (member, text))| insert_job(transaction, of, (cohort, number), (common, member, text), now);
            let jobs = (0_i64..).zip(members.iter().zip(&texts)).map(job).collect::<Result<_>>()?;
            changes.push(Change { tenant: of, cohort: id, job: None, what: What::Submitted });
            let names = members.iter().map(|member| member.name.clone()).collect();
            Ok(Submitted { cohort: id, jobs, names, is_new: true })
        })
    }
}

fn submitted_before(view: &Transaction<'_>, of: TenantId, key: &Key) -> Result<Option<Submitted>> {
    let select = "SELECT number, id, request FROM cohorts WHERE tenant = ? AND key = ?";
    let row = view.query_row(select, params![of, key.key], |row| Ok((row.get::<_, i64>(0)?, row.get(1)?, row.get::<_, [u8; 32]>(2)?)));
    let Some((number, cohort, request)) = row.optional()? else { return Ok(None) };
    if request != digest_sql(key.request) {
        return Err(StateError::KeyReused);
    }
    let mut members = view.prepare_cached(
        "SELECT id, ifnull(spec ->> 'name', '') FROM jobs JOIN specs ON job = number WHERE cohort = ? AND leaving = 0 ORDER BY member",
    )?;
    let members = members.query_map([number], |row| Ok((row.get::<_, JobId>(0)?, row.get::<_, String>(1)?)))?;
    let (jobs, names) = members.collect::<rusqlite::Result<(Vec<_>, Vec<_>)>>()?;
    Ok(Some(Submitted { cohort, jobs, names, is_new: false }))
}

fn admit_so_many(view: &Transaction<'_>, tenant: &Tenant, priority: Priority, members: u64) -> Result<()> {
    let quota = &tenant.quota;
    within("queued-jobs", quota.queued_jobs, jobs_in(view, tenant.id, "queued")?, members)?;
    if priority == Priority::High {
        within("high-jobs", quota.high_jobs, high_jobs(view, tenant.id)?, members)?;
    }
    within("device-ms", quota.device_ms, tenant.device_ms, 1)
}

fn admit(view: &Transaction<'_>, tenant: &Tenant, common: &Common, members: &[Member]) -> Result<()> {
    admit_so_many(view, tenant, common.priority, members.len() as u64)?;
    for member in members {
        let (device, activation) = planned(common, member);
        within("device-bytes", tenant.quota.device_bytes, 0, device.saturating_add(activation))?;
    }
    Ok(())
}

/// Device memory planned for adapters, and for one pass.
fn planned(common: &Common, member: &Member) -> (u64, u64) {
    (member.limit(common, "device-bytes"), member.limit(common, "activation-bytes"))
}

fn insert_job(
    transaction: &Transaction<'_>,
    of: TenantId,
    (cohort, number): (i64, i64),
    (common, member, text): (&Common, &Member, &String),
    now: u64,
) -> Result<JobId> {
    let id = JobId::new();
    let insert = "INSERT INTO jobs (id, tenant, cohort, member, priority, lane, model, model_digest, device_bytes, activation_bytes, state, submitted_ms)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?)";
    let (Common { component, model, data, held_out, lane, priority, .. }, (device, activation)) = (common, planned(common, member));
    let values = params![id, of, cohort, number, priority, lane, model.name, digest_sql(model.digest), device, activation, now];
    transaction.prepare_cached(insert)?.execute(values)?;
    let job = transaction.last_insert_rowid();
    transaction.prepare_cached("INSERT INTO specs (job, spec) VALUES (?, ?)")?.execute((job, text))?;
    let refer = |role: Role, kind: ItemKind, digest: Digest| -> Result<()> {
        let item = find(transaction, of, kind, &Reference::Digest(digest))?;
        for file in files(transaction, &item)? {
            let insert = "INSERT INTO inputs (job, role, path, digest) VALUES (?, ?, ?, ?)";
            transaction.prepare_cached(insert)?.execute((job, role, file.path, digest_sql(file.digest)))?;
        }
        Ok(())
    };
    refer(Role::Component, ItemKind::Component, component.digest)?;
    refer(Role::Data, ItemKind::Data, data.digest)?;
    if let HeldOut::Data(data) = held_out {
        refer(Role::HeldOut, ItemKind::Data, data.digest)?;
    }
    if let Some(adapter) = member.init_adapter {
        refer(Role::InitAdapter, ItemKind::Adapter, adapter)?;
    }
    push_state(transaction, (cohort, job), &state_body("queued", &[("member", Value::from(number))]))?;
    Ok(id)
}
