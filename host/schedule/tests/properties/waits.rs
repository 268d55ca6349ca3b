//! A tenant that waits for its turn loses nothing of its wait by a moment in which it does not.

use nodus_schedule::{JobId, Reason, TenantId};
use proptest::prelude::*;

use super::world::{TICK_MS, World, job};

const ENDLESS: u64 = u64::MAX;
/// Of the world's rules.
const PATIENCE: usize = 10;

/// One seat that a job has for ever, and a tenant that waits for it.
fn waiting() -> World {
    let mut world = World::new(&[50], &[10], 2);
    world.add(job(1, 1, 40, 0), ENDLESS);
    world.tick();
    world.add(job(2, 2, 40, 0), ENDLESS);
    world
}

#[test]
fn a_moment_in_which_its_quota_lets_no_job_of_its_run_ends_no_wait() {
    let mut world = waiting();
    (0..PATIENCE - 1).for_each(|_| assert!(world.tick().pause.is_empty()));
    world.quota(TenantId(2), 0, u64::MAX, u64::MAX);
    let plan = world.tick();
    assert!(plan.wait.iter().any(|wait| wait.job == JobId(2) && matches!(wait.reason, Reason::RunningJobs { .. })));
    world.quota(TenantId(2), 1, u64::MAX, u64::MAX);
    assert_eq!([(); 3].map(|()| world.tick().pause.len()), [0, 1, 0]);
}

#[test]
fn whoever_has_its_share_saves_nothing_up_for_when_it_has_less() {
    let mut world = World::new(&[90], &[10], 3);
    (1..=4).for_each(|id| world.add(job(id, 1 + id % 2, 40, 0), ENDLESS));
    // Two seats, and two tenants that want two each.
    (0..20 * PATIENCE).for_each(|_| assert!(world.tick().pause.is_empty()));
    world.add(job(5, 3, 40, 0), ENDLESS);
    let paused: Vec<usize> = (0..10 * PATIENCE).filter(|_| !world.tick().pause.is_empty()).collect();
    assert!(paused.windows(2).all(|pair| pair[1] - pair[0] >= PATIENCE), "a seat changes hands once a patience at most: {paused:?}");
    assert!(paused.len() >= 5, "{paused:?}");
}

proptest! {
    /// What a tenant waits is what it had of less than its share while it wanted a seat, whatever came between for less than a patience.
    #[test]
    fn a_wait_is_the_sum_of_its_pieces(pieces in prop::collection::vec((1_usize..PATIENCE, 1_usize..PATIENCE), 1..20)) {
        let mut world = waiting();
        let mut waited = 0;
        for (ticks, between) in pieces {
            for _ in 0..ticks {
                let is_due = !world.tick().pause.is_empty();
                prop_assert_eq!(is_due, waited == PATIENCE, "after {} ticks", waited);
                if is_due {
                    return Ok(());
                }
                waited += 1;
            }
            world.quota(TenantId(2), 0, u64::MAX, u64::MAX);
            (0..between).for_each(|_| drop(world.tick()));
            world.quota(TenantId(2), 1, u64::MAX, u64::MAX);
        }
        prop_assert_eq!(world.waited_ms(TenantId(2)), waited as u64 * TICK_MS);
    }
}
