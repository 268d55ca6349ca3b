//! Counts, for each job, the others that were there at some time while it ran.
//!
//! Knows numbers only; who they are is nobody's business.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use nodus_protocol::JobSlot;

/// Who is there, and whom each has met.
#[derive(Debug, Default)]
pub(crate) struct Neighbours(Mutex<BTreeMap<JobSlot, BTreeSet<JobSlot>>>);

impl Neighbours {
    /// A job begins.
    pub(crate) fn enter(&self, job: JobSlot) {
        let mut there = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let met = there.keys().copied().collect();
        for others in there.values_mut() {
            others.insert(job);
        }
        there.insert(job, met);
    }

    /// A job ends; how many others it has met.
    pub(crate) fn leave(&self, job: JobSlot) -> u64 {
        let mut there = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        there.remove(&job).map_or(0, |met| met.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use nodus_protocol::JobSlot;

    use super::Neighbours;

    #[test]
    fn each_that_was_there_meanwhile_counts_once() {
        let neighbours = Neighbours::default();
        let [a, b, c] = [JobSlot(0), JobSlot(1), JobSlot(2)];
        neighbours.enter(a);
        neighbours.enter(b);
        assert_eq!(neighbours.leave(b), 1);
        neighbours.enter(c);
        assert_eq!(neighbours.leave(c), 1);
        assert_eq!(neighbours.leave(a), 2);
    }
}
