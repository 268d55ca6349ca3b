//! What tenants bring: components, data sets, adapters. Each is a name or a digest, and files.
//!
//! Never shows one tenant's items to another. The same content of two tenants is one blob, and neither can tell.

use std::io::Read as _;

use nodus_protocol::Digest;
use rusqlite::{OptionalExtension as _, Row, Transaction};
use serde_json::Value;

use crate::blobs::{Kept, Staged};
use crate::error::{Result, StateError};
use crate::gc::unnamed;
use crate::ids::TenantId;
use crate::quota::within;
use crate::state::{State, now_ms};
use crate::tenants::tenant;
use crate::tokens::digest_sql;
use crate::usage::stored_bytes;
use crate::words::ItemKind;

/// Whose item it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// This tenant's.
    Tenant(TenantId),
    /// The operator's, for all tenants.
    Shared,
}

impl Owner {
    fn id(self) -> Option<TenantId> {
        match self {
            Self::Tenant(id) => Some(id),
            Self::Shared => None,
        }
    }
}

/// How an item is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference {
    /// By the name it was given.
    Name(String),
    /// By what is in it.
    Digest(Digest),
}

/// An item to be added.
#[derive(Debug)]
pub struct NewItem<'a> {
    /// What it is.
    pub kind: ItemKind,
    /// Whose.
    pub owner: Owner,
    /// Its name, where it has one.
    pub name: Option<&'a str>,
    /// What it is known by: of a single file the file's, of an adapter the folder's.
    pub digest: Digest,
    /// What whoever added it says of it.
    pub about: &'a Value,
    /// Its files: paths within it, and their content.
    pub files: &'a [(String, Kept)],
}

/// An item.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub(crate) id: i64,
    /// What it is.
    pub kind: ItemKind,
    /// Whether it is the operator's, for all tenants.
    pub is_shared: bool,
    /// Its name, where it has one.
    pub name: Option<String>,
    /// What it is known by.
    pub digest: Digest,
    /// What whoever added it says of it.
    pub about: Value,
    /// Bytes of its files.
    pub bytes: u64,
    /// When it was added.
    pub created_ms: u64,
}

/// A file of an item, a job's input or an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRef {
    /// Within what it belongs to.
    pub path: String,
    /// Of its content.
    pub digest: Digest,
    /// Length of its content.
    pub bytes: u64,
}

const COLUMNS: &str = "id, kind, tenant IS NULL, name, digest, about, created_ms,
    (SELECT ifnull(sum(bytes), 0) FROM item_files JOIN blobs USING (digest) WHERE item = items.id)";

fn from_row(row: &Row<'_>) -> rusqlite::Result<(Item, String)> {
    let item = Item {
        id: row.get(0)?,
        kind: row.get(1)?,
        is_shared: row.get(2)?,
        name: row.get(3)?,
        digest: Digest::from_bytes(row.get(4)?),
        about: Value::Null,
        created_ms: row.get(6)?,
        bytes: row.get(7)?,
    };
    Ok((item, row.get(5)?))
}

fn parsed((item, about): (Item, String)) -> Result<Item> {
    Ok(Item { about: serde_json::from_str(&about)?, ..item })
}

/// The tenant's own before the operator's.
pub(crate) fn find(view: &Transaction<'_>, of: TenantId, kind: ItemKind, reference: &Reference) -> Result<Item> {
    let (column, name, digest) = match reference {
        Reference::Name(name) => ("name", Some(name), None),
        Reference::Digest(digest) => ("digest", None, Some(digest_sql(*digest))),
    };
    let select = format!(
        "SELECT {COLUMNS} FROM items WHERE kind = ?1 AND (tenant = ?2 OR tenant IS NULL) AND {column} = ifnull(?3, ?4)
         ORDER BY tenant IS NULL, id LIMIT 1"
    );
    let found = view.prepare_cached(&select)?.query_row((kind, of, name, digest), from_row).optional()?;
    parsed(found.ok_or(StateError::NotFound(what(kind)))?)
}

fn what(kind: ItemKind) -> &'static str {
    match kind {
        ItemKind::Component => "component",
        ItemKind::Data => "data set",
        ItemKind::Adapter => "adapter",
    }
}

