//! The way between the host and the card: pinned memory, through which data and tables go without the host waiting for each.
//!
//! Never overwrites what a pending copy still reads.
#![expect(unsafe_code, reason = "copies to and from the card")]

use std::sync::Arc;

use super::ROW_ALIGN;
use super::driver::{Address, Gpu};
use super::host_side::{Event, Pinned};
use super::memory::{Block, Owner, Pool};
use crate::DeviceError;

/// Bytes of pinned memory; the ring's two halves are used in turn, each again only after the stream has passed its copies.
const STAGING_BYTES: usize = 32 << 20;
const HALF: usize = STAGING_BYTES / 2;

/// Bytes of the tables of one pass at most.
const TABLE_BYTES: usize = 64 << 20;

/// Tables of a word a row that a pass may have: positions of its layouts, and places that rows are copied from.
const ROW_TABLES: usize = 256;

/// Elements of an array that products are checked with.
const ELEMENTS_MAX: usize = 1 << 31;

/// Bytes of the gradients of keys and values by query head, which attention's backward pass adds up: no plan of a pass has them.
pub(super) const ATTENTION_BYTES: usize = 1 << 30;

/// Rows that a pass on a card can have, padding included, where its widest activation and its queries have so many columns: what its tables, its
/// products and attention's own memory can hold. How many fit into memory is the pass's plan to say.
#[must_use]
pub fn rows_max(widest: usize, queries: usize) -> usize {
    let attention = ATTENTION_BYTES / (2 * size_of::<f32>() * queries.max(1));
    (ELEMENTS_MAX / widest.max(1)).min(TABLE_BYTES / ROW_TABLES / size_of::<u32>()).min(attention) / ROW_ALIGN * ROW_ALIGN
}

/// Tables for operations, at the same places in every pass: a pinned copy and one on the card, in step.
#[derive(Debug)]
struct Tables {
    pinned: Pinned,
    block: Block,
    /// Bytes filled, and bytes sent.
    at: usize,
    sent: usize,
}

/// The way between the host and the card.
#[derive(Debug)]
pub(crate) struct Staging {
    gpu: Arc<Gpu>,
    pinned: Pinned,
    tables: Tables,
    /// The half in use, and how much of it is taken.
    half: usize,
    at: usize,
    /// The stream's end when a half was last left.
    passed: [Event; 2],
}

