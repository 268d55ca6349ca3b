//! Random histories: every plan keeps memory, quotas and lanes, and in the end everybody has run.

use nodus_schedule::{CohortId, Job, Lane, Priority, TenantId, TrunkId};
use proptest::prelude::*;

use super::world::{TICK_MS, World, job};

/// A job that arrives: after how many seconds, whose, its sizes, how long, and of which kind.
pub(crate) type Arrival = (u64, u128, (u64, u64), u64, (u32, u8, u8, u8));

pub(crate) fn arrival() -> impl Strategy<Value = Arrival> {
    (0_u64..4, 1_u128..5, (0_u64..60, 0_u64..30), 1_u64..12, (0_u32..3, 0_u8..10, 0_u8..6, 0_u8..8))
}

pub(crate) fn of(number: usize, arrival: &Arrival) -> Job {
    let (_, tenant, (adapter_bytes, activation_bytes), _, (trunk, lane, priority, cohort)) = *arrival;
    let lane = match lane {
        0 => Lane::Solo,
        1 => Lane::Mps,
        _ => Lane::Fused,
    };
    let priority = if priority == 0 { Priority::High } else { Priority::Low };
    let cohort = (cohort < 4).then_some(CohortId(tenant * 10 + u128::from(cohort)));
    Job { lane, priority, cohort, trunk: TrunkId(trunk), ..job(number as u128, tenant, adapter_bytes, activation_bytes) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn plans_keep_every_bound_and_nobody_starves(
        devices in prop::collection::vec(120_u64..220, 1..4),
        trunks in prop::collection::vec(0_u64..30, 3),
        arrivals in prop::collection::vec(arrival(), 1..60),
        running_jobs in 1_u64..6,
    ) {
        let mut world = World::new(&devices, &trunks, 4);
        world.quota(TenantId(1), running_jobs, u64::MAX, 90);
        for (number, arrival) in arrivals.iter().enumerate() {
            (0..arrival.0).for_each(|_| drop(world.tick()));
            world.add(of(number, arrival), arrival.3);
        }
        // Jobs of at most 90 bytes and an engine fit every device, so that all must have their turn, solo ones too.
        for _ in 0..(arrivals.len() * 40 + 100) {
            if world.left() == 0 {
                break;
            }
            world.tick();
        }
        prop_assert_eq!(world.left(), 0, "somebody starves");
    }

    /// Some of the jobs never end, whatever their priority and size.
    #[test]
    fn everybody_has_a_turn_beside_jobs_that_never_end_and_turns_are_few(
        devices in prop::collection::vec(120_u64..220, 1..3),
        trunks in prop::collection::vec(0_u64..30, 3),
        arrivals in prop::collection::vec((arrival(), any::<bool>()), 4..40),
    ) {
        const TENANTS: u64 = 4;
        const TICKS: u64 = 400;
        let mut world = World::new(&devices, &trunks, u128::from(TENANTS));
        for (number, (arrival, is_endless)) in arrivals.iter().enumerate() {
            (0..arrival.0).for_each(|_| drop(world.tick()));
            world.add(of(number, arrival), if *is_endless { u64::MAX } else { arrival.3 });
        }
        (0..TICKS).for_each(|_| drop(world.tick()));
        let patience_ms = 10 * TICK_MS;
        prop_assert!(world.barest_ms <= 3 * TENANTS * patience_ms, "{} ms without a seat", world.barest_ms);
        let passed_ms = TICK_MS * (TICKS + arrivals.iter().map(|(arrival, _)| arrival.0).sum::<u64>());
        prop_assert!(world.turns <= TENANTS * (passed_ms / patience_ms + 1), "{} times", world.turns);
    }

    #[test]
    fn without_devices_nobody_runs_and_everybody_is_told(arrivals in prop::collection::vec(arrival(), 1..10)) {
        let mut world = World::new(&[], &[1, 2, 3], 4);
        for (number, arrival) in arrivals.iter().enumerate() {
            world.add(of(number, arrival), arrival.3);
        }
        let plan = world.tick();
        prop_assert!(plan.place.is_empty() && plan.start.is_empty());
        prop_assert_eq!(plan.wait.len(), arrivals.len());
    }
}
