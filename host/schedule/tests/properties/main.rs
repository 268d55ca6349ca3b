//! What holds of every decision, over seeded histories of arrivals, ends and stops.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

mod histories;
mod promises;
mod turns;
mod waits;
mod world;

use std::collections::BTreeMap;

use nodus_schedule::{Bar, CohortId, DeviceId, Foreign, Job, JobId, Lane, Priority, Reason, Seat, TenantId, TrunkId};
use world::{World, job};

#[test]
fn tenants_that_always_want_more_get_equal_device_time() {
    let mut world = World::new(&[100], &[10], 3);
    let mut last = 0;
    for tick in 0..3000_u64 {
        for (tenant, length) in [(1, 3), (2, 7), (3, 12)] {
            while world.waiting(TenantId(tenant)) < 3 {
                last += 1;
                world.add(job(last, tenant, 45, 0), length);
            }
        }
        world.tick();
        assert!(tick < 5 || world.running() == 2, "there is room for two");
    }
    let used: Vec<u64> = (1..=3).map(|tenant| world.device_ms(TenantId(tenant))).collect();
    let (least, most) = (*used.iter().min().unwrap(), *used.iter().max().unwrap());
    // Within a job of the longest kind or two, of some 2000 ticks each.
    assert!(most - least < 40_000, "{used:?}");
}

#[test]
fn a_big_job_does_not_starve_behind_small_ones_nor_one_that_wants_to_be_alone() {
    for lane in [Lane::Fused, Lane::Solo] {
        let mut world = World::new(&[100], &[10], 2);
        world.add(nodus_schedule::Job { lane, ..job(1, 1, 85, 0) }, 2);
        let mut last = 1;
        for _ in 0..200 {
            while world.waiting(TenantId(2)) < 4 {
                last += 1;
                world.add(job(last, 2, 20, 0), 3 + last as u64 % 5);
            }
            world.tick();
        }
        assert!(world.is_done(JobId(1)), "{lane:?}");
    }
}

#[test]
fn high_priority_goes_first_and_the_latest_low_jobs_make_room() {
    let mut world = World::new(&[100], &[10], 2);
    for id in 1..=3 {
        world.add(job(id, 1, 30, 0), 1000);
    }
    world.tick();
    world.add(nodus_schedule::Job { priority: Priority::High, ..job(9, 2, 35, 0) }, 5);
    let plan = world.tick();
    assert_eq!(plan.pause, [JobId(3), JobId(2)]);
    assert_eq!(plan.wait.iter().find(|wait| wait.job == JobId(9)).unwrap().reason, Reason::MakingRoom);
    world.tick();
    let plan = world.tick();
    assert!(world.is_running(JobId(9)) && plan.pause.is_empty());
    (0..8).for_each(|_| drop(world.tick()));
    assert!([1, 2, 3].iter().all(|id| world.is_running(JobId(*id))), "they run again");
}

#[test]
fn a_cohort_is_placed_together_and_where_its_trunk_is() {
    let mut world = World::new(&[100, 160], &[10, 20], 2);
    world.add(nodus_schedule::Job { trunk: nodus_schedule::TrunkId(1), ..job(1, 2, 10, 5) }, 1000);
    let plan = world.tick();
    assert_eq!(plan.start[0].device.0, 1, "the emptier device");
    for id in 2..=7 {
        world.add(nodus_schedule::Job { cohort: Some(CohortId(1)), ..job(id, 1, 15, 10) }, 1000);
    }
    let plan = world.tick();
    let seats: BTreeMap<Seat, usize> = plan.place.iter().fold(BTreeMap::new(), |mut seats, placed| {
        *seats.entry(placed.seat).or_default() += 1;
        seats
    });
    // 125 of 160 bytes are free there: an engine of 10, activations of 10 once, and all six adapters; on the other device only five fit.
    assert_eq!((plan.start.len(), seats), (1, BTreeMap::from([(Seat::New(0), 6)])));
    world.add(job(8, 1, 10, 10), 1000);
    let plan = world.tick();
    assert!(matches!(plan.place[0].seat, Seat::Engine(_)) && plan.start.is_empty(), "the trunk is there: {plan:?}");
}

#[test]
fn weights_of_mps_engines_count_once_where_the_device_can() {
    // Engines of 20 bytes, 10 of them weights: on the first device the second takes 10 and its job's 5, on the other 25 as the first.
    for (devices, running) in [(&[40, 0], 2), (&[0, 49], 1), (&[39, 0], 1)] {
        let mut world = World::new(devices, &[20], 1);
        for id in 1..=4 {
            world.add(nodus_schedule::Job { lane: nodus_schedule::Lane::Mps, ..job(id, 1, 5, 0) }, 1000);
        }
        world.tick();
        world.tick();
        assert_eq!((1..=4).filter(|id| world.is_running(JobId(*id))).count(), running);
    }
}