pub(crate) fn files(view: &Transaction<'_>, item: &Item) -> Result<Vec<FileRef>> {
    file_refs(view, "SELECT path, digest, bytes FROM item_files JOIN blobs USING (digest) WHERE item = ? ORDER BY path", item.id)
}

pub(crate) fn file_refs(view: &Transaction<'_>, select: &str, of: i64) -> Result<Vec<FileRef>> {
    let mut statement = view.prepare_cached(select)?;
    let file = |row: &Row<'_>| Ok(FileRef { path: row.get(0)?, digest: Digest::from_bytes(row.get(1)?), bytes: row.get(2)? });
    Ok(statement.query_map([of], file)?.collect::<rusqlite::Result<_>>()?)
}

/// Enters a blob that is in its place and pinned.
pub(crate) fn enter_blob(transaction: &Transaction<'_>, blob: &Kept) -> Result<()> {
    let insert = "INSERT INTO blobs (digest, bytes) VALUES (?, ?) ON CONFLICT DO NOTHING";
    transaction.prepare_cached(insert)?.execute((digest_sql(blob.digest()), blob.bytes()))?;
    Ok(())
}

impl State {
    /// A file to write an upload or a result into, of so many bytes at most.
    ///
    /// # Errors
    /// The disk's.
    pub fn stage(&self, bytes_max: u64) -> Result<Staged<'_>> {
        self.blobs.stage(bytes_max)
    }

    /// Adds an item. The same again is what is there already; whether it was new.
    ///
    /// # Errors
    /// The name is taken by other content; the quota; the disk.
    pub fn add_item(&self, new: &NewItem<'_>) -> Result<(Item, bool)> {
        self.database.write(|transaction| add(transaction, new))
    }

    /// An item that a tenant may use: its own, or a shared one.
    ///
    /// # Errors
    /// There is none that it may.
    pub fn item(&self, of: TenantId, kind: ItemKind, reference: &Reference) -> Result<Item> {
        self.database.read(|view| find(view, of, kind, reference))
    }

    /// The files of an item that a tenant may use.
    ///
    /// # Errors
    /// There is none that it may.
    pub fn item_files(&self, of: TenantId, kind: ItemKind, reference: &Reference) -> Result<Vec<FileRef>> {
        self.database.read(|view| files(view, &find(view, of, kind, reference)?))
    }

    /// The items that a tenant may use, the shared ones first, then by age.
    ///
    /// # Errors
    /// The disk's.
    pub fn items(&self, of: TenantId, kind: ItemKind) -> Result<Vec<Item>> {
        self.database.read(|view| {
            let select =
                format!("SELECT {COLUMNS} FROM items WHERE kind = ? AND (tenant = ? OR tenant IS NULL) ORDER BY tenant IS NOT NULL, id");
            let mut statement = view.prepare_cached(&select)?;
            let rows = statement.query_map((kind, of), from_row)?.collect::<rusqlite::Result<Vec<_>>>()?;
            rows.into_iter().map(parsed).collect()
        })
    }

    /// Removes an item of the owner's. Jobs that were given it keep its content.
    ///
    /// # Errors
    /// The owner has none.
    pub fn remove_item(&self, of: Owner, kind: ItemKind, reference: &Reference) -> Result<()> {
        let (column, name, digest) = match reference {
            Reference::Name(name) => ("name", Some(name), None),
            Reference::Digest(digest) => ("digest", None, Some(digest_sql(*digest))),
        };
        let own = format!("kind = ?1 AND ifnull(tenant, 0) = ifnull(?2, 0) AND {column} = ifnull(?3, ?4)");
        let gone = self.database.write(|transaction| {
            let select = format!("SELECT digest FROM item_files WHERE item IN (SELECT id FROM items WHERE {own})");
            let contents = contents(transaction, &select, (kind, of.id(), name, digest))?;
            match transaction.execute(&format!("DELETE FROM items WHERE {own}"), (kind, of.id(), name, digest))? {
                0 => Err(StateError::NotFound(what(kind))),
                _ => unnamed(transaction, contents),
            }
        })?;
        self.let_go(gone);
        Ok(())
    }

    /// The content of a file that a row named, as it is there: whoever makes a result of it checks the digest.
    ///
    /// # Errors
    /// Its owner has let it go meanwhile; it is not there: the state is damaged.
    pub fn open_file(&self, file: &FileRef) -> Result<cap_std::fs::File> {
        match self.blobs.read(file.digest) {
            Err(StateError::Damaged(_)) if !self.is_named(file.digest)? => Err(StateError::NotFound("file")),
            opened => opened,
        }
    }

    /// The whole content of a file that a row named, and nothing else than that.
    ///
    /// # Errors
    /// It is not there, or is something else: the state is damaged.
    pub fn read_file(&self, file: &FileRef) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(file)?.read_to_end(&mut bytes).map_err(StateError::file("reading a blob"))?;
        let (found, expected) = (Digest::of(&bytes), file.digest);
        if found == expected { Ok(bytes) } else { Err(StateError::Damaged(format!("blob {expected} holds {found}"))) }
    }
}

