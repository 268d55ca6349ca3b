//! Room that was made for a job is the job's, whoever else comes first by the time that it is free.

use nodus_schedule::{Job, JobId, Priority};
use proptest::prelude::*;

use super::histories::{arrival, of};
use super::world::{World, job};

const ENDLESS: u64 = u64::MAX;
/// Of the world's rules.
const PATIENCE: usize = 10;

/// A world of one seat, which its first job gives up to the second now and takes its time.
fn giving_way() -> World {
    let mut world = World::new(&[50], &[10], 3);
    world.linger = 4;
    world.add(job(4, 1, 40, 0), ENDLESS);
    world.tick();
    world.add(job(2, 2, 40, 0), ENDLESS);
    let plans: Vec<_> = (0..=PATIENCE).map(|_| world.tick()).collect();
    assert_eq!(plans[PATIENCE].pause, [JobId(4)]);
    assert_eq!(plans[PATIENCE].keep.iter().map(|keep| keep.job).collect::<Vec<_>>(), [JobId(2)]);
    world
}

#[test]
fn a_seat_that_is_given_up_to_one_is_not_taken_by_another() {
    for priority in [Priority::High, Priority::Low] {
        let mut world = giving_way();
        // Its tenant was served least, and its job is urgent.
        world.add(Job { priority, ..job(9, 3, 40, 0) }, ENDLESS);
        for _ in 0..PATIENCE / 2 {
            world.tick();
            assert!(!world.is_running(JobId(9)), "{priority:?}");
        }
        assert!(world.is_running(JobId(2)));
    }
}

#[test]
fn a_seat_is_kept_for_nobody_who_does_not_want_it_any_more() {
    let mut world = giving_way();
    world.cancel(JobId(2));
    world.add(job(9, 3, 40, 0), ENDLESS);
    let plans: Vec<_> = (0..PATIENCE / 2).map(|_| world.tick()).collect();
    assert!(plans.iter().all(|plan| plan.keep.is_empty()));
    assert_eq!(plans[PATIENCE / 2 - 1].place.len(), 1, "as soon as it is free");
}

#[test]
fn a_seat_is_not_kept_for_ever_where_nobody_leaves() {
    let mut world = World::new(&[50], &[10], 2);
    world.linger = 1000;
    // It takes as many ticks as its number to leave.
    world.add(job(150, 1, 40, 0), ENDLESS);
    world.tick();
    world.add(job(151, 2, 40, 0), ENDLESS);
    let kept = (0..15 * PATIENCE).filter(|_| !world.tick().keep.is_empty()).count();
    assert_eq!(kept, 10 * PATIENCE);
    // It is let in all the same.
    (0..2 * PATIENCE).for_each(|_| drop(world.tick()));
    assert!(world.is_running(JobId(151)));
}

#[test]
fn others_take_what_leaves_it_its_place() {
    let mut world = World::new(&[100], &[10], 3);
    world.linger = 4;
    world.add(job(4, 1, 60, 0), ENDLESS);
    world.tick();
    world.add(job(2, 2, 40, 0), ENDLESS);
    (0..=PATIENCE).for_each(|_| drop(world.tick()));
    // 30 are free at once, 90 later, 40 of them promised.
    world.add(job(9, 3, 25, 0), ENDLESS);
    world.add(job(10, 3, 30, 0), ENDLESS);
    world.tick();
    assert!(world.is_running(JobId(9)) && !world.is_running(JobId(2)), "it need not wait");
    (0..PATIENCE / 2).for_each(|_| drop(world.tick()));
    assert!(world.is_running(JobId(2)) && !world.is_running(JobId(10)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The world looks at each plan: whom room was made for gets in as soon as those have left that leave, and nobody leaves twice for one.
    #[test]
    fn whom_room_was_made_for_gets_it(
        devices in prop::collection::vec(120_u64..220, 1..3),
        trunks in prop::collection::vec(0_u64..30, 3),
        arrivals in prop::collection::vec((arrival(), any::<bool>()), 4..40),
        linger in 0_u64..6,
    ) {
        let mut world = World::new(&devices, &trunks, 4);
        world.linger = linger;
        let mut kept = 0;
        for (number, (arrival, is_endless)) in arrivals.iter().enumerate() {
            (0..arrival.0).for_each(|_| kept += world.tick().keep.len());
            world.add(of(number, arrival), if *is_endless { ENDLESS } else { arrival.3 });
        }
        (0..20 * PATIENCE).for_each(|_| kept += world.tick().keep.len());
        // Else nothing was looked at.
        prop_assume!(kept > 0);
    }
}
