//! Receipts: what a host signs about a finished run, where it is written down, and how anybody checks it.
//!
//! Reads no clock, runs no job, and knows no form of adapter or model: a statement is bytes and the few fields named in
//! [`statement`]. Never repairs a ledger, except that the torn line of a crashed append is cut off and reported.
//!
//! - [`envelope`]: a statement signed, in the form of DSSE.
//! - [`key`]: the host's ed25519 key and the public keys that an auditor trusts.
//! - [`ledger`]: the append-only file of all receipts and adapter bytes of a host, a hash chain.
//! - [`verify()`]: a receipt held against known keys, the files it speaks of, and the ledger.
//!
//! What is proven and what is not: a signature covers a receipt, and each receipt names the one before it, so no receipt can be
//! altered, reordered or taken out from between two others. Lines of the ledger are chained but not signed: whoever can write to
//! the data folder can write another ledger, and cutting whole lines off its end shows only against a receipt or a head
//! ([`ledger::Ledger::head`]) that is kept elsewhere.

pub mod envelope;
mod files;
pub mod key;
pub mod ledger;
pub mod statement;
pub mod verify;

pub use envelope::Envelope;
pub use key::{HostKey, KeyId, KnownKeys, PublicKey};
pub use ledger::{Follower, Ledger, Reader, SealedReceipt};
pub use verify::{Report, verify};
