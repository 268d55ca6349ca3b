//! The trunk cache: rows at a cohort's cuts, kept from pass to pass, on the device and then on the host.
//!
//! Never changes a result, since a row below the cut is a function of trunk and tokens; and never serves one cohort with another's rows.

mod lru;

use std::collections::BTreeSet;
use std::sync::Arc;

use nodus_kernels::{Device, DeviceError, Use};
use nodus_protocol::TrunkSlot;
use serde::{Deserialize, Serialize};

use lru::Lru;

/// What the rows of one sequence at one cut are a function of, and whose they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) cohort: u64,
    pub(crate) trunk: TrunkSlot,
    /// The half layer that reads them.
    pub(crate) half: usize,
    /// Up to the last labelled row: what follows is not computed.
    pub(crate) tokens: Vec<u32>,
    /// The rows that are left above the last keys and values; none below.
    pub(crate) labelled: Option<Vec<u32>>,
}

impl Key {
    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.labelled.as_ref().map_or(self.tokens.len(), Vec::len)
    }
}

/// Rows on the host, zeroed when dropped.
#[derive(Debug)]
pub(crate) struct HostRows(Vec<f32>);

impl std::ops::Deref for HostRows {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.0
    }
}

impl Drop for HostRows {
    fn drop(&mut self) {
        self.0.fill(0.0);
        // Without a reader the compiler may leave out stores to memory that is about to be freed.
        std::hint::black_box(&mut self.0);
    }
}

/// Kept rows, one after the other, without padding.
pub(crate) enum Rows<'a, D: Device> {
    Device(&'a D::Buffer),
    Host(&'a [f32]),
}

/// Room for rows that a pass is going to compute.
pub(crate) struct Slot<D: Device> {
    pub(crate) key: Arc<Key>,
    pub(crate) buffer: D::Buffer,
    bytes: u64,
}

/// What a cache did. Hits and misses count sequences at cuts, each once a pass however many members share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheCounts {
    /// Sequences that were at hand.
    pub hits: u64,
    /// Sequences that were computed.
    pub misses: u64,
    /// Entries dropped to make room for others.
    pub evicted: u64,
    /// Bytes kept on the device now.
    pub device_bytes: u64,
    /// Bytes kept on the host now.
    pub host_bytes: u64,
}

/// Rows at cuts, the most recently used ones.
pub(crate) struct TrunkCache<D: Device> {
    device: Lru<Key, D::Buffer>,
    host: Lru<Key, HostRows>,
    /// Uses of the device's and of the host's entries before the pass that is being prepared.
    before: (u64, u64),
    counts: CacheCounts,
}

impl<D: Device> TrunkCache<D> {
    /// A cache of so many bytes on the device, and on the host for what has no room there.
    pub(crate) fn new(device_bytes_max: u64, host_bytes_max: u64) -> Self {
        Self { device: Lru::new(device_bytes_max), host: Lru::new(host_bytes_max), before: (0, 0), counts: CacheCounts::default() }
    }

    /// Whether it can hold anything.
    pub(crate) fn is_on(&self) -> bool {
        self.device.bytes_max() > 0
    }

    pub(crate) fn counts(&self) -> CacheCounts {
        CacheCounts { device_bytes: self.device.bytes(), host_bytes: self.host.bytes(), ..self.counts }
    }

    pub(crate) fn count(&mut self, hits: usize, misses: usize) {
        self.counts.hits += hits as u64;
        self.counts.misses += misses as u64;
    }

    /// A pass begins: what it looks up stays until it ends.
    pub(crate) fn begin_pass(&mut self) {
        self.before = (self.device.now(), self.host.now());
    }

    /// Whether the rows are at hand.
    pub(crate) fn look_up(&mut self, key: &Key) -> bool {
        self.device.touch(key) || self.host.touch(key)
    }

    /// The rows.
    pub(crate) fn rows(&self, key: &Key) -> Option<Rows<'_, D>> {
        self.device.peek(key).map(Rows::Device).or_else(|| self.host.peek(key).map(|rows| Rows::Host(rows)))
    }

    /// Room for the rows of as many of these keys as possible, of this width.
    pub(crate) fn make_room(&mut self, device: &mut D, wanted: Vec<Arc<Key>>, width: usize) -> Result<Vec<Slot<D>>, DeviceError> {
        let (mut slots, mut seen, mut taken) = (Vec::new(), BTreeSet::new(), 0);
        for key in wanted {
            if self.rows(&key).is_some() || !seen.insert(key.clone()) {
                continue;
            }
            // In the widest type: where activations are narrower, this is more than is needed.
            let most = (key.rows() * width * size_of::<f32>()) as u64;
            if !self.evict(device, taken + most)? {
                break;
            }
            let before = device.allocated_bytes();
            let buffer = match device.alloc(Use::Activation, key.rows() * width) {
                Err(DeviceError::OutOfMemory { .. }) => break,
                other => other?,
            };
            let bytes = device.allocated_bytes().saturating_sub(before);
            taken += bytes;
            slots.push(Slot { key, buffer, bytes });
        }
        Ok(slots)
    }

    /// Keeps what a pass has computed.
    pub(crate) fn keep(&mut self, slots: Vec<Slot<D>>) {
        for Slot { key, buffer, bytes } in slots {
            // Without room for it, it is dropped.
            self.counts.evicted += u64::from(self.device.insert(key, buffer, bytes).is_err());
        }
    }

    /// Gives the device's memory back: jobs come before the cache.
    pub(crate) fn release(&mut self, device: &mut D) -> Result<(), DeviceError> {
        self.before = (u64::MAX, u64::MAX);
        while let Some((key, buffer)) = self.device.pop(u64::MAX) {
            self.demote(device, key, buffer)?;
        }
        Ok(())
    }

    /// Drops everything of the cohorts that are no longer there.
    pub(crate) fn retain_cohorts(&mut self, live: &BTreeSet<u64>) {
        self.device.retain(|key| live.contains(&key.cohort));
        self.host.retain(|key| live.contains(&key.cohort));
    }

    /// Makes room for so many bytes, if that can be done without what the pass that is being prepared has looked up.
    fn evict(&mut self, device: &mut D, bytes: u64) -> Result<bool, DeviceError> {
        while self.device.bytes().saturating_add(bytes) > self.device.bytes_max() {
            let Some((key, buffer)) = self.device.pop(self.before.0) else { return Ok(false) };
            self.demote(device, key, buffer)?;
        }
        Ok(true)
    }

    /// Moves an entry to the host, where there is room for it after the least recently used ones there are dropped.
    fn demote(&mut self, device: &mut D, key: Arc<Key>, buffer: D::Buffer) -> Result<(), DeviceError> {
        let bytes = (device.len(&buffer) * size_of::<f32>()) as u64;
        while self.host.bytes().saturating_add(bytes) > self.host.bytes_max() {
            self.counts.evicted += 1;
            if self.host.pop(self.before.1).is_none() {
                return Ok(());
            }
        }
        let mut rows = HostRows(vec![0.0; device.len(&buffer)]);
        device.download(&buffer, 0, &mut rows.0)?;
        self.counts.evicted += u64::from(self.host.insert(key, rows, bytes).is_err());
        Ok(())
    }
}
