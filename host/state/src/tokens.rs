//! Bearer tokens: random, shown once, kept as a hash.
//!
//! Never keeps a token itself. A hash without salt is enough for 256 random bits.

use nodus_protocol::Digest;
use rusqlite::{OptionalExtension as _, Transaction};

use crate::error::{Result, StateError};
use crate::ids::TenantId;
use crate::state::{State, now_ms};
use crate::tenants::{Tenant, tenant};

const PREFIX: &str = "nodus_";
/// Longest text that is looked at.
const TEXT_BYTES_MAX: usize = 256;

/// Whose token it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bearer {
    /// The operator's.
    Operator,
    /// A tenant's.
    Tenant(Box<Tenant>),
}

/// What is known of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// When it was made.
    pub created_ms: u64,
    /// When it was revoked.
    pub revoked_ms: Option<u64>,
}

/// What shuts bearers out. Another one means that a token was revoked, or a tenant disabled or enabled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bars {
    revoked: u64,
    disabled: Vec<TenantId>,
}

pub(crate) fn digest_sql(digest: Digest) -> [u8; 32] {
    *digest.as_bytes()
}

impl State {
    /// A new token of a tenant, or of the operator (`None`). It cannot be had again.
    ///
    /// # Errors
    /// There is no such tenant; the disk refuses, or the kernel has no random numbers.
    pub fn add_token(&self, of: Option<TenantId>) -> Result<String> {
        self.database.write(|transaction| add(transaction, of))
    }

    /// A new token, and all others of the same owner revoked.
    ///
    /// # Errors
    /// As [`State::add_token`].
    pub fn rotate_tokens(&self, of: Option<TenantId>) -> Result<String> {
        self.database.write(|transaction| {
            transaction.execute("UPDATE tokens SET revoked_ms = ? WHERE tenant IS ? AND revoked_ms IS NULL", (now_ms(), of))?;
            add(transaction, of)
        })
    }

    /// The tokens of a tenant, or of the operator, the oldest first.
    ///
    /// # Errors
    /// The disk's.
    pub fn tokens(&self, of: Option<TenantId>) -> Result<Vec<Token>> {
        self.database.read(|view| {
            let mut statement = view.prepare_cached("SELECT created_ms, revoked_ms FROM tokens WHERE tenant IS ? ORDER BY id")?;
            let rows = statement.query_map([of], |row| Ok(Token { created_ms: row.get(0)?, revoked_ms: row.get(1)? }))?;
            Ok(rows.collect::<rusqlite::Result<_>>()?)
        })
    }

    /// Whose token this is; nobody's where it is none, was revoked, or its tenant is disabled.
    ///
    /// # Errors
    /// The disk's.
    pub fn bearer(&self, token: &str) -> Result<Option<Bearer>> {
        if token.len() > TEXT_BYTES_MAX || !token.starts_with(PREFIX) {
            return Ok(None);
        }
        // The database compares hashes: how long that takes tells nothing of a token.
        self.bearer_of(Digest::of(token.as_bytes()))
    }

    /// As [`State::bearer`], of a token that is known by its SHA-256.
    ///
    /// # Errors
    /// The disk's.
    pub fn bearer_of(&self, token: Digest) -> Result<Option<Bearer>> {
        self.database.read_at_door(|view| {
            let mut statement = view.prepare_cached("SELECT tenant FROM tokens WHERE digest = ? AND revoked_ms IS NULL")?;
            let found = statement.query_row([digest_sql(token)], |row| row.get::<_, Option<TenantId>>(0)).optional()?;
            Ok(match found {
                None => None,
                Some(None) => Some(Bearer::Operator),
                Some(Some(id)) => {
                    Some(tenant(view, id)?).filter(|tenant| !tenant.is_disabled).map(|tenant| Bearer::Tenant(Box::new(tenant)))
                }
            })
        })
    }

    /// What shuts bearers out at this moment.
    ///
    /// # Errors
    /// The disk's.
    pub fn bars(&self) -> Result<Bars> {
        self.database.read(|view| {
            let revoked =
                view.prepare_cached("SELECT count(*) FROM tokens WHERE revoked_ms IS NOT NULL")?.query_row([], |row| row.get(0))?;
            let mut statement = view.prepare_cached("SELECT id FROM tenants WHERE disabled ORDER BY id")?;
            let disabled = statement.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
            Ok(Bars { revoked, disabled })
        })
    }
}

fn add(transaction: &Transaction<'_>, of: Option<TenantId>) -> Result<String> {
    if let Some(id) = of {
        tenant(transaction, id)?;
    }
    let token = fresh()?;
    let digest = digest_sql(Digest::of(token.as_bytes()));
    transaction.execute("INSERT INTO tokens (digest, tenant, created_ms) VALUES (?, ?, ?)", (digest, of, now_ms()))?;
    Ok(token)
}

/// 32 random bytes, in hexadecimal.
fn fresh() -> Result<String> {
    let mut bytes = [0_u8; 32];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let what = "asking the kernel for random numbers";
    match count {
        Ok(count) if count == bytes.len() => {}
        Ok(_) => return Err(StateError::File { what, source: std::io::ErrorKind::UnexpectedEof.into() }),
        Err(error) => return Err(StateError::File { what, source: error.into() }),
    }
    Ok(format!("{PREFIX}{}", Digest::from_bytes(bytes).hex()))
}
