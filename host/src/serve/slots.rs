//! Who has uploads under way, so that no tenant takes all of them.
//!
//! Counts only; what is refused is refused by who asks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use nodus_state::TenantId;

/// Uploads of one tenant at the same time.
pub(super) const OF_ONE_MAX: usize = 8;

/// How many each has.
#[derive(Default)]
pub(super) struct Slots(Mutex<HashMap<TenantId, usize>>);

/// One of them; given back when it is dropped.
pub(super) struct Slot {
    slots: Arc<Slots>,
    of: TenantId,
}

impl Slots {
    /// One more, where the tenant may have one.
    pub(super) fn take(self: &Arc<Self>, of: TenantId) -> Option<Slot> {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(of).or_default();
        if *count >= OF_ONE_MAX {
            return None;
        }
        *count += 1;
        Some(Slot { slots: self.clone(), of })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.of);
            }
        }
    }
}
