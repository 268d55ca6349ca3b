//! What passes leave in the device's memory, and whose it is.
//!
//! Never lets what is in a pass's buffers lie there when one begins whose owners are not the very same. (What operations need on their way is the device's,
//! and overwritten.)

use std::collections::BTreeSet;

use nodus_kernels::DeviceError;
use nodus_protocol::JobSlot;

/// Whose rows are in a pass: a job's, or those of a cohort's jobs, which are of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    Cohort(u64),
    Job(JobSlot),
}

impl Owner {
    /// The owners of a pass with these jobs, each with its cohort.
    pub(crate) fn all(jobs: impl IntoIterator<Item = (JobSlot, Option<u64>)>) -> BTreeSet<Self> {
        jobs.into_iter().map(|(job, cohort)| cohort.map_or(Self::Job(job), Self::Cohort)).collect()
    }
}

/// What passes left: the rows of these owners, or nothing. Where the next pass has the same owners, their rows stand in that memory side by side
/// anyway, and nothing is zeroed.
#[derive(Debug, Default)]
pub(crate) struct Residue(BTreeSet<Owner>);

impl Residue {
    /// Before a pass, however that will end: what others left is zeroed by `forget`, and from here on what lies there is these owners'.
    ///
    /// # Errors
    /// Those of `forget`; what was left counts as being there still.
    pub(crate) fn before(&mut self, owners: BTreeSet<Owner>, forget: impl FnOnce() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        if self.0 != owners {
            self.clear(forget)?;
        }
        self.0 = owners;
        Ok(())
    }

    /// Zeroes whatever passes left.
    ///
    /// # Errors
    /// Those of `forget`; what was left counts as being there still.
    pub(crate) fn clear(&mut self, forget: impl FnOnce() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        if !self.0.is_empty() {
            forget()?;
        }
        self.0.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{DeviceError, JobSlot, Owner, Residue};

    const A: (JobSlot, Option<u64>) = (JobSlot(1), None);
    const B: (JobSlot, Option<u64>) = (JobSlot(2), None);
    const SWEEP: [(JobSlot, Option<u64>); 2] = [(JobSlot(3), Some(7)), (JobSlot(4), Some(7))];

    /// How often memory is zeroed before each of these passes.
    fn zeroed(passes: &[&[(JobSlot, Option<u64>)]]) -> Vec<u32> {
        let mut residue = Residue::default();
        let count = |jobs: &&[(JobSlot, Option<u64>)]| {
            let mut count = 0;
            residue.before(Owner::all(jobs.iter().copied()), || {
                count += 1;
                Ok(())
            })?;
            Ok::<u32, DeviceError>(count)
        };
        passes.iter().map(count).collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn only_the_same_owners_find_what_was_left() {
        assert_eq!(zeroed(&[&[A], &[A], &[B], &[A]]), [0, 0, 1, 1]);
        assert_eq!(zeroed(&[&[A, B], &[B, A], &[A], &[A, B]]), [0, 0, 1, 1], "a part of them is not the same, nor is more");
        assert_eq!(zeroed(&[&SWEEP, &SWEEP[1..], &[A, SWEEP[0]], &[SWEEP[1], A]]), [0, 0, 1, 0], "members of a sweep are one");
        let other = (JobSlot(3), Some(8));
        assert_eq!(zeroed(&[&SWEEP, &[other]]), [0, 1], "another sweep");
    }

    #[test]
    fn what_could_not_be_zeroed_is_still_there() {
        let mut residue = Residue::default();
        residue.before(Owner::all([A]), || unreachable!("nothing was left")).unwrap();
        let failing = || Err(DeviceError::Failed("on purpose".to_owned()));
        assert!(residue.before(Owner::all([B]), failing).is_err() && residue.clear(failing).is_err());
        let mut is_zeroed = false;
        residue
            .before(Owner::all([B]), || {
                is_zeroed = true;
                Ok(())
            })
            .unwrap();
        assert!(is_zeroed);
        residue.clear(|| Ok(())).unwrap();
        residue.clear(|| unreachable!("nothing is left")).unwrap();
    }
}