#[test]
fn who_waits_is_told_why() {
    let mut world = World::new(&[100], &[10], 2);
    world.quota(TenantId(1), 2, 1_000_000, 70);
    for (id, bytes) in [(1, 30), (2, 80), (3, 50), (4, 30), (5, 10), (8, 1)] {
        world.add(job(id, 1, bytes, 0), 1000);
    }
    world.add(job(6, 2, 31, 0), 1000);
    world.add(job(7, 2, 95, 0), 1000);
    let plan = world.tick();
    let told: BTreeMap<u128, String> = plan.wait.iter().map(|wait| (wait.job.0, wait.reason.to_string())).collect();
    let expected = [
        (2, "will not start: needs 80 bytes of device memory, your quota is 70 bytes"),
        (3, "waiting for device memory of your quota: needs 50 bytes, 40 bytes of 70 bytes free"),
        (4, "waiting for device memory: needs 30 bytes, 29 bytes free"),
        (7, "will not start: needs 105 bytes of device memory, the largest device has 100 bytes"),
        (8, "waiting for another of your jobs to end: 2 run, 2 may"),
    ];
    assert_eq!(told, expected.map(|(id, text)| (id, text.to_owned())).into());
    assert_eq!(plan.place.iter().map(|placed| placed.job.0).collect::<Vec<_>>(), [1, 6, 5]);
}

#[test]
fn thousands_that_wait_take_milliseconds() {
    let mut world = World::new(&[1000, 1000], &[10, 20], 200);
    for id in 0..2000 {
        world.add(job(id, 1 + id % 200, 25, 5), 1000);
    }
    let began = std::time::Instant::now();
    world.tick();
    world.tick();
    assert!(began.elapsed() < std::time::Duration::from_secs(2), "{:?}", began.elapsed());
}

#[test]
fn an_engine_that_died_bars_its_own_kind_alone() {
    let bar = |lane, job| Bar { device: DeviceId(0), trunk: TrunkId(0), lane, job, left_ms: 2500 };
    let mut world = World::new(&[100], &[10, 10], 2);
    // The first tenant's own engine died: nobody else waits for it, in its lane or another.
    world.bars(&[bar(Lane::Mps, Some(JobId(1)))]);
    for (id, lane) in [(1, Lane::Mps), (2, Lane::Mps), (3, Lane::Fused)] {
        world.add(Job { lane, ..job(id, 1 + id % 2, 5, 0) }, 1000);
    }
    let plan = world.tick();
    assert!(!world.is_running(JobId(1)) && world.is_running(JobId(2)) && world.is_running(JobId(3)));
    assert_eq!(plan.wait[0].reason, Reason::Later { left_ms: 2500 });
    world.bars(&[]);
    world.tick();
    assert!(world.is_running(JobId(1)));

    // A shared engine could not be started on one device: another takes its jobs, and other trunks have the first.
    let mut world = World::new(&[100, 50], &[10, 10], 1);
    world.bars(&[bar(Lane::Fused, None)]);
    world.add(job(1, 1, 5, 0), 1000);
    world.add(Job { trunk: TrunkId(1), ..job(2, 1, 5, 0) }, 1000);
    world.tick();
    assert_eq!([1, 2].map(|id| world.device_of(JobId(id))), [Some(DeviceId(1)), Some(DeviceId(0))]);
}

#[test]
fn a_job_goes_on_on_its_own_device_class_or_waits_and_clears_no_other() {
    let foreign = |device| Foreign { job: JobId(1), device: DeviceId(device) };
    let mut world = World::new(&[100, 50], &[10], 2);
    world.foreign(&[foreign(0)]);
    world.add(job(1, 1, 30, 0), 1000);
    world.tick();
    assert_eq!(world.device_of(JobId(1)), Some(DeviceId(1)), "the larger device is of another class");

    let mut world = World::new(&[100, 50], &[10], 2);
    world.foreign(&[foreign(0), foreign(1)]);
    world.add(job(1, 1, 30, 0), 1000);
    for tick in 0..50 {
        world.add(job(2 + tick, 2, 30, 0), 2);
        let plan = world.tick();
        assert_eq!(plan.wait.iter().find(|wait| wait.job == JobId(1)).unwrap().reason, Reason::OtherClass);
        assert!(plan.wait.iter().all(|wait| !matches!(wait.reason, Reason::Kept)), "a device is kept for who cannot have it");
    }
}
