//! What a tenant's uploads that are under way take of its quota, together.
//!
//! Never lets two of them have the same rest of it, refuses nothing but by what was just measured, and holds nobody up but the tenant's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::database::lock;
use crate::error::Result;
use crate::ids::TenantId;
use crate::quota::within;

/// The rooms of tenants that had an upload since the start, each under a lock of its own.
pub(crate) type Rooms = Mutex<BTreeMap<TenantId, Arc<Mutex<Room>>>>;

/// Measures what a tenant keeps, uploads under way left out.
pub(crate) type Measure<'a> = Box<dyn Fn() -> Result<u64> + Send + Sync + 'a>;

/// One tenant's.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// What it kept when that was measured last, and what was kept or broke off since: never less than it keeps, but more where what ended was
    /// measured already.
    beside: u64,
    /// What came so far of uploads under way.
    under_way: u64,
}

/// One upload's part, until what came of it is among what the tenant keeps, or is gone.
#[derive(Debug)]
pub(crate) struct Share {
    room: Arc<Mutex<Room>>,
    bound: Option<u64>,
    bytes: u64,
    stays: bool,
}

impl Room {
    /// Measured under the lock: what ends meanwhile is counted here or there, and never nowhere. What is in both for a moment counts twice.
    fn measure(&mut self, measure: &Measure<'_>) -> Result<()> {
        self.beside = measure()?;
        Ok(())
    }
}

impl Share {
    /// Of an upload of which so many bytes are there.
    ///
    /// # Errors
    /// The quota is used up, or measuring failed.
    pub(crate) fn begin(rooms: &Rooms, (of, bound): (TenantId, Option<u64>), there: u64, measure: &Measure<'_>) -> Result<Self> {
        let room = lock(rooms).entry(of).or_default().clone();
        let mut own = lock(&room);
        own.measure(measure)?;
        within("stored-bytes", bound, own.beside.saturating_add(own.under_way), there.max(1))?;
        own.under_way += there;
        drop(own);
        Ok(Self { room, bound, bytes: there, stays: false })
    }

    /// So many bytes more are to come.
    ///
    /// # Errors
    /// The quota has no room for them, or measuring failed.
    pub(crate) fn take(&mut self, bytes: u64, measure: &Measure<'_>) -> Result<()> {
        let mut own = lock(&self.room);
        self.fits(&mut own, bytes, measure)?;
        own.under_way += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Whether so many bytes more could come now. Takes nothing.
    ///
    /// # Errors
    /// As [`Share::take`].
    pub(crate) fn admits(&self, bytes: u64, measure: &Measure<'_>) -> Result<()> {
        self.fits(&mut lock(&self.room), bytes, measure)
    }

    fn fits(&self, own: &mut Room, bytes: u64, measure: &Measure<'_>) -> Result<()> {
        let (others, asked) = (own.under_way - self.bytes, self.bytes.saturating_add(bytes));
        let fits = |own: &Room| within("stored-bytes", self.bound, own.beside.saturating_add(others), asked);
        if fits(own).is_err() {
            own.measure(measure)?;
            fits(own)?;
        }
        Ok(())
    }

    /// So many of them did not.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        lock(&self.room).under_way -= bytes;
        self.bytes -= bytes;
    }

    /// What came stays when this is over.
    pub(crate) fn stay(&mut self) {
        self.stays = true;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut own = lock(&self.room);
        own.under_way -= self.bytes;
        own.beside = own.beside.saturating_add(if self.stays { self.bytes } else { 0 });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::{Measure, Rooms, Share};
    use crate::ids::TenantId;

    fn tenant(number: i64) -> TenantId {
        TenantId(number)
    }

    /// Uploads that overlap without a pause, each among what is kept before its share goes.
    #[test]
    fn what_ends_and_is_measured_already_takes_nothing_for_good() {
        let (rooms, kept) = (Rooms::default(), AtomicU64::new(0));
        let measure: Measure<'_> = Box::new(|| Ok(kept.load(Relaxed)));
        let mut long = Share::begin(&rooms, (tenant(1), Some(100)), 0, &measure).unwrap();
        for _ in 0..4 {
            let mut one = Share::begin(&rooms, (tenant(1), Some(100)), 0, &measure).unwrap();
            one.take(20, &measure).unwrap();
            kept.fetch_add(20, Relaxed);
            drop(Share::begin(&rooms, (tenant(1), Some(200)), 0, &measure).unwrap());
            one.stay();
        }
        long.take(20, &measure).expect("80 bytes of 100 are kept");
        assert!(long.take(1, &measure).is_err());
    }

    #[test]
    fn a_tenant_whose_disk_is_slow_holds_nobody_else_up() {
        let rooms = &Rooms::default();
        let (tell, told) = channel();
        let (go, gone) = channel::<()>();
        std::thread::scope(|scope| {
            let slow = scope.spawn(move || {
                let gone = std::sync::Mutex::new(gone);
                let measure: Measure<'_> = Box::new(move || {
                    tell.send(()).unwrap();
                    gone.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
                    Ok(0)
                });
                Share::begin(rooms, (tenant(1), None), 0, &measure).map(drop)
            });
            told.recv().unwrap();
            let (tell, told) = channel();
            scope.spawn(move || {
                let quick: Measure<'_> = Box::new(|| Ok(0));
                let mut other = Share::begin(rooms, (tenant(2), Some(9)), 0, &quick).unwrap();
                tell.send(other.take(9, &quick)).unwrap();
            });
            let taken = told.recv_timeout(Duration::from_secs(30));
            go.send(()).unwrap();
            assert!(taken.expect("it waits for the other tenant's").is_ok());
            slow.join().unwrap().unwrap();
        });
    }
}
