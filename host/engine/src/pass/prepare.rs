//! Who takes part in a pass, and what of it the trunk cache has and is to keep.
//!
//! Never computes.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodus_kernels::Device;
use nodus_protocol::{AdapterSlot, Batch, TrunkSlot};

use super::Member;
use crate::adapter::Adapter;
use crate::cache::{Key, TrunkCache};
use crate::rows::{AtCut, Needed, RowMap, order};

impl<'a, D: Device> Member<'a, D> {
    /// Members in the order that a row map wants, from the adapters and, by slot, their batches and whether they train.
    pub(crate) fn all(adapters: &'a mut BTreeMap<AdapterSlot, Adapter<D>>, asks: &BTreeMap<AdapterSlot, (&'a Batch, bool)>) -> Vec<Self> {
        let member = |(slot, adapter): (&AdapterSlot, &'a mut Adapter<D>)| {
            let (batch, trains) = *asks.get(slot)?;
            let (cut, keys, at_hand) = (adapter.sites.cut, Vec::new(), Vec::new());
            Some(Member { slot: *slot, adapter, batch, cut, trains, keys, at_hand })
        };
        let mut members: Vec<Self> = adapters.iter_mut().filter_map(member).collect();
        members.sort_by_key(|member| order(member.trains, member.cut));
        members
    }

    /// Names the member's sequences at its cut, if it is of a cohort, and sees which the cache has. `halves` is the trunk's number of half
    /// layers.
    pub(crate) fn look_up(&mut self, cache: &mut TrunkCache<D>, trunk: TrunkSlot, halves: usize) {
        let half = self.cut.half();
        // Below half layer 0 lies the embedding, which is its own cache.
        let Some(cohort) = self.adapter.cohort.filter(|_| half > 0) else { return };
        let key = |sequence: &Arc<nodus_protocol::Sequence>| {
            let needed = Needed::of(sequence)?;
            let tokens = sequence.tokens().iter().take(needed.rows).copied().collect();
            let labelled = (half + 1 == halves).then_some(needed.labelled);
            Some(Arc::new(Key { cohort, trunk, half, tokens, labelled }))
        };
        self.keys = self.batch.sequences.iter().map(key).collect();
        self.at_hand = self.keys.iter().map(|key| key.as_ref().is_some_and(|key| cache.look_up(key))).collect();
    }

    /// The name in the trunk cache of a sequence at the cut.
    pub(super) fn key(&self, at_cut: &AtCut) -> Option<&Arc<Key>> {
        self.keys.get(at_cut.segment.sequence as usize)?.as_ref()
    }
}

/// The sequences at cuts that come in from the cache, or those that are computed and might be kept; each once a pass and stream.
pub(crate) fn reach<D: Device>(map: &RowMap, members: &[Member<'_, D>], come_in: bool) -> Vec<Arc<Key>> {
    let all = map.shared_cuts().into_iter().flat_map(|half| map.at_cuts(half, come_in));
    all.filter_map(|at_cut| members.get(at_cut.member)?.key(&at_cut).cloned()).collect()
}
