//! An entry of the ledger, and the line that it is written as.
//!
//! Never reads a line that it would write in another way, so each entry has one writing and one digest.
//!
//! ```text
//! {"sequence":1,"previous":"sha256:..","unix_ms":1700000000000,"kind":"key_created","keyid":"..","checksum":"64 hex digits"}
//! ```
//! `previous` is the digest of the line before, without its newline (zeros in the first); `checksum` is SHA-256 over the line's bytes
//! before `,"checksum"`.

use std::fmt;
use std::str::FromStr;

use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};

use crate::key::KeyId;

/// The longest line, in bytes, with its newline.
pub const ENTRY_BYTES_MAX: usize = 1 << 20;
/// `previous` of the first entry: zeros.
#[must_use]
pub fn no_previous() -> Digest {
    Digest::from_bytes([0; 32])
}

/// Where an entry stands, and the digest that the next one names it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryRef {
    /// From 0; the line's number less 1.
    pub sequence: u64,
    /// Over the line without its newline.
    pub digest: Digest,
}

/// An entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its place.
    pub at: EntryRef,
    /// The digest of the entry before; [`no_previous`] in the first.
    pub previous: Digest,
    /// When it was written: milliseconds since 1970 in UTC, by the host's clock.
    pub unix_ms: u64,
    /// What happened.
    pub event: Event,
}

/// What an entry tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// The host signs with this key from here on.
    KeyCreated {
        /// The key.
        keyid: KeyId,
    },
    /// A receipt was signed.
    Receipt {
        /// The job.
        job: String,
        /// Whose it is.
        tenant: String,
        /// Over the envelope's bytes.
        receipt: Digest,
        /// Of the files that it speaks of, in its order.
        subjects: Vec<Digest>,
    },
    /// Bytes of an adapter came, moved or went.
    AdapterBytes {
        /// The job.
        job: String,
        /// Whose it is.
        tenant: String,
        /// Which of the job's adapters, from 0.
        adapter: u32,
        /// What became of them.
        event: BytesEvent,
        /// How many.
        bytes: u64,
    },
    /// A job ended without a receipt, or was refused.
    JobFailed {
        /// The job.
        job: String,
        /// Whose it is.
        tenant: String,
        /// Why, by a name that never changes: of the limit, the fault or the refusal.
        code: String,
    },
}

/// What became of an adapter's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BytesEvent {
    /// Reserved on the device.
    Allocated,
    /// Written to the device.
    Written,
    /// Read from the device and handed out.
    Exported,
    /// Overwritten with zeros on the device.
    Zeroed,
}

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`Event::KeyCreated`].
    KeyCreated,
    /// [`Event::Receipt`].
    Receipt,
    /// [`Event::AdapterBytes`].
    AdapterBytes,
    /// [`Event::JobFailed`].
    JobFailed,
}

impl Kind {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::KeyCreated, Self::Receipt, Self::AdapterBytes, Self::JobFailed];

    /// As the ledger writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::KeyCreated => "key_created",
            Self::Receipt => "receipt",
            Self::AdapterBytes => "adapter_bytes",
            Self::JobFailed => "job_failed",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A text that is no [`Kind`].
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no kind of entry: expected key_created, receipt, adapter_bytes or job_failed")]
pub struct KindParseError(String);

impl FromStr for Kind {
    type Err = KindParseError;

    fn from_str(text: &str) -> Result<Self, KindParseError> {
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| KindParseError(text.to_owned()))
    }
}

