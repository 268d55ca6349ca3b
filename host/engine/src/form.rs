//! Decides what the engine does next. Knows no clock, no device, no batch: numbers in, plan out.
//!
//! Never changes a result: it chooses which commands run together and when, and results depend on neither.

use std::collections::BTreeSet;

use nodus_protocol::{AdapterSlot, JobSlot, TrunkSlot};

/// A command that waits, as far as the decision sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The adapter that it names.
    pub adapter: AdapterSlot,
    /// What it needs.
    pub work: Work,
    /// Whether its job goes before others.
    pub is_urgent: bool,
    /// When it was sent, in microseconds of the caller's clock.
    pub sent_us: u64,
}

/// What a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// No pass: optimiser steps, creation, export and the like. Later commands of its adapter wait for it.
    Alone,
    /// A place in a pass on this trunk, with so many rows.
    Pass {
        /// Which trunk.
        trunk: TrunkSlot,
        /// How many rows.
        rows: usize,
    },
}

/// What the decision looks at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Waiting commands in the order in which they arrived.
    pub items: &'a [Item],
    /// The trunk of the last pass, and its jobs that are still there.
    pub previous: Option<(TrunkSlot, &'a BTreeSet<JobSlot>)>,
    /// When the last pass ended, by the same clock.
    pub previous_end_us: u64,
    /// By the same clock.
    pub now_us: u64,
    /// How long a pass may wait for a job of the last one.
    pub linger_us: u64,
    /// Rows of one pass at most; a single command may have more and then runs alone.
    pub rows_max: usize,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing waits.
    Idle,
    /// Look again at this time, or when another command arrives.
    Wait {
        /// By the same clock.
        until_us: u64,
    },
    /// Carry out these items (by their index), none of which needs a pass, in order.
    Alone(Vec<usize>),
    /// Run these items (by their index) in one pass on this trunk.
    Pass(TrunkSlot, Vec<usize>),
}

/// Decides. Only the first waiting command of an adapter can run. Those that need no pass go first. The trunk of the oldest of the
/// others is served, and the oldest is always in the pass, so that nothing starves; younger ones join while they fit. If a job of the last
/// pass on this trunk has not sent its next command, the pass waits for it, at most `linger_us` from when it could first have run.
///
/// Urgent jobs go first, in passes of their own that wait for nobody: such a job waits for the pass under way and for other urgent ones.
/// Others may starve while urgent jobs ask without a pause.
#[must_use]
pub fn decide(view: &View<'_>) -> Decision {
    let mut adapters = BTreeSet::new();
    let heads: Vec<(usize, &Item)> = view.items.iter().enumerate().filter(|(_, item)| adapters.insert(item.adapter)).collect();
    let alone: Vec<usize> = heads.iter().filter(|(_, item)| item.work == Work::Alone).map(|(index, _)| *index).collect();
    if !alone.is_empty() {
        return Decision::Alone(alone);
    }
    let urgent: Vec<(usize, &Item)> = heads.iter().filter(|(_, item)| item.is_urgent).copied().collect();
    let is_urgent = !urgent.is_empty();
    let heads = if is_urgent { urgent } else { heads };
    let Some((oldest, Work::Pass { trunk, .. })) = heads.first().map(|(_, item)| (*item, item.work)) else {
        return Decision::Idle;
    };
    let (members, full) = gather(&heads, trunk, view.rows_max);
    let until_us = oldest.sent_us.max(view.previous_end_us).saturating_add(view.linger_us);
    if !is_urgent && !full && view.now_us < until_us && misses_a_job(view, trunk, &heads) {
        return Decision::Wait { until_us };
    }
    Decision::Pass(trunk, members)
}

/// The heads on a trunk that fit into one pass, oldest first, and whether one had to stay behind.
fn gather(heads: &[(usize, &Item)], on: TrunkSlot, rows_max: usize) -> (Vec<usize>, bool) {
    let (mut members, mut total, mut full) = (Vec::new(), 0_usize, false);
    for (index, item) in heads {
        match item.work {
            Work::Pass { trunk, rows } if trunk == on => {
                if members.is_empty() || total.saturating_add(rows) <= rows_max {
                    members.push(*index);
                    total = total.saturating_add(rows);
                } else {
                    full = true;
                }
            }
            _ => {}
        }
    }
    (members, full || total >= rows_max)
}

