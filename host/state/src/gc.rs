//! Blobs that nobody refers to any more are removed.
//!
//! Never removes what is pinned: written, and about to be referred to.

use nodus_protocol::Digest;

use crate::database::lock;
use crate::error::Result;
use crate::state::State;

/// What was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Files.
    pub blobs: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl State {
    /// Removes the blobs that nothing refers to. Rows go before files: what is half done is done by the next run.
    ///
    /// # Errors
    /// The disk's.
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
        let mut collected = Collected::default();
        for (digest, bytes) in self.blobs.all()? {
            if rows.binary_search(&digest).is_err() && !pins.contains_key(&digest) {
                self.blobs.remove(digest)?;
                collected.blobs += 1;
                collected.bytes += bytes;
            }
        }
        Ok(collected)
    }
}
