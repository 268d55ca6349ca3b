//! Blobs that nobody refers to any more are removed: with the last row that does, and what a crash left of that once in a while.
//!
//! Never removes what is pinned: written, and about to be referred to.

use nodus_protocol::Digest;
use rusqlite::Transaction;

use crate::access::Access;
use crate::database::lock;
use crate::error::Result;
use crate::state::State;
use crate::tokens::digest_sql;

/// What was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Files.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Of these contents, takes the rows of those that nothing refers to any more. Their files go once that is committed: see [`State::let_go`].
pub(crate) fn unnamed(transaction: &Transaction<'_>, contents: Vec<Digest>) -> Result<Vec<Digest>> {
    let mut delete = transaction.prepare_cached(
        "DELETE FROM blobs WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM item_files WHERE digest = ?1)
         AND NOT EXISTS (SELECT 1 FROM inputs WHERE digest = ?1) AND NOT EXISTS (SELECT 1 FROM artifacts WHERE digest = ?1)",
    )?;
    let mut gone = Vec::new();
    for digest in contents {
        if delete.execute([digest_sql(digest)])? > 0 {
            gone.push(digest);
        }
    }
    Ok(gone)
}

fn is_named(view: &Transaction<'_>, digest: Digest) -> Result<bool> {
    let mut select = view.prepare_cached("SELECT EXISTS (SELECT 1 FROM blobs WHERE digest = ?)")?;
    Ok(select.query_row([digest_sql(digest)], |row| row.get(0))?)
}

impl State {
    /// Removes the files of contents whose rows are gone. That they were let go is done all the same: a file that stays is removed later.
    pub(crate) fn let_go(&self, contents: Vec<Digest>) {
        lock(&self.blobs.pins).loose.extend(contents);
        if let Err(error) = self.sweep() {
            tracing::warn!("files that nothing refers to could not be removed; it is tried again: {error}");
        }
    }

    /// Removes the files that were let go since it was done last, and that no row speaks of: of what was kept and not referred to in the end, too.
    ///
    /// # Errors
    /// The disk's, the first; what is left is tried again the next time.
    pub fn sweep(&self) -> Result<()> {
        if self.blobs.access == Access::Rows {
            return Ok(());
        }
        // Held to the end: who is to refer to one of them has it pinned by now, or puts it in its place afterwards.
        let mut pins = lock(&self.blobs.pins);
        let loose: Vec<Digest> = pins.loose.iter().copied().filter(|digest| !pins.is_held(*digest)).collect();
        if loose.is_empty() {
            return Ok(());
        }
        let named = self.database.read(|view| loose.iter().map(|digest| is_named(view, *digest)).collect::<Result<Vec<_>>>())?;
        let mut done = Ok(());
        for (digest, is_named) in loose.into_iter().zip(named) {
            match if is_named { Ok(()) } else { self.blobs.remove(digest) } {
                Ok(()) => drop(pins.loose.remove(&digest)),
                // One that stays is in no other's way.
                Err(error) => done = done.and(Err(error)),
            }
        }
        done
    }

    /// Whether there is a row of this content.
    pub(crate) fn is_named(&self, digest: Digest) -> Result<bool> {
        self.database.read(|view| is_named(view, digest))
    }

    /// Removes the blobs that nothing refers to. Rows go before files: what is half done is done by the next run.
    ///
    /// # Errors
    /// The disk's, the first: all that can be removed is.
    pub fn gc(&self) -> Result<Collected> {
        // Held to the end, so that nobody finds a blob in its place that is about to go.
        let pins = lock(&self.blobs.pins);
        let rows: Vec<Digest> = self.database.write(|transaction| {
            let unreferenced = "DELETE FROM blobs WHERE digest NOT IN
                (SELECT digest FROM item_files UNION SELECT digest FROM inputs UNION SELECT digest FROM artifacts)";
            transaction.execute(unreferenced, [])?;
            let mut statement = transaction.prepare("SELECT digest FROM blobs ORDER BY digest")?;
            let rows = statement.query_map([], |row| row.get(0).map(Digest::from_bytes))?;
            Ok(rows.collect::<rusqlite::Result<_>>()?)
        })?;
        let (mut collected, mut done) = (Collected::default(), Ok(()));
        for (digest, bytes) in self.blobs.all()? {
            if rows.binary_search(&digest).is_ok() || pins.is_held(digest) {
                continue;
            }
            match self.blobs.remove(digest) {
                Ok(()) => collected = Collected { blobs: collected.blobs + 1, bytes: collected.bytes + bytes },
                Err(error) => done = done.and(Err(error)),
            }
        }
        done.map(|()| collected)
    }
}
