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
use crate::spec::{HeldOut, JobSpec};
use crate::state::{State, now_ms};
use crate::tenants::{Tenant, tenant};
use crate::tokens::digest_sql;
use crate::usage::jobs_in;
use crate::words::{ItemKind, Role};

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

    /// Submits the members of a sweep, or one job.
    ///
    /// # Errors
    /// What the jobs name is not there for this tenant; a quota; the key came with another request; the disk refuses. Nothing was submitted.
    pub fn submit(&self, of: TenantId, key: Option<&Key>, specs: &[JobSpec]) -> Result<Submitted> {
        self.submit_from(of, key, specs, &[])
    }

    /// As [`State::submit`], with the adapters that the jobs start from: each stays as long as a job of the tenant's that starts from it.
    ///
    /// # Errors
    /// As [`State::submit`]; then none of the adapters stays either.
    pub fn submit_from(&self, of: TenantId, key: Option<&Key>, specs: &[JobSpec], adapters: &[NewItem<'_>]) -> Result<Submitted> {
        self.change(|transaction, changes| {
            if let Some(before) = key.map(|key| submitted_before(transaction, of, key)).transpose()?.flatten() {
                return Ok(before);
            }
            admit(transaction, &tenant(transaction, of)?, specs)?;
            adapters.iter().try_for_each(|adapter| add(transaction, adapter).map(drop))?;
            let (id, now) = (CohortId::new(), now_ms());
            let insert = "INSERT INTO cohorts (id, tenant, key, request, submitted_ms) VALUES (?, ?, ?, ?, ?)";
            let (text, request) = (key.map(|key| &key.key), key.map(|key| digest_sql(key.request)));
            transaction.execute(insert, params![id, of, text, request, now])?;
            let cohort = transaction.last_insert_rowid();
            let member = |(member, spec)| insert_job(transaction, of, (cohort, member), spec, now);
            let jobs = (0_i64..).zip(specs).map(member).collect::<Result<_>>()?;
            changes.push(Change { tenant: of, cohort: id, job: None, what: What::Submitted });
            let names = specs.iter().map(|spec| spec.name.clone()).collect();
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
    let mut members = view.prepare_cached("SELECT id, spec ->> 'name' FROM jobs WHERE cohort = ? ORDER BY member")?;
    let members = members.query_map([number], |row| Ok((row.get::<_, JobId>(0)?, row.get::<_, String>(1)?)))?;
    let (jobs, names) = members.collect::<rusqlite::Result<(Vec<_>, Vec<_>)>>()?;
    Ok(Some(Submitted { cohort, jobs, names, is_new: false }))
}

fn admit(view: &Transaction<'_>, tenant: &Tenant, specs: &[JobSpec]) -> Result<()> {
    let quota = &tenant.quota;
    within("queued-jobs", quota.queued_jobs, jobs_in(view, tenant.id, "queued")?, specs.len() as u64)?;
    within("device-ms", quota.device_ms, tenant.device_ms, 1)?;
    for spec in specs {
        within("device-bytes", quota.device_bytes, 0, spec.device_bytes().saturating_add(spec.activation_bytes()))?;
    }
    Ok(())
}

fn insert_job(transaction: &Transaction<'_>, of: TenantId, (cohort, member): (i64, i64), spec: &JobSpec, now: u64) -> Result<JobId> {
    let id = JobId::new();
    let insert = "INSERT INTO jobs (id, tenant, cohort, member, spec, priority, model, device_bytes, activation_bytes, state, submitted_ms)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued', ?)";
    let text = serde_json::to_string(spec)?;
    let (device, activation) = (spec.device_bytes(), spec.activation_bytes());
    let values = params![id, of, cohort, member, text, spec.priority, spec.model.name, device, activation, now];
    transaction.prepare_cached(insert)?.execute(values)?;
    let number = transaction.last_insert_rowid();
    let refer = |role: Role, kind: ItemKind, digest: Digest| -> Result<()> {
        let item = find(transaction, of, kind, &Reference::Digest(digest))?;
        for file in files(transaction, &item)? {
            let insert = "INSERT INTO inputs (job, role, path, digest) VALUES (?, ?, ?, ?)";
            transaction.prepare_cached(insert)?.execute((number, role, file.path, digest_sql(file.digest)))?;
        }
        Ok(())
    };
    refer(Role::Component, ItemKind::Component, spec.component.digest)?;
    refer(Role::Data, ItemKind::Data, spec.data.digest)?;
    if let HeldOut::Data(data) = &spec.held_out {
        refer(Role::HeldOut, ItemKind::Data, data.digest)?;
    }
    if let Some(adapter) = spec.init_adapter {
        refer(Role::InitAdapter, ItemKind::Adapter, adapter)?;
    }
    push_state(transaction, (cohort, number), &state_body("queued", &[("member", Value::from(member))]))?;
    Ok(id)
}
