//! Makes a receipt: who was before, the statement, the signature and the ledger's entry, as one step under one lock.
//!
//! Never gives a receipt away that the ledger does not have.

use nodus_protocol::Digest;

use super::entry::{EntryRef, Event};
use super::error::SealError;
use super::write::Ledger;
use crate::envelope::{Envelope, receipt_digest};
use crate::statement::{DigestSet, Statement};

/// A signed receipt that is in the ledger. If the process dies before it has written the file, the ledger names a receipt that nobody
/// has; the next one follows it all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedReceipt {
    /// The file's bytes: `receipt.json`.
    pub envelope: Vec<u8>,
    /// Over those bytes; the next receipt's `previous_receipt`.
    pub digest: Digest,
    /// Where the ledger has it.
    pub entry: EntryRef,
}

impl Ledger {
    /// Seals a receipt. `statement` is given the digest of the receipt before, which it must put into the predicate's
    /// `previous_receipt` (see [`crate::statement`]), and returns the statement's bytes. The lock is held while it runs, so it must
    /// not be slow.
    ///
    /// # Errors
    /// What `statement` says; it made no receipt, or one that names another receipt before it; what [`Ledger::append`] says. Nothing is
    /// in the ledger then, but for an error of the disk.
    pub fn seal<E>(
        &mut self,
        unix_ms: u64,
        job: &str,
        tenant: &str,
        statement: impl FnOnce(Option<Digest>) -> Result<Vec<u8>, E>,
    ) -> Result<SealedReceipt, SealError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut locked = self.lock()?;
        let previous = self.last_receipt;
        let payload = statement(previous).map_err(|error| SealError::Builder(error.into()))?;
        let fields = Statement::parse(&payload)?;
        let named = fields.predicate.previous_receipt.map(|DigestSet(digest)| digest);
        if named != previous {
            return Err(SealError::Previous { expected: shown(previous), found: shown(named) });
        }
        let envelope = Envelope::sign(payload, &self.key).to_bytes()?;
        let digest = receipt_digest(&envelope);
        let event =
            Event::Receipt { job: job.to_owned(), tenant: tenant.to_owned(), receipt: digest, subjects: fields.subjects().collect() };
        let entry = self.add(&mut locked, unix_ms, event)?;
        Ok(SealedReceipt { envelope, digest, entry })
    }
}

/// A receipt's digest as messages show it.
pub(crate) fn shown(receipt: Option<Digest>) -> String {
    receipt.map_or_else(|| "none".to_owned(), |digest| digest.to_string())
}