impl Event {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::KeyCreated { .. } => Kind::KeyCreated,
            Self::Receipt { .. } => Kind::Receipt,
            Self::AdapterBytes { .. } => Kind::AdapterBytes,
            Self::JobFailed { .. } => Kind::JobFailed,
        }
    }

    /// The tenant, where there is one.
    #[must_use]
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Self::KeyCreated { .. } => None,
            Self::Receipt { tenant, .. } | Self::AdapterBytes { tenant, .. } | Self::JobFailed { tenant, .. } => Some(tenant),
        }
    }

    /// The job, where there is one.
    #[must_use]
    pub fn job(&self) -> Option<&str> {
        match self {
            Self::KeyCreated { .. } => None,
            Self::Receipt { job, .. } | Self::AdapterBytes { job, .. } | Self::JobFailed { job, .. } => Some(job),
        }
    }
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The line ends before its checksum does.
    #[error("the line is incomplete: its checksum is missing")]
    Incomplete,
    /// The line's bytes are not those that were written.
    #[error("the line was altered: its checksum is {found}, expected {expected}")]
    Checksum {
        /// Over the bytes that are there.
        expected: String,
        /// What the line says.
        found: String,
    },
    /// Something follows a complete entry on its line.
    #[error("something follows the entry on its line, where its newline should be")]
    Trailing,
    /// Longer than a line can be.
    #[error("the line is longer than {ENTRY_BYTES_MAX} bytes")]
    TooLong,
    /// The line has no newline.
    #[error("the line does not end with a newline")]
    NoNewline,
    /// The checksum holds, but it is no entry.
    #[error("not an entry: {0}")]
    Form(String),
    /// An entry, written in another way.
    #[error("the entry is not written as this program writes one")]
    NotCanonical,
    /// A line is missing, twice there, or moved.
    #[error("the entry has sequence {found}, expected {expected}: a line was removed, added or moved")]
    Sequence {
        /// What the line's place asks for.
        expected: u64,
        /// What it says.
        found: u64,
    },
    /// The line does not follow the one before.
    #[error("the entry follows {found}, but the entry before it is {expected}: one of the two was altered")]
    Previous {
        /// The digest of the entry before.
        expected: Digest,
        /// What the line says.
        found: Digest,
    },
}

/// An entry as it is written, less the checksum.
#[derive(Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) sequence: u64,
    pub(super) previous: Digest,
    pub(super) unix_ms: u64,
    #[serde(flatten)]
    pub(super) event: Event,
}

/// A quote within a JSON string is escaped, so this stands where the field is, and nowhere else.
const CHECKSUM: &str = ",\"checksum\":\"";
const CHECKSUM_DIGITS: usize = 64;
const END: &str = "\"}";

impl Line {
    /// The line, without a newline.
    pub(super) fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_string(self)?;
        text.pop();
        let checksum = Digest::of(text.as_bytes()).hex();
        text.extend([CHECKSUM, &checksum, END]);
        Ok(text.into_bytes())
    }

    /// Reads a line, without its newline. [`Fault::Incomplete`] and [`Fault::Checksum`] can come of a crash; the others cannot.
    pub(super) fn decode(line: &[u8]) -> Result<Self, Fault> {
        let at = line.windows(CHECKSUM.len()).position(|window| window == CHECKSUM.as_bytes()).ok_or(Fault::Incomplete)?;
        let (body, rest) = line.split_at(at);
        let rest = rest.get(CHECKSUM.len()..).unwrap_or_default();
        let (found, end) = rest.split_at_checked(CHECKSUM_DIGITS).ok_or(Fault::Incomplete)?;
        let expected = Digest::of(body).hex();
        if found != expected.as_bytes() {
            return Err(Fault::Checksum { expected, found: String::from_utf8_lossy(found).into_owned() });
        }
        if end != END.as_bytes() {
            // Blocks that never reached the disk read as zeros.
            let written = END.bytes().chain(std::iter::repeat(0));
            let can_be_torn = end.iter().zip(written).all(|(&byte, written)| byte == 0 || byte == written);
            return Err(if can_be_torn { Fault::Incomplete } else { Fault::Trailing });
        }
        let form = |error: serde_json::Error| Fault::Form(error.to_string());
        let parsed: Self = serde_json::from_slice(&[body, b"}"].concat()).map_err(form)?;
        if parsed.encode().map_err(form)? != line { Err(Fault::NotCanonical) } else { Ok(parsed) }
    }
}
