//! What passes leave in the device's memory, and whose it is.
//!
//! Never lets what one tenant's pass left lie there when another's begins.

use nodus_kernels::{Device, DeviceError};
use nodus_protocol::JobSlot;

/// Those whose passes may follow one another in memory that still holds what the one before left: a job, or the jobs of a cohort, which are of
/// one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Cohort(u64),
    Job(JobSlot),
}

impl Owner {
    /// Whose a pass with these jobs is, each with its cohort; none where it is several's.
    pub(crate) fn of(jobs: impl IntoIterator<Item = (JobSlot, Option<u64>)>) -> Option<Self> {
        let mut owners = jobs.into_iter().map(|(job, cohort)| cohort.map_or(Self::Job(job), Self::Cohort));
        let first = owners.next()?;
        owners.all(|owner| owner == first).then_some(first)
    }
}

/// What passes left: one owner's rows, or nothing.
#[derive(Debug, Default)]
pub(crate) struct Residue(Option<Owner>);

impl Residue {
    /// Before a pass: what somebody else's left is zeroed.
    pub(crate) fn before<D: Device>(&mut self, device: &mut D, owner: Option<Owner>) -> Result<(), DeviceError> {
        if self.0 != owner {
            self.clear(device)?;
        }
        self.0 = owner;
        Ok(())
    }

    /// After a pass: what one of several owners left is zeroed at once.
    pub(crate) fn after<D: Device>(&self, device: &mut D) -> Result<(), DeviceError> {
        if self.0.is_some() { Ok(()) } else { device.forget_passes() }
    }

    /// Zeroes whatever passes left.
    pub(crate) fn clear<D: Device>(&mut self, device: &mut D) -> Result<(), DeviceError> {
        self.0.take().map_or(Ok(()), |_| device.forget_passes())
    }
}

#[cfg(test)]
mod tests {
    use super::{JobSlot, Owner};

    #[test]
    fn a_pass_is_one_jobs_or_one_cohorts_or_nobodys() {
        let [a, b] = [JobSlot(1), JobSlot(2)];
        assert_eq!(Owner::of([(a, None), (a, None)]), Some(Owner::Job(a)));
        assert_eq!(Owner::of([(a, Some(7)), (b, Some(7))]), Some(Owner::Cohort(7)));
        for several in [[(a, None), (b, None)], [(a, Some(7)), (b, Some(8))], [(a, Some(7)), (b, None)]] {
            assert_eq!(Owner::of(several), None, "{several:?}");
        }
        assert_eq!(Owner::of([]), None);
    }
}
