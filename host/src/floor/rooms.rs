//! How much of a device's memory each engine's buffers may have: what the engine is planned to need, and a part of what nobody is planned to need.
//!
//! Never promises memory twice: who is to have less has given it back before another has more, or begins. One that hangs is waited for for a minute.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nodus_schedule::{DeviceId, EngineId, Job, Lane};
use tokio::time::timeout;

use super::Shared;
use super::board::Board;
use super::engines::Engine;
use crate::engine::Process;

/// An engine's need of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// Weights, which clients of one MPS daemon have once between them.
    pub(super) weight_bytes: u64,
    /// Weights, and what driver and libraries take.
    pub(super) fixed_bytes: u64,
    /// Buffers before any job: tables, caches.
    pub(super) own_bytes: u64,
    /// The job that it is started for.
    pub(super) first: Job,
}

/// What an engine's buffers may have, as it was told last.
pub(super) type Bound = Arc<AtomicU64>;

/// An engine beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    fixed_bytes: u64,
    buffer_bytes: u64,
    /// Whether it has use for more: with more a shared engine is faster.
    takes_more: bool,
}

/// What the buffers of each may have.
fn shares(memory_bytes: u64, plans: &[Plan]) -> Vec<u64> {
    let planned = plans.iter().map(|plan| plan.fixed_bytes.saturating_add(plan.buffer_bytes)).fold(0, u64::saturating_add);
    let takers = plans.iter().filter(|plan| plan.takes_more).count().max(1) as u64;
    let more = memory_bytes.saturating_sub(planned) / takers;
    plans.iter().map(|plan| plan.buffer_bytes.saturating_add(if plan.takes_more { more } else { 0 })).collect()
}

/// An engine that is to be told.
struct Change {
    bound: Bound,
    bytes: u64,
    process: Option<Arc<Process>>,
}

/// How long an engine may take to give memory back: it does so between two passes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tells the engines of a device what they may have now, those first that are to have less. Waits until they have given it back, which an engine
/// does between two passes.
pub(super) async fn settle(shared: &Shared, device: DeviceId) {
    let Some(turn) = shared.rooms.get(device.0 as usize) else { return };
    let _turn = turn.lock().await;
    let changes = changes(shared, device);
    let (less, more): (Vec<Change>, Vec<Change>) = changes.into_iter().partition(|change| change.bytes < change.bound.load(Relaxed));
    for Change { bound, bytes, process } in less.into_iter().chain(more) {
        let before = bound.swap(bytes, Relaxed);
        // One that hangs is ended by who watches it; until then the others must not stand still. It is told again the next time.
        if let Some(process) = process
            && timeout(PATIENCE, process.bound(bytes)).await.is_err()
        {
            bound.store(before, Relaxed);
            tracing::warn!("an engine has not given memory back for {} s, and the next one begins all the same", PATIENCE.as_secs());
        }
    }
}

/// Publishes an engine that has loaded its model, once it knows what it may have: it may have been told otherwise meanwhile, and could not hear it.
pub(super) async fn enter(shared: &Shared, device: DeviceId, (process, bound): (&Process, &Bound), publish: impl FnOnce()) {
    let Some(turn) = shared.rooms.get(device.0 as usize) else { return publish() };
    let _turn = turn.lock().await;
    // It has no job yet that could keep it from answering.
    process.bound(bound.load(Relaxed)).await;
    publish();
}

fn changes(shared: &Shared, device: DeviceId) -> Vec<Change> {
    let Some(place) = shared.options.places.get(device.0 as usize) else { return Vec::new() };
    let board = shared.board();
    let engines: Vec<_> = board.engines.iter().filter(|(_, engine)| engine.numbers.device == device).collect();
    let mut trunks = BTreeSet::new();
    let plan = |(id, engine): &(&EngineId, &Engine)| {
        let shares = engine.numbers.lane == Lane::Mps && place.shares_weights;
        let has_weights = !shares || trunks.insert(engine.numbers.trunk);
        plan(&board, **id, (&engine.need, has_weights), engine.numbers.lane)
    };
    let plans: Vec<Plan> = engines.iter().map(plan).collect();
    let told = engines.iter().zip(shares(place.memory_bytes, &plans));
    let change = |((_, engine), bytes): (&(&EngineId, &Engine), u64)| {
        let change = Change { bound: engine.bound.clone(), bytes, process: engine.process() };
        (engine.bound.load(Relaxed) != bytes).then_some(change)
    };
    told.filter_map(change).collect()
}

/// As the schedule reckons: the adapters of all its jobs, and the largest activations.
fn plan(board: &Board, id: EngineId, (need, has_weights): (&Need, bool), lane: Lane) -> Plan {
    let jobs = || board.running.values().filter(|run| run.engine == id).map(|run| &run.numbers);
    // Of an engine that is being started the first job may not be there yet.
    let adapters = jobs().map(|job| job.adapter_bytes).fold(0, u64::saturating_add);
    let activations = jobs().map(|job| job.activation_bytes).max().unwrap_or(0);
    let first = need.first.adapter_bytes.saturating_add(need.first.activation_bytes);
    let jobs_bytes = adapters.saturating_add(activations).max(if jobs().next().is_none() { first } else { 0 });
    let fixed_bytes = need.fixed_bytes - if has_weights { 0 } else { need.weight_bytes };
    Plan { fixed_bytes, buffer_bytes: need.own_bytes.saturating_add(jobs_bytes), takes_more: lane != Lane::Mps }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Plan, shares};

    fn plan(fixed_bytes: u64, buffer_bytes: u64, takes_more: bool) -> Plan {
        Plan { fixed_bytes, buffer_bytes, takes_more }
    }

    #[test]
    fn what_nobody_is_planned_to_need_goes_to_those_who_have_use_for_it() {
        assert_eq!(shares(100, &[plan(10, 20, true)]), [90]);
        assert_eq!(shares(100, &[plan(10, 20, true), plan(10, 20, false)]), [60, 20]);
        assert_eq!(shares(100, &[plan(10, 20, true), plan(10, 20, false), plan(0, 10, true)]), [35, 20, 25]);
        assert_eq!(shares(100, &[plan(10, 20, false)]), [20]);
        assert!(shares(100, &[]).is_empty());
    }

    proptest! {
        /// Whoever fits by the schedule's reckoning has what it was planned, and all together never more than there is.
        #[test]
        fn memory_is_promised_once(plans in proptest::collection::vec((0_u64..1000, 0_u64..1000, any::<bool>()), 1..8), more in 0_u64..5000) {
            let plans: Vec<Plan> = plans.into_iter().map(|(fixed, buffers, takes)| plan(fixed, buffers, takes)).collect();
            let planned: u64 = plans.iter().map(|plan| plan.fixed_bytes + plan.buffer_bytes).sum();
            let given = shares(planned + more, &plans);
            let fixed: u64 = plans.iter().map(|plan| plan.fixed_bytes).sum();
            prop_assert!(plans.iter().zip(&given).all(|(plan, given)| *given >= plan.buffer_bytes));
            prop_assert!(fixed + given.iter().sum::<u64>() <= planned + more);
        }
    }
}
