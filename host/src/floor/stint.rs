//! How long a job has had its seat: what it takes to begin, or to be where it was before, is not counted.
//!
//! Knows no job: what is told of one is told here.

use std::time::{Duration, Instant};

/// A job that is not where it was before after so many patiences counts as one that is at work: it may be waiting for nothing.
const STARTING_PATIENCES: u32 = 10;
/// One that is, and asks nothing new, counts so after as many as these: it cannot be kept in between, so that one which prepares for longer than a
/// patience would begin that anew for ever; and one that is silent on purpose has no more than this of it.
const SILENT_PATIENCES: u32 = 2;

/// The time of one job in one seat.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stint {
    placed: Instant,
    /// When it was where it was before.
    arrived: Option<Instant>,
    at_work: Option<Instant>,
    /// What its tenant had waited for the seat, in milliseconds, where it was its turn.
    pub(super) turn_ms: Option<u64>,
    /// When the job gave up a seat before, where it did and was not at work since.
    pub(super) gave_way: Option<Instant>,
}

impl Stint {
    /// Of a job that is placed now.
    pub(super) fn new(turn_ms: Option<u64>, gave_way: Option<Instant>) -> Self {
        Self { placed: Instant::now(), arrived: None, at_work: None, turn_ms, gave_way }
    }

    /// Whether the seat was its tenant's turn, or the job gave one up before: it keeps this one for a while.
    pub(super) fn is_turn(&self) -> bool {
        self.turn_ms.is_some() || self.gave_way.is_some()
    }

    /// The job is where it was before.
    pub(super) fn arrive(&mut self) {
        self.arrived.get_or_insert_with(Instant::now);
    }

    /// It has asked something that it had not asked before, and works from now on.
    pub(super) fn begin(&mut self) {
        self.at_work.get_or_insert_with(Instant::now);
    }

    /// Whether it was where it was before.
    pub(super) fn has_arrived(&self) -> bool {
        self.arrived.is_some()
    }

    /// How long it has worked at a moment.
    pub(super) fn worked(&self, patience: Duration, now: Instant) -> Duration {
        let had = now.saturating_duration_since(self.placed);
        match self.at_work.or_else(|| self.arrived?.checked_add(patience.saturating_mul(SILENT_PATIENCES))) {
            Some(began) => now.saturating_duration_since(began),
            None if had >= patience.saturating_mul(STARTING_PATIENCES) => had,
            None => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::Stint;

    #[test]
    fn beginning_is_no_work_but_for_one_that_never_begins() {
        let patience = Duration::from_secs(60);
        let mut stint = Stint::new(None, None);
        let after = |stint: &Stint, seconds| stint.worked(patience, stint.placed + Duration::from_secs(seconds));
        assert_eq!([0, 59, 599].map(|seconds| after(&stint, seconds)), [Duration::ZERO; 3]);
        assert_eq!(after(&stint, 600), Duration::from_secs(600));
        // Silent, it has two patiences more.
        stint.arrived = Some(stint.placed + Duration::from_secs(400));
        assert_eq!([500, 520, 600].map(|seconds| after(&stint, seconds).as_secs()), [0, 0, 80]);
        stint.at_work = Some(stint.placed + Duration::from_secs(500));
        stint.begin();
        assert_eq!(after(&stint, 600), Duration::from_secs(100), "it began once");
    }
}
