//! What a tenant's uploads that are under way take of its quota, together.
//!
//! Never lets two of them have the same rest of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::database::lock;
use crate::error::Result;
use crate::ids::TenantId;
use crate::quota::within;

/// The rooms of tenants that have an upload under way.
pub(crate) type Rooms = Arc<Mutex<BTreeMap<TenantId, Room>>>;

/// One tenant's.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// What it kept when the last upload began, and what was kept or broke off since.
    beside: u64,
    /// What came so far of uploads under way.
    under_way: u64,
    uploads: usize,
}

/// One upload's part, until what came of it is among what the tenant keeps, or is gone.
#[derive(Debug)]
pub(crate) struct Share {
    rooms: Rooms,
    of: TenantId,
    bound: Option<u64>,
    bytes: u64,
    stays: bool,
}

impl Share {
    /// Of an upload of which so many bytes are there. `beside` measures what the tenant keeps, uploads under way left out.
    ///
    /// # Errors
    /// The quota is used up, or measuring failed.
    pub(crate) fn begin(
        rooms: &Rooms,
        (of, bound): (TenantId, Option<u64>),
        there: u64,
        beside: impl FnOnce() -> Result<u64>,
    ) -> Result<Self> {
        let mut all = lock(rooms);
        // Measured under the lock: what ends meanwhile is counted here or there, and never nowhere.
        let beside = beside()?;
        let under_way = all.get(&of).map_or(0, |room| room.under_way);
        within("stored-bytes", bound, beside.saturating_add(under_way), there.max(1))?;
        let room = all.entry(of).or_default();
        room.beside = beside;
        room.under_way += there;
        room.uploads += 1;
        Ok(Self { rooms: rooms.clone(), of, bound, bytes: there, stays: false })
    }

    /// So many bytes more are to come.
    ///
    /// # Errors
    /// The quota has no room for them.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<()> {
        let mut all = lock(&self.rooms);
        let room = all.entry(self.of).or_default();
        let others = room.beside.saturating_add(room.under_way - self.bytes);
        within("stored-bytes", self.bound, others, self.bytes + bytes)?;
        room.under_way += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// So many of them did not.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        lock(&self.rooms).entry(self.of).or_default().under_way -= bytes;
        self.bytes -= bytes;
    }

    /// What came stays when this is over.
    pub(crate) fn stay(&mut self) {
        self.stays = true;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut all = lock(&self.rooms);
        let Some(room) = all.get_mut(&self.of) else { return };
        room.under_way -= self.bytes;
        room.beside = room.beside.saturating_add(if self.stays { self.bytes } else { 0 });
        room.uploads -= 1;
        if room.uploads == 0 {
            all.remove(&self.of);
        }
    }
}