fn misses_a_job(view: &View<'_>, on: TrunkSlot, heads: &[(usize, &Item)]) -> bool {
    let Some((_, jobs)) = view.previous.filter(|(trunk, _)| *trunk == on) else { return false };
    let here = |job: &JobSlot| heads.iter().any(|(_, item)| item.adapter.job == *job);
    jobs.iter().any(|job| !here(job))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use nodus_protocol::{AdapterSlot, JobSlot, TrunkSlot};
    use proptest::prelude::*;

    use super::{Decision, Item, View, Work, decide};

    const ROWS_MAX: usize = 100;
    const LINGER_US: u64 = 2_000;
    const PASS_US: u64 = 500;

    fn item(job: u32, index: u32, work: Work, sent_us: u64) -> Item {
        Item { adapter: AdapterSlot { job: JobSlot(job), index }, work, is_urgent: false, sent_us }
    }

    fn pass(trunk: u32, rows: usize) -> Work {
        Work::Pass { trunk: TrunkSlot(trunk), rows }
    }

    fn any_item() -> impl Strategy<Value = Item> {
        let work = prop_oneof![Just(Work::Alone), (0..2_u32, 1..150_usize).prop_map(|(trunk, rows)| pass(trunk, rows))];
        (0..4_u32, 0..2_u32, work, 0..10_000_u64).prop_map(|(job, index, work, sent_us)| item(job, index, work, sent_us))
    }

    /// Commands carried out together.
    struct Group {
        items: Vec<Item>,
        ended_us: u64,
    }

    /// Runs a history to its end and gives what ran, in groups.
    fn run(arrivals: &[Item]) -> Vec<Group> {
        let mut arrivals: Vec<(usize, Item)> = arrivals.iter().copied().enumerate().collect();
        arrivals.sort_by_key(|(_, item)| item.sent_us);
        let (mut waiting, mut groups) = (Vec::<Item>::new(), Vec::new());
        let (mut now_us, mut previous_end_us) = (0, 0);
        let mut previous: Option<(TrunkSlot, BTreeSet<JobSlot>)> = None;
        loop {
            let due = arrivals.iter().take_while(|(_, item)| item.sent_us <= now_us).count();
            waiting.extend(arrivals.drain(..due).map(|(_, item)| item));
            let view = View {
                items: &waiting,
                previous: previous.as_ref().map(|(trunk, jobs)| (*trunk, jobs)),
                previous_end_us,
                now_us,
                linger_us: LINGER_US,
                rows_max: ROWS_MAX,
            };
            let decision = decide(&view);
            let chosen = match decision {
                Decision::Idle => match arrivals.first() {
                    Some((_, item)) => {
                        now_us = item.sent_us;
                        continue;
                    }
                    None => return groups,
                },
                Decision::Wait { until_us } => {
                    let since_us = waiting[0].sent_us.max(previous_end_us);
                    assert!(until_us > now_us && until_us <= since_us + LINGER_US, "{until_us} at {now_us}, since {since_us}");
                    now_us = arrivals.first().map_or(until_us, |(_, item)| item.sent_us.clamp(now_us + 1, until_us));
                    continue;
                }
                Decision::Alone(chosen) => chosen,
                Decision::Pass(trunk, chosen) => {
                    assert!(
                        now_us <= waiting[0].sent_us.max(previous_end_us) + LINGER_US,
                        "the oldest waited for others beyond the linger"
                    );
                    now_us += PASS_US;
                    previous_end_us = now_us;
                    previous = Some((trunk, chosen.iter().map(|i| waiting[*i].adapter.job).collect()));
                    chosen
                }
            };
            assert!(!chosen.is_empty());
            groups.push(Group { items: chosen.iter().map(|i| waiting[*i]).collect(), ended_us: now_us });
            let mut index = 0;
            waiting.retain(|_| {
                index += 1;
                !chosen.contains(&(index - 1))
            });
        }
    }

    proptest! {
        // On a failure proptest prints the smallest history, and the seed.
        #![proptest_config(ProptestConfig::with_cases(10_000))]

        /// Nothing starves and nobody waits for others beyond the linger: in front of a command go at most as many passes as commands were
        /// sent before it, each no later than the linger after the one before.
        #[test]
        fn nobody_waits_longer_than_those_before_and_the_linger(mut items in prop::collection::vec(any_item(), 1..40)) {
            items.sort_by_key(|item| item.sent_us);
            let groups = run(&items);
            let mut left: Vec<Item> = items.clone();
            for group in &groups {
                for item in &group.items {
                    let place = left.iter().position(|other| other == item).unwrap();
                    let before = items.iter().filter(|other| other.sent_us <= item.sent_us).count() as u64;
                    // One pass was perhaps under way when it came.
                    prop_assert!(group.ended_us <= item.sent_us + PASS_US + before * (PASS_US + LINGER_US), "{:?} ended at {}", item, group.ended_us);
                    left.remove(place);
                }
            }
            prop_assert!(left.is_empty());
        }

        /// Commands of an adapter run in the order sent; each runs once; a group is all barriers or one pass that fits.
        #[test]
        fn program_order_holds_and_passes_are_well_formed(mut items in prop::collection::vec(any_item(), 0..40)) {
            items.sort_by_key(|item| item.sent_us);
            let groups = run(&items);
            let mut sent: BTreeMap<AdapterSlot, Vec<Item>> = BTreeMap::new();
            let mut done: BTreeMap<AdapterSlot, Vec<Item>> = BTreeMap::new();
            for item in &items { sent.entry(item.adapter).or_default().push(*item); }
            for item in groups.iter().flat_map(|group| &group.items) { done.entry(item.adapter).or_default().push(*item); }
            prop_assert_eq!(sent, done);
            for Group { items: group, .. } in &groups {
                let adapters: BTreeSet<_> = group.iter().map(|item| item.adapter).collect();
                prop_assert_eq!(adapters.len(), group.len(), "an adapter twice in one pass");
                let rows: usize = group.iter().map(|item| if let Work::Pass { rows, .. } = item.work { rows } else { 0 }).sum();
                prop_assert!(rows <= ROWS_MAX || group.len() == 1);
                let trunks: BTreeSet<_> = group.iter().map(|item| match item.work { Work::Pass { trunk, .. } => Some(trunk), Work::Alone => None }).collect();
                prop_assert!(trunks.len() == 1, "{:?}", trunks);
            }
        }

        /// Whatever else waits, the oldest command that can run does so in the next pass: the number of passes before it is bounded.
        #[test]
        fn the_oldest_is_always_served(items in prop::collection::vec(any_item(), 1..40), now_us in 0..20_000_u64) {
            let view = View { items: &items, previous: None, previous_end_us: 0, now_us, linger_us: LINGER_US, rows_max: ROWS_MAX };
            match decide(&view) {
                Decision::Pass(_, chosen) => prop_assert_eq!(chosen[0], 0),
                Decision::Alone(chosen) => prop_assert!(chosen.iter().all(|i| items[*i].work == Work::Alone)),
                other => prop_assert!(false, "{:?}", other),
            }
        }

        /// One job alone never waits, however its commands are timed.
        #[test]
        fn a_job_alone_never_waits(rows in 1..150_usize, sent_us in 0..5_000_u64, late_us in 0..5_000_u64) {
            let items = [item(3, 0, pass(0, rows), sent_us)];
            let jobs = BTreeSet::from([JobSlot(3)]);
            let view = View {
                items: &items, previous: Some((TrunkSlot(0), &jobs)), previous_end_us: sent_us, now_us: sent_us + late_us,
                linger_us: LINGER_US, rows_max: ROWS_MAX,
            };
            prop_assert_eq!(decide(&view), Decision::Pass(TrunkSlot(0), vec![0]));
        }
    }

    #[test]
    fn an_urgent_job_goes_first_alone_and_waits_for_nobody() {
        let jobs = BTreeSet::from([JobSlot(0), JobSlot(1), JobSlot(2)]);
        let urgent = Item { is_urgent: true, ..item(2, 0, pass(0, 10), 1_500) };
        let items = [item(0, 0, pass(0, 10), 1_000), item(1, 0, pass(1, 10), 1_200), urgent];
        let previous = Some((TrunkSlot(0), &jobs));
        let view = |items| View { items, previous, previous_end_us: 900, now_us: 1_500, linger_us: LINGER_US, rows_max: ROWS_MAX };
        assert_eq!(decide(&view(&items)), Decision::Pass(TrunkSlot(0), vec![2]));
        // Its own commands stay in order, and what needs no pass still goes first.
        let barred = [item(2, 0, Work::Alone, 1_000), urgent];
        assert_eq!(decide(&view(&barred)), Decision::Alone(vec![0]));
    }

    #[test]
    fn a_pass_waits_for_a_job_of_the_last_one_and_no_longer_than_the_linger() {
        let jobs = BTreeSet::from([JobSlot(0), JobSlot(1)]);
        let items = [item(0, 0, pass(0, 10), 1_000), item(1, 0, pass(0, 10), 1_500)];
        let view = |items, now_us| View {
            items,
            previous: Some((TrunkSlot(0), &jobs)),
            previous_end_us: 900,
            now_us,
            linger_us: LINGER_US,
            rows_max: ROWS_MAX,
        };
        assert_eq!(decide(&view(&items[..1], 1_000)), Decision::Wait { until_us: 3_000 });
        assert_eq!(decide(&view(&items, 1_500)), Decision::Pass(TrunkSlot(0), vec![0, 1]));
        assert_eq!(decide(&view(&items[..1], 3_000)), Decision::Pass(TrunkSlot(0), vec![0]));
        // A full pass has nobody to wait for.
        let full = [item(0, 0, pass(0, ROWS_MAX), 1_000)];
        assert_eq!(decide(&view(&full, 1_000)), Decision::Pass(TrunkSlot(0), vec![0]));
    }
}
