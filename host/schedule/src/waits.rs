//! For how long tenants have waited for their turns.
//!
//! A wait runs while its tenant has fewer seats than its share though it wants one, and ends with its turn. Otherwise it stands, and is forgotten once
//! that was so for a patience, be it in pieces between which it did not run: what it takes a job to begin is not counted. So a moment in a seat, or
//! without a job that could have one, ends no wait; and who had its share, or was away, saves nothing up.

use std::collections::BTreeMap;

use crate::scene::TenantId;

/// How a wait goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Its tenant waits.
    Runs,
    /// A job of its tenant is placed and not at work yet: should that come to nothing, its tenant has waited all the same.
    Stands,
}

/// What was waited by whom.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    of: BTreeMap<TenantId, Waited>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Waited {
    ms: u64,
    /// None while its tenant has its share, or wants nothing.
    clock: Option<Clock>,
    /// For how long that has been so since the wait ran.
    content_ms: u64,
}

impl Waits {
    /// Time has passed since the last plan.
    pub fn pass(&mut self, ms: u64, patience_ms: u64) {
        self.of.retain(|_, waited| {
            match waited.clock {
                Some(Clock::Runs) => waited.ms = waited.ms.saturating_add(ms),
                Some(Clock::Stands) => {}
                None => waited.content_ms = waited.content_ms.saturating_add(ms),
            }
            waited.content_ms < patience_ms.max(1)
        });
    }

    /// What a plan says of it, after its turns have ended the waits of their tenants.
    pub fn heed(&mut self, clocks: &[(TenantId, Clock)]) {
        self.of.values_mut().for_each(|waited| waited.clock = None);
        for (tenant, clock) in clocks {
            match clock {
                Clock::Runs => {
                    let ms = self.of(*tenant);
                    self.of.insert(*tenant, Waited { ms, clock: Some(Clock::Runs), content_ms: 0 });
                }
                Clock::Stands => self.of.get_mut(tenant).into_iter().for_each(|waited| waited.clock = Some(Clock::Stands)),
            }
        }
    }

    /// A tenant's wait, in milliseconds.
    #[must_use]
    pub fn of(&self, tenant: TenantId) -> u64 {
        self.of.get(&tenant).map_or(0, |waited| waited.ms)
    }

    /// A tenant has its turn: what it waited for that.
    pub fn end(&mut self, tenant: TenantId) -> u64 {
        self.of.remove(&tenant).map_or(0, |waited| waited.ms)
    }

    /// A turn came to nothing: its tenant has waited all the same.
    pub fn give_back(&mut self, tenant: TenantId, ms: u64) {
        let waited = self.of.entry(tenant).or_default();
        waited.ms = waited.ms.saturating_add(ms);
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, TenantId, Waits};

    const PATIENCE_MS: u64 = 10;

    #[test]
    fn a_moment_in_a_seat_or_away_ends_no_wait_and_a_patience_of_it_does() {
        let (tenant, mut waits) = (TenantId(1), Waits::default());
        let mut pass = |clock: Option<Clock>, ms| {
            waits.heed(clock.map(|clock| (tenant, clock)).as_slice());
            waits.pass(ms, PATIENCE_MS);
            waits.of(tenant)
        };
        assert_eq!(pass(Some(Clock::Runs), 7), 7);
        assert_eq!(pass(None, PATIENCE_MS - 1), 7);
        assert_eq!(pass(Some(Clock::Runs), 2), 9);
        // It takes long to begin, and fails.
        assert_eq!(pass(None, PATIENCE_MS - 1), 9);
        assert_eq!(pass(Some(Clock::Stands), 20 * PATIENCE_MS), 9);
        assert_eq!(pass(Some(Clock::Runs), 2), 11);
        // Pieces in which it had its share count together.
        assert_eq!(pass(None, PATIENCE_MS - 1), 11);
        assert_eq!(pass(Some(Clock::Stands), 1), 11);
        assert_eq!(pass(None, 1), 0);
        assert_eq!(pass(Some(Clock::Stands), 5), 0, "what is not there does not stand");
    }

    #[test]
    fn a_turn_ends_a_wait_and_one_that_comes_to_nothing_gives_it_back() {
        let (tenant, mut waits) = (TenantId(1), Waits::default());
        waits.heed(&[(tenant, Clock::Runs)]);
        waits.pass(12, PATIENCE_MS);
        assert_eq!((waits.end(tenant), waits.of(tenant)), (12, 0));
        waits.heed(&[(tenant, Clock::Runs)]);
        waits.pass(3, PATIENCE_MS);
        waits.give_back(tenant, 12);
        assert_eq!(waits.of(tenant), 15);
    }
}
