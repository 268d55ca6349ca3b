//! How large the examples of a job's data are, as its memory is planned: so many of each size, read once for all lengths that they are cut at.
//!
//! Keeps no example, and knows no job.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nodus_engine::plan::BatchSize;
use nodus_sandbox::EVALUATION_ROW_ALIGN;

use super::inputs::OpenModel;
use super::rows::Rows;

/// Rows at a multiple of which a device may begin each sequence. The coarsest of all, since a limit must not depend on the device.
pub(super) const ROW_ALIGN: usize = EVALUATION_ROW_ALIGN as usize;
/// Data sets at one length whose sizes are remembered; beyond that, all are forgotten.
const KNOWN_MAX: usize = 1024;

/// How many examples of a data set have so many rows, and how many so many labelled ones, each as a device has them: a few hundred numbers at most,
/// however many examples there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spread {
    rows: BTreeMap<usize, usize>,
    labelled: BTreeMap<usize, usize>,
}

impl Spread {
    pub(super) fn add(&mut self, rows: usize, labelled: usize) {
        *self.rows.entry(rows.next_multiple_of(ROW_ALIGN)).or_default() += 1;
        *self.labelled.entry(labelled.next_multiple_of(ROW_ALIGN)).or_default() += 1;
    }

    fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// More than any batch of so many examples has.
    pub(super) fn largest(&self, examples: usize) -> BatchSize {
        let most = |sizes: &BTreeMap<usize, usize>| {
            let mut left = examples;
            let mut taken = |(size, count): (&usize, &usize)| {
                let count = (*count).min(left);
                left -= count;
                size.saturating_mul(count)
            };
            sizes.iter().rev().map(&mut taken).fold(0, usize::saturating_add)
        };
        BatchSize { rows: most(&self.rows), labelled: most(&self.labelled) }
    }

    /// Rows of the longest example.
    pub(super) fn longest(&self) -> usize {
        self.rows.last_key_value().map_or(0, |(rows, _)| *rows)
    }
}

/// Of the data to train on, then of the held-out data; without what cannot be read, as the job will hear.
pub(crate) type Sizes = Vec<Spread>;

/// Reads a job's data once, for all of these lengths. `between` is called before each row.
pub(crate) fn measure(
    model: &OpenModel,
    (train, held_out): (&Rows, Option<&Rows>),
    lengths: &BTreeSet<usize>,
    mut between: impl FnMut(),
) -> BTreeMap<usize, Sizes> {
    let longest = model.config.max_position_embeddings;
    let lengths: Vec<usize> = lengths.iter().copied().collect();
    let of = |rows: &Rows| {
        let mut spreads = vec![Spread::default(); lengths.len()];
        let each = |weights: &[f32]| {
            between();
            cut(weights, lengths.iter().copied().zip(&mut spreads));
        };
        rows.targets(model, each).is_ok().then_some(spreads)
    };
    let measured: Vec<Vec<Spread>> = [Some(train), held_out].into_iter().flatten().map_while(of).collect();
    let at = |(place, length): (usize, &usize)| {
        let spreads =
            measured.iter().filter_map(|spreads| spreads.get(place)).take_while(|spread| !spread.is_empty() && *length <= longest);
        (*length, spreads.cloned().collect())
    };
    lengths.iter().enumerate().map(at).collect()
}

/// Counts one example at each of some lengths, which grow, unless no label is left of it.
fn cut<'a>(weights: &[f32], lengths: impl Iterator<Item = (usize, &'a mut Spread)>) {
    let (mut rows, mut labelled) = (0, 0);
    for (length, spread) in lengths {
        let end = weights.len().min(length.saturating_sub(1));
        labelled += weights.get(rows..end).unwrap_or_default().iter().filter(|weight| **weight > 0.0).count();
        rows = end;
        if labelled > 0 {
            spread.add(rows, labelled);
        }
    }
}

/// Sizes that were reckoned, by the data and the model and by the length, so that jobs of the same data read it once.
pub(crate) struct Reckoned<K>(BTreeMap<(K, usize), Arc<Sizes>>);

impl<K> Default for Reckoned<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord + Clone> Reckoned<K> {
    /// What is known of data at a length.
    pub(crate) fn get(&self, of: &K, length: usize) -> Option<Arc<Sizes>> {
        self.0.get(&(of.clone(), length)).cloned()
    }

    /// Remembers what was measured.
    pub(crate) fn learn(&mut self, of: &K, measured: BTreeMap<usize, Sizes>) -> BTreeMap<usize, Arc<Sizes>> {
        if self.0.len() + measured.len() > KNOWN_MAX {
            self.0.clear();
        }
        let measured: BTreeMap<usize, _> = measured.into_iter().map(|(length, sizes)| (length, Arc::new(sizes))).collect();
        self.0.extend(measured.iter().map(|(length, sizes)| ((of.clone(), *length), sizes.clone())));
        measured
    }
}

#[cfg(test)]
mod tests {
    use nodus_engine::plan::BatchSize;
    use proptest::prelude::*;

    use super::{ROW_ALIGN, Spread, cut};

    proptest! {
        /// Read once for all lengths it is what reading at each one would find.
        #[test]
        fn one_reading_is_as_good_as_one_for_each_length(
            examples in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0.0_f32), Just(1.0), Just(0.5)], 1..400), 1..12),
            lengths in prop::collection::btree_set(0_usize..500, 1..8),
            batch in 1_usize..14,
        ) {
            let mut spreads = vec![Spread::default(); lengths.len()];
            for weights in &examples {
                cut(weights, lengths.iter().copied().zip(&mut spreads));
            }
            for (length, spread) in lengths.iter().zip(&spreads) {
                let kept = examples.iter().map(|weights| &weights[..weights.len().min(length.saturating_sub(1))]);
                let labelled = |weights: &[f32]| weights.iter().filter(|weight| **weight > 0.0).count();
                let kept: Vec<&[f32]> = kept.filter(|weights| labelled(weights) > 0).collect();
                let most = |size: &dyn Fn(&[f32]) -> usize| {
                    let mut sizes: Vec<usize> = kept.iter().map(|weights| size(weights).next_multiple_of(ROW_ALIGN)).collect();
                    sizes.sort_unstable_by(|a, b| b.cmp(a));
                    sizes.into_iter().take(batch).sum::<usize>()
                };
                let expected = BatchSize { rows: most(&<[f32]>::len), labelled: most(&labelled) };
                prop_assert_eq!(spread.largest(batch), expected);
                prop_assert_eq!(spread.is_empty(), kept.is_empty());
                let longest = kept.iter().map(|weights| weights.len().next_multiple_of(ROW_ALIGN)).max();
                prop_assert_eq!(spread.longest(), longest.unwrap_or(0));
            }
        }
    }
}
