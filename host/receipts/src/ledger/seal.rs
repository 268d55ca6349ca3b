//! Makes a receipt: who was before, the statement, the signature and the ledger's entry, as one step under one lock.
//!
//! Never gives a receipt away that the ledger does not have.

use std::io::ErrorKind;

use nodus_protocol::Digest;

use super::entry::{Entry, EntryRef, Event};
use super::error::{LedgerError, SealError, io};
use super::write::{Ledger, Locked};
use crate::envelope::{Envelope, receipt_digest};
use crate::files::write_synced;
use crate::statement::{DigestSet, Statement};

/// A signed receipt that is in the ledger. If the process dies before it has written the file, the ledger names a receipt that nobody
/// has, unless it was sealed by [`Ledger::seal_once`]; the next one follows it all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedReceipt {
    /// The file's bytes: `receipt.json`.
    pub envelope: Vec<u8>,
    /// Over those bytes; the next receipt's `previous_receipt`.
    pub digest: Digest,
    /// Where the ledger has it.
    pub entry: EntryRef,
}

/// Folder of envelopes whose job's results were not kept yet, each under its job's name.
const SEALED: &str = "sealed";

/// Signed, and not entered yet.
struct Signed {
    envelope: Vec<u8>,
    digest: Digest,
    event: Event,
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
        let signed = self.sign((job, tenant), statement)?;
        self.enter_signed(&mut locked, unix_ms, signed)
    }

    /// Seals the receipt of a job that may come to its end more than once, since a crash can undo all but the ledger: the second time it is
    /// the receipt of the first, until [`Ledger::settle`] says that what it speaks of is kept. Whether it says the same is the caller's to
    /// check.
    ///
    /// # Errors
    /// As [`Ledger::seal`]; the job's name is not of letters, digits and `-`.
    pub fn seal_once<E>(
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
        if let Some(before) = self.sealed_before(job)? {
            return Ok(before);
        }
        let signed = self.sign((job, tenant), statement)?;
        // On the disk before the ledger names it: an envelope without an entry is signed anew, an entry without its envelope would be lost.
        write_synced(&self.dir, &place(job)?, &signed.envelope).map_err(io("writing", SEALED))?;
        self.enter_signed(&mut locked, unix_ms, signed)
    }

    /// What a job's receipt speaks of is kept, or will never be: it is not needed here any more.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn settle(&self, job: &str) -> Result<(), LedgerError> {
        match self.dir.remove_file(place(job)?) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io("removing a receipt from", SEALED)(error)),
            _ => Ok(()),
        }
    }

    /// Jobs whose receipts were sealed by [`Ledger::seal_once`] and not settled.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn unsettled(&self) -> Result<Vec<String>, LedgerError> {
        if !self.dir.exists(SEALED) {
            return Ok(Vec::new());
        }
        let names = || self.dir.read_dir(SEALED)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect();
        let names: std::io::Result<Vec<String>> = names();
        // Half of one that a crash left is none.
        Ok(names.map_err(io("listing", SEALED))?.into_iter().filter(|name| place(name).is_ok()).collect())
    }

    /// The receipt of this job that is in the ledger and was not settled. Hold the lock.
    fn sealed_before(&self, job: &str) -> Result<Option<SealedReceipt>, LedgerError> {
        let envelope = match self.dir.read(place(job)?) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(io("reading a receipt in", SEALED))?,
        };
        let digest = receipt_digest(&envelope);
        for entry in self.index.entries(&self.dir, job, 0)? {
            let Entry { at, event, .. } = entry?;
            if matches!(&event, Event::Receipt { job: of, receipt, .. } if of == job && *receipt == digest) {
                return Ok(Some(SealedReceipt { envelope, digest, entry: at }));
            }
        }
        Ok(None)
    }

    fn sign<E>(
        &self,
        (job, tenant): (&str, &str),
        statement: impl FnOnce(Option<Digest>) -> Result<Vec<u8>, E>,
    ) -> Result<Signed, SealError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
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
        Ok(Signed { envelope, digest, event })
    }

    fn enter_signed(&mut self, locked: &mut Locked, unix_ms: u64, signed: Signed) -> Result<SealedReceipt, SealError> {
        let Signed { envelope, digest, event } = signed;
        let entry = self.add(locked, unix_ms, event)?;
        Ok(SealedReceipt { envelope, digest, entry })
    }
}

/// Where a job's envelope is kept. A name that could lead elsewhere is refused.
fn place(job: &str) -> Result<String, LedgerError> {
    if job.is_empty() || !job.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        let what = std::io::Error::new(ErrorKind::InvalidInput, "a job is named by letters, digits and `-` there");
        return Err(io("naming a receipt in", SEALED)(what));
    }
    Ok(format!("{SEALED}/{job}"))
}

/// A receipt's digest as messages show it.
pub(crate) fn shown(receipt: Option<Digest>) -> String {
    receipt.map_or_else(|| "none".to_owned(), |digest| digest.to_string())
}