impl Staging {
    pub(crate) fn new(gpu: &Arc<Gpu>, pool: &Arc<Pool>) -> Result<Self, DeviceError> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            pinned: Pinned::new(gpu, STAGING_BYTES)?,
            tables: Tables { pinned: Pinned::new(gpu, TABLE_BYTES)?, block: pool.alloc(TABLE_BYTES, Owner::Device)?, at: 0, sent: 0 },
            half: 0,
            at: 0,
            passed: [Event::new(gpu)?, Event::new(gpu)?],
        })
    }

    /// A place in the ring for `bytes` (at most half of it) that no pending copy uses.
    fn reserve(&mut self, bytes: usize) -> Result<usize, DeviceError> {
        if bytes > HALF {
            return Err(DeviceError::Unsupported(format!("a table of {bytes} bytes for one operation; at most {HALF}")));
        }
        if self.at + bytes > HALF {
            self.passed[self.half].record()?;
            self.half = 1 - self.half;
            self.passed[self.half].wait()?;
            self.at = 0;
        }
        let place = self.half * HALF + self.at;
        self.at += bytes.next_multiple_of(256);
        Ok(place)
    }

    /// Places tables from the start again. Waits for all work before.
    pub(crate) fn restart_tables(&mut self) -> Result<(), DeviceError> {
        if self.tables.at > 0 {
            self.gpu.synchronize()?;
        }
        (self.tables.at, self.tables.sent) = (0, 0);
        Ok(())
    }

    /// Whether a table of so many bytes has room before the next restart.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        bytes <= TABLE_BYTES - self.tables.at
    }

    /// A table for operations that are launched after the next [`Staging::send_tables`] and before the next restart.
    pub(crate) fn table(&mut self, data: &[u8]) -> Result<Address, DeviceError> {
        if !self.has_room(data.len()) {
            return Err(DeviceError::Unsupported(format!("the tables of one pass take more than {TABLE_BYTES} bytes")));
        }
        let Tables { pinned, block, at, .. } = &mut self.tables;
        pinned.bytes()[*at..*at + data.len()].copy_from_slice(data);
        let address = block.address() + *at as u64;
        *at += data.len().next_multiple_of(256);
        *at = (*at).min(TABLE_BYTES);
        Ok(address)
    }

    /// Copies the tables that were filled since the last time to the card.
    pub(crate) fn send_tables(&mut self) -> Result<(), DeviceError> {
        let Tables { pinned, block, at, sent } = &mut self.tables;
        if *sent < *at {
            self.gpu.bind()?;
            // SAFETY: pinned memory that is filled again only after a restart, which waits for this copy; the block is as large.
            unsafe { self.gpu.copy_in(&pinned.bytes()[*sent..*at], block.address() + *sent as u64) }?;
            *sent = *at;
        }
        Ok(())
    }

    /// Fills `bytes` from `offset` of `block` on by chunks that `write` produces: it is given the chunk's place in the whole and its memory.
    pub(crate) fn upload(
        &mut self,
        block: &Block,
        offset: usize,
        bytes: usize,
        mut write: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), DeviceError> {
        self.each_chunk(block, offset, bytes, |gpu, address, done, pinned| {
            write(done, pinned);
            // SAFETY: pinned memory that `reserve` gives again only after the stream has passed this copy; `each_chunk` checked the range.
            unsafe { gpu.copy_in(pinned, address) }
        })
    }

    /// Reads `bytes` from `offset` of `block` on, by chunks that `read` is given; waits for all work before.
    pub(crate) fn download(
        &mut self,
        block: &Block,
        offset: usize,
        bytes: usize,
        mut read: impl FnMut(usize, &[u8]),
    ) -> Result<(), DeviceError> {
        self.each_chunk(block, offset, bytes, |gpu, address, done, pinned| {
            // SAFETY: as in `upload`; the stream is synchronised before the bytes are read.
            unsafe { gpu.copy_out(address, pinned) }?;
            gpu.synchronize()?;
            read(done, pinned);
            Ok(())
        })
    }

    /// Goes through `bytes` from `offset` of `block` on: for each chunk its address, its place in the whole, and pinned memory as large.
    fn each_chunk(
        &mut self,
        block: &Block,
        offset: usize,
        bytes: usize,
        mut chunk: impl FnMut(&Gpu, Address, usize, &mut [u8]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        assert!(offset + bytes <= block.bytes(), "a copy past the end of its buffer");
        self.gpu.bind()?;
        for done in (0..bytes).step_by(HALF / 2) {
            let len = (bytes - done).min(HALF / 2);
            let place = self.reserve(len)?;
            chunk(&self.gpu, block.address() + (offset + done) as u64, done, &mut self.pinned.bytes()[place..place + len])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{ELEMENTS_MAX, ROW_ALIGN, TABLE_BYTES, rows_max};

    #[test]
    fn a_pass_fits_its_tables_and_its_products() {
        assert_eq!(rows_max(2 * 5632, 2048), 65_536, "its tables are what bounds it");
        assert_eq!(rows_max(2 * 28_672, 2048), 37_376, "its products are");
        assert_eq!(rows_max(2 * 14_336, 4096), 32_768, "its attention is");
        for widest in [0, 1, 7, 4096, 1 << 24] {
            let rows = rows_max(widest, 64);
            assert!(rows.is_multiple_of(ROW_ALIGN) && rows * widest <= ELEMENTS_MAX && 1024 * rows <= TABLE_BYTES, "{widest}: {rows}");
        }
    }
}
