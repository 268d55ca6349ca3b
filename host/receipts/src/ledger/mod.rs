//! The host's ledger: every receipt, every job that ended without one and every adapter's bytes, one line each, each bound to the one before.
//!
//! Never reads a clock, and never loses a line that [`Ledger::append`] or [`Ledger::seal`] has returned: it is on the disk by then.
//!
//! Several processes may have the ledger open; one writes at a time. The lock (`ledger.lock`) is held for one append or one seal, a
//! few milliseconds, and whoever comes second waits, up to 30 seconds: only a stopped process holds it longer, and that is an
//! error ([`LedgerError::Busy`]). Under the lock a ledger first reads what others have added. A line that the disk does not take whole is taken back
//! under it too; who goes on reading behind what was read before ([`Follower`]) therefore shares it for the end of the file.
//!
//! Whoever opens a ledger reads and checks all of it once, and remembers where each job's entries are; from then on only what is added, or asked for,
//! is read, and who is to follow it gets that as it is ([`Ledger::follower`]). It does not begin at a place that an earlier process has left for it: a
//! writer would go on behind lines that it has to believe, and an altered ledger would be met by the next audit in place of the next start. Reading takes
//! some twenty seconds a gigabyte, which is three million entries.
//!
//! A crash in the middle of an append leaves a torn last line: no newline, or a checksum that does not hold. Whoever locks the
//! ledger next moves it to the end of `ledger.torn`, cuts it off and reports it ([`Ledger::torn`]). It is kept because a line that a
//! crash has torn and a last line that somebody has altered look the same. Anything else that is wrong is corruption, is reported with
//! its line, and stops every writer until a person has looked.

mod entry;
mod error;
mod follow;
mod index;
mod read;
mod scan;
mod seal;
mod write;

pub use entry::{BytesEvent, ENTRY_BYTES_MAX, Entry, EntryRef, Event, Fault, Kind, KindParseError, no_previous};
pub use error::{LedgerError, SealError};
pub use follow::Follower;
pub use index::JobEntries;
pub use read::{AdapterBytes, Entries, Filter, Reader, Summary};
pub use seal::SealedReceipt;
pub(crate) use seal::shown;
pub use write::Ledger;

/// The ledger's file: JSON Lines.
pub const LEDGER_FILE: &str = "ledger.jsonl";
/// Torn lines that were cut off, each with a newline.
pub const TORN_FILE: &str = "ledger.torn";
/// Locked by whoever writes.
pub const LOCK_FILE: &str = "ledger.lock";

/// A line that a crash has torn. It was never returned from an append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TornTail {
    /// Its number, from 1.
    pub line: u64,
    /// How many bytes of it were there.
    pub bytes: u64,
    /// How it shows.
    pub fault: Fault,
}
