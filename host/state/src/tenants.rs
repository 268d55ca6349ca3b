//! Tenants.
//!
//! A tenant is disabled, never removed: receipts and the ledger name it.

use rusqlite::{OptionalExtension as _, Row, Transaction};

use crate::error::{Result, StateError};
use crate::ids::TenantId;
use crate::quota::Quota;
use crate::state::{State, now_ms};

/// A tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Within this folder.
    pub id: TenantId,
    /// As the operator named it.
    pub name: String,
    /// Whether its tokens are refused and its waiting jobs stay where they are.
    pub is_disabled: bool,
    /// What it may have and use.
    pub quota: Quota,
    /// Time on the device, so far.
    pub device_ms: u64,
    /// When it was added.
    pub created_ms: u64,
}

fn columns() -> String {
    format!("id, name, disabled, device_ms, created_ms, {}", Quota::COLUMNS)
}

fn from_row(row: &Row<'_>) -> rusqlite::Result<Tenant> {
    Ok(Tenant {
        id: row.get(0)?,
        name: row.get(1)?,
        is_disabled: row.get(2)?,
        device_ms: row.get(3)?,
        created_ms: row.get(4)?,
        quota: Quota::from_row(row, 5)?,
    })
}

pub(crate) fn tenant(view: &Transaction<'_>, id: TenantId) -> Result<Tenant> {
    let found = view.prepare_cached(&format!("SELECT {} FROM tenants WHERE id = ?", columns()))?.query_row([id], from_row);
    found.optional()?.ok_or(StateError::NotFound("tenant"))
}

impl State {
    /// Adds a tenant.
    ///
    /// # Errors
    /// The name is taken; the disk refuses.
    pub fn add_tenant(&self, name: &str, quota: Quota) -> Result<Tenant> {
        self.database.write(|transaction| {
            let insert = "INSERT INTO tenants (name, created_ms) VALUES (?, ?) ON CONFLICT DO NOTHING";
            if transaction.execute(insert, (name, now_ms()))? == 0 {
                return Err(StateError::Taken(name.to_owned()));
            }
            let id = TenantId(transaction.last_insert_rowid());
            write_quota(transaction, id, &quota)?;
            tenant(transaction, id)
        })
    }

    /// All tenants, by name.
    ///
    /// # Errors
    /// The disk's.
    pub fn tenants(&self) -> Result<Vec<Tenant>> {
        self.database.read(|view| {
            let mut statement = view.prepare_cached(&format!("SELECT {} FROM tenants ORDER BY name", columns()))?;
            Ok(statement.query_map([], from_row)?.collect::<rusqlite::Result<_>>()?)
        })
    }

    /// A tenant by its id.
    ///
    /// # Errors
    /// There is none.
    pub fn tenant(&self, id: TenantId) -> Result<Tenant> {
        self.database.read(|view| tenant(view, id))
    }

    /// A tenant by its name.
    ///
    /// # Errors
    /// There is none.
    pub fn tenant_named(&self, name: &str) -> Result<Tenant> {
        self.database.read(|view| {
            let found = view.prepare_cached(&format!("SELECT {} FROM tenants WHERE name = ?", columns()))?.query_row([name], from_row);
            found.optional()?.ok_or(StateError::NotFound("tenant"))
        })
    }

    /// Disables a tenant, or enables it again.
    ///
    /// # Errors
    /// There is none; the disk refuses.
    pub fn set_disabled(&self, id: TenantId, is_disabled: bool) -> Result<()> {
        self.database.write(|transaction| match transaction.execute("UPDATE tenants SET disabled = ? WHERE id = ?", (is_disabled, id))? {
            1 => Ok(()),
            _ => Err(StateError::NotFound("tenant")),
        })
    }

    /// Gives a tenant other bounds.
    ///
    /// # Errors
    /// There is none; the disk refuses.
    pub fn set_quota(&self, id: TenantId, quota: &Quota) -> Result<()> {
        self.database.write(|transaction| write_quota(transaction, id, quota))
    }
}

fn write_quota(transaction: &Transaction<'_>, id: TenantId, quota: &Quota) -> Result<()> {
    let update = format!("UPDATE tenants SET ({}) = (?, ?, ?, ?, ?, ?, ?) WHERE id = ?", Quota::COLUMNS);
    let Quota { queued_jobs, running_jobs, high_jobs, stored_bytes, device_bytes, device_ms, requests_per_second } = quota;
    let values = (queued_jobs, running_jobs, high_jobs, stored_bytes, device_bytes, device_ms, requests_per_second, id);
    match transaction.execute(&update, values)? {
        1 => Ok(()),
        _ => Err(StateError::NotFound("tenant")),
    }
}
