//! Who is at something that takes long, so that no tenant has all the turns: uploads, downloads, large bodies.
//!
//! Counts only; what is refused is refused by who asks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use nodus_state::TenantId;

/// How many turns each tenant has, and how many one may have.
pub(super) struct Slots {
    of_one_max: usize,
    taken: Mutex<HashMap<TenantId, usize>>,
}

/// One of them; given back when it is dropped.
pub(super) struct Slot {
    slots: Arc<Slots>,
    of: TenantId,
}

impl Slots {
    pub(super) fn new(of_one_max: usize) -> Arc<Self> {
        Arc::new(Self { of_one_max, taken: Mutex::default() })
    }

    /// How many one tenant may have.
    pub(super) fn of_one_max(&self) -> usize {
        self.of_one_max
    }

    /// One more, where the tenant may have one.
    pub(super) fn take(self: &Arc<Self>, of: TenantId) -> Option<Slot> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(of).or_default();
        if *count >= self.of_one_max {
            return None;
        }
        *count += 1;
        Some(Slot { slots: self.clone(), of })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.slots.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.of);
            }
        }
    }
}
