//! What running jobs leave, held to their tenants' quota: what they tell as they tell it, and their results before those are kept.
//!
//! Never refuses by what it has not just measured. Jobs that write at the same time may go beyond the bound by what each was granted.

use crate::error::Result;
use crate::events::NewEvent;
use crate::jobs::{Claim, holder};
use crate::quota::within;
use crate::state::State;
use crate::tenants::tenant;
use crate::usage::stored_bytes;

/// What the row of an event costs beside its text: its keys, and its part of four indexes.
const ROW_BYTES: u64 = 256;

/// What an event with this text takes.
pub(crate) fn event_bytes(body: &str) -> u64 {
    ROW_BYTES + body.len() as u64
}

impl NewEvent {
    /// What it takes of its tenant's quota.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        event_bytes(&self.body)
    }
}

impl State {
    /// Grants a running job room for so many bytes more of what its tenant may store; how many it may write before it has to ask again, no more than
    /// `most` where that is more.
    ///
    /// # Errors
    /// The tenant's quota `stored-bytes` has no room for them; the claim is stale.
    pub fn grant(&self, claim: &Claim, needed: u64, most: u64) -> Result<u64> {
        self.database.read(|view| {
            let of = holder(view, claim)?.tenant;
            let Some(bound) = tenant(view, of)?.quota.stored_bytes else { return Ok(needed.max(most)) };
            let used = stored_bytes(view, of)?.saturating_add(self.blobs.unfinished_bytes(of));
            within("stored-bytes", Some(bound), used, needed)?;
            Ok(bound.saturating_sub(used).min(needed.max(most)))
        })
    }
}
