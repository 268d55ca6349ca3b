//! What keeps a job's work through the death of its guest, its engine or the whole service: a journal of what it was answered, and now and
//! then a snapshot of what its engine holds of it.
//!
//! Never lets a repeated run go another way: a call, or a reply computed again, that is not the recorded one ends the job.
//!
//! A job's folder holds `replies` (frames; see [`record`]) and up to [`SNAPSHOTS_KEPT`] snapshots, each named by how many calls are in it.
//! Frames are written as replies are given, and synced when a snapshot is made, before it takes its name: what a machine's sudden end may
//! tear off is what no snapshot needs. The job is run again from its start; calls before the snapshot are answered from the journal, then the
//! engine gets the snapshot, and replies that the journal has beyond it are computed again and compared, bit for bit.

mod book;
mod call;
mod carrier;
mod keeper;
mod past;
mod record;
mod scribe;
mod shelf;
mod snapshot;
mod space;
#[cfg(test)]
mod tests;

pub(crate) use book::{BegunElsewhere, VERSION, identity};
pub(crate) use scribe::{Fault, Scribe, Tally, Terms};
pub(crate) use shelf::Shelf;
pub(crate) use space::{DISK_BYTES_MAX, Space};

/// Bytes of a job's replies on the disk at most. A job beyond it is no longer kept: where it is interrupted, it is run again from its start.
const REPLIES_BYTES_MAX: u64 = 2 << 30;
/// Replies of a job at most: each is read when the job is run again.
const REPLIES_MAX: u64 = 4 << 20;
/// Bytes of replies of a job that wait in memory for a disk that is full.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Snapshots of a job on the disk: the last, and one before it in case it cannot be read.
const SNAPSHOTS_KEPT: usize = 2;