/// Adds an item within a transaction, see [`State::add_item`].
pub(crate) fn add(transaction: &Transaction<'_>, new: &NewItem<'_>) -> Result<(Item, bool)> {
    let taken = "SELECT digest FROM items WHERE kind = ?1 AND ifnull(tenant, 0) = ifnull(?2, 0) AND ifnull(name, digest) = ifnull(?3, ?4)";
    let (owner, digest) = (new.owner.id(), digest_sql(new.digest));
    let there = transaction.query_row(taken, (new.kind, owner, new.name, digest), |row| row.get::<_, [u8; 32]>(0)).optional()?;
    if there.is_some_and(|there| there != digest) {
        return Err(StateError::Taken(new.name.unwrap_or_default().to_owned()));
    }
    if there.is_none() {
        insert(transaction, new, owner)?;
    }
    // The owner's own: a tenant's item may have the name or the content of a shared one.
    let select = format!(
        "SELECT {COLUMNS} FROM items WHERE kind = ?1 AND ifnull(tenant, 0) = ifnull(?2, 0) AND ifnull(name, digest) = ifnull(?3, ?4)"
    );
    let item = parsed(transaction.query_row(&select, (new.kind, owner, new.name, digest), from_row)?)?;
    Ok((item, there.is_none()))
}

/// Digests that a query gives.
pub(crate) fn contents(view: &Transaction<'_>, select: &str, values: impl rusqlite::Params) -> Result<Vec<Digest>> {
    let mut statement = view.prepare_cached(select)?;
    Ok(statement.query_map(values, |row| row.get(0).map(Digest::from_bytes))?.collect::<rusqlite::Result<_>>()?)
}

/// Forgets the adapters of a tenant that none of its jobs starts from: what they are of, some job was given.
pub(crate) fn forget_adapters(transaction: &Transaction<'_>, of: TenantId) -> Result<()> {
    let delete = "DELETE FROM items WHERE kind = 'adapter' AND tenant = ?1 AND EXISTS (SELECT 1 FROM item_files WHERE item = items.id
         AND NOT EXISTS (SELECT 1 FROM inputs JOIN jobs ON job = number
             WHERE inputs.digest = item_files.digest AND role = 'init_adapter' AND tenant = ?1))";
    transaction.prepare_cached(delete)?.execute([of])?;
    Ok(())
}

fn insert(transaction: &Transaction<'_>, new: &NewItem<'_>, owner: Option<TenantId>) -> Result<()> {
    let values = (new.kind, owner, new.name, digest_sql(new.digest), serde_json::to_string(new.about)?, now_ms());
    transaction.execute("INSERT INTO items (kind, tenant, name, digest, about, created_ms) VALUES (?, ?, ?, ?, ?, ?)", values)?;
    let id = transaction.last_insert_rowid();
    let before = owner.map(|owner| stored_bytes(transaction, owner)).transpose()?;
    for (path, blob) in new.files {
        enter_blob(transaction, blob)?;
        transaction.execute("INSERT INTO item_files (item, path, digest) VALUES (?, ?, ?)", (id, path, digest_sql(blob.digest())))?;
    }
    if let (Some(owner), Some(before)) = (owner, before) {
        let bound = tenant(transaction, owner)?.quota.stored_bytes;
        within("stored-bytes", bound, before, stored_bytes(transaction, owner)?.saturating_sub(before))?;
    }
    Ok(())
}
