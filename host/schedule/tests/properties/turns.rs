//! Who has more gives way to whoever waits, after a while, whatever its priority.

use nodus_schedule::{Job, JobId, Lane, Priority, Reason, State, TenantId};

use super::world::{TICK_MS, World, job};

const ENDLESS: u64 = u64::MAX;
/// Of the world's rules.
const PATIENCE: usize = 10;

fn high(id: u128, tenant: u128) -> Job {
    Job { priority: Priority::High, ..job(id, tenant, 30, 0) }
}

#[test]
fn endless_high_jobs_of_one_tenant_let_a_low_one_of_another_in_within_a_patience_or_two() {
    let mut world = World::new(&[100], &[10], 2);
    (1..=9).for_each(|id| world.add(high(id, 1), ENDLESS));
    world.tick();
    assert_eq!(world.running(), 3);
    world.add(job(10, 2, 30, 0), ENDLESS);
    let plans: Vec<_> = (0..=PATIENCE).map(|_| world.tick()).collect();
    assert!(plans[..PATIENCE].iter().all(|plan| plan.pause.is_empty()), "not before");
    // The latest begun of those that began together is the last in line.
    assert_eq!(plans[PATIENCE].pause, [JobId(3)]);
    assert_eq!(plans[PATIENCE].wait.iter().find(|wait| wait.job == JobId(10)).unwrap().reason, Reason::MakingRoom);
    (0..3).for_each(|_| drop(world.tick()));
    assert!(world.is_running(JobId(10)) && world.running() == 3);
    // One of three seats is less than a half, and two are not fewer than one more: nobody gives way any more.
    (0..20 * PATIENCE).for_each(|_| assert!(world.tick().pause.is_empty()));
    assert!(world.is_running(JobId(10)));
}

#[test]
fn low_jobs_give_way_first_and_within_a_tenant_nothing_changes() {
    let mut world = World::new(&[100], &[10], 2);
    world.add(job(1, 1, 30, 0), ENDLESS);
    (2..=3).for_each(|id| world.add(high(id, 1), ENDLESS));
    world.tick();
    // Of the same tenant: high jobs stay, however long a low one waits.
    world.add(job(4, 1, 30, 0), ENDLESS);
    (0..5 * PATIENCE).for_each(|_| assert!(world.tick().pause.is_empty()));
    world.add(high(5, 2), ENDLESS);
    assert_eq!(world.tick().pause, [JobId(1)], "a high one need not wait for a low one");
    (0..3).for_each(|_| drop(world.tick()));
    world.add(job(6, 2, 30, 0), ENDLESS);
    (0..5 * PATIENCE).for_each(|_| assert!(world.tick().pause.is_empty(), "one of two seats against another's two"));
    assert!([2, 3, 5].iter().all(|id| world.is_running(JobId(*id))));
}

#[test]
fn a_single_seat_goes_round_and_who_has_it_by_turn_has_a_patience_of_it() {
    let mut world = World::new(&[50], &[10], 3);
    let mut pauses = 0;
    for (id, priority) in [(1, Priority::High), (2, Priority::Low), (3, Priority::Low)] {
        world.add(Job { priority, ..job(id, id, 40, 0) }, ENDLESS);
    }
    let mut had = [0_usize; 3];
    for _ in 0..30 * PATIENCE {
        pauses += world.tick().pause.len();
        (1..=3).filter(|id| world.is_running(JobId(*id))).for_each(|id| had[id as usize - 1] += 1);
    }
    assert!(pauses <= 30, "{pauses}");
    // A high one need not wait for its own.
    assert!(had[0] > had[1].max(had[2]) && had[1..].iter().all(|ticks| *ticks >= 5 * PATIENCE), "{had:?}");
}

#[test]
fn who_wants_a_whole_device_waits_a_patience_for_each_that_has_to_leave() {
    let mut world = World::new(&[100], &[10], 4);
    (1..=3).for_each(|id| world.add(job(id, id, 30, 0), ENDLESS));
    world.tick();
    world.add(Job { lane: Lane::Solo, ..job(4, 4, 30, 0) }, ENDLESS);
    let first = (0..100).position(|_| !world.tick().pause.is_empty());
    assert_eq!(first, Some(3 * PATIENCE));
    (0..3).for_each(|_| drop(world.tick()));
    assert!(world.is_running(JobId(4)));
    let mut had = [0_usize; 4];
    for _ in 0..200 * PATIENCE {
        world.tick();
        (1..=4).filter(|id| world.is_running(JobId(*id))).for_each(|id| had[id as usize - 1] += 1);
    }
    assert!(had[3] > 30 * PATIENCE && had[..3].iter().all(|ticks| *ticks > 120 * PATIENCE), "{had:?}");
}

#[test]
fn a_job_that_is_not_at_work_yet_is_not_sent_away() {
    let mut world = World::new(&[50], &[10], 2);
    world.add(job(1, 1, 40, 0), ENDLESS);
    world.tick();
    world.add(job(2, 2, 40, 0), ENDLESS);
    for _ in 0..5 * PATIENCE {
        world.stalls(JobId(1));
        assert!(world.tick().pause.is_empty());
    }
    (0..PATIENCE).for_each(|_| drop(world.tick()));
    assert_eq!(world.state_of(JobId(1)).map(|state| matches!(state, State::Running { is_pausing: false, .. })), Some(false));
    assert!(world.device_ms(TenantId(1)) > 5 * PATIENCE as u64 * TICK_MS);
}

#[test]
fn who_has_a_seat_and_waits_for_ever_for_more_is_not_in_the_way_of_who_has_none() {
    let mut world = World::new(&[100], &[10], 4);
    (1..=3).for_each(|id| world.add(job(id, 3, 10, 0), ENDLESS));
    world.add(job(4, 4, 20, 0), ENDLESS);
    // Two seats fewer than the other, but the one that the other would give up is not enough.
    world.add(job(5, 4, 55, 0), ENDLESS);
    (0..5 * PATIENCE).for_each(|_| drop(world.tick()));
    world.add(job(7, 3, 1, 0), ENDLESS);
    (0..2 * PATIENCE).for_each(|_| drop(world.tick()));
    world.add(job(8, 3, 1, 0), ENDLESS);
    let plan = world.tick();
    assert_eq!(plan.wait.iter().find(|wait| wait.job == JobId(8)).unwrap().reason, Reason::Kept, "the device is kept for it");
    world.add(job(9, 2, 30, 0), ENDLESS);
    world.tick();
    assert!(world.is_running(JobId(9)) && !world.is_running(JobId(5)));
}
