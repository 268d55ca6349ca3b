//! How large the examples of a job's data are, as its memory is planned: so many of each size, read once for all lengths that they are cut at.
//!
//! Keeps no example, and knows no job.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use anyhow::bail;
use nodus_engine::plan::BatchSize;
use nodus_sandbox::EVALUATION_ROW_ALIGN;
use nodus_sandbox::services::Refusal;

use super::inputs::OpenModel;
use super::rows::Rows;

/// Rows at a multiple of which a device may begin each sequence. The coarsest of all, since a limit must not depend on the device.
pub(super) const ROW_ALIGN: usize = EVALUATION_ROW_ALIGN as usize;
/// Data sets at one length whose sizes are remembered; beyond that, all are forgotten.
const KNOWN_MAX: usize = 8192;

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

    fn merge(&mut self, other: &Self) {
        for (own, other) in [(&mut self.rows, &other.rows), (&mut self.labelled, &other.labelled)] {
            other.iter().for_each(|(size, count)| *own.entry(*size).or_default() += count);
        }
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

/// The same examples cut at some lengths.
struct Cuts<'a> {
    /// They grow.
    lengths: &'a [usize],
    /// Of each length the examples that it cuts.
    cut: Vec<Spread>,
    /// Of each length the examples that it is the first not to cut: so are they at all that follow.
    whole: Vec<Spread>,
}

impl<'a> Cuts<'a> {
    fn at(lengths: &'a [usize]) -> Self {
        let spreads = vec![Spread::default(); lengths.len()];
        Self { lengths, cut: spreads.clone(), whole: spreads }
    }

    /// Counts one example, by how its targets weigh; where a cut leaves it no label, not there.
    fn count(&mut self, weights: &[f32]) {
        let (mut rows, mut labelled) = (0, 0);
        for (place, length) in self.lengths.iter().enumerate() {
            let end = weights.len().min(length.saturating_sub(1));
            labelled += weights.get(rows..end).unwrap_or_default().iter().filter(|weight| **weight > 0.0).count();
            rows = end;
            let is_whole = rows == weights.len();
            let spreads = if is_whole { &mut self.whole } else { &mut self.cut };
            if let Some(spread) = spreads.get_mut(place).filter(|_| labelled > 0) {
                spread.add(rows, labelled);
            }
            if is_whole {
                break;
            }
        }
    }

    /// What there is at each length.
    fn spreads(self) -> Vec<Spread> {
        let mut whole = Spread::default();
        let each = self.cut.into_iter().zip(self.whole).map(|(mut cut, more)| {
            whole.merge(&more);
            cut.merge(&whole);
            cut
        });
        each.collect()
    }
}

/// Reads a job's data once, for all of these lengths. `between` is asked before each piece of a file is read, and ends it all by an error.
///
/// # Errors
/// Ours: the disk's, or what `between` says. What is wrong with the data is none: the job will hear of it.
pub(crate) fn measure(
    model: &OpenModel,
    (train, held_out): (&Rows, Option<&Rows>),
    lengths: &BTreeSet<usize>,
    mut between: impl FnMut() -> io::Result<()>,
) -> anyhow::Result<BTreeMap<usize, Sizes>> {
    let longest = model.config.max_position_embeddings;
    let lengths: Vec<usize> = lengths.iter().copied().collect();
    let mut parts: Vec<(&Rows, Cuts<'_>)> = [Some(train), held_out].into_iter().flatten().map(|rows| (rows, Cuts::at(&lengths))).collect();
    // Both parts of one data set are read at the same time.
    let files = if held_out.is_some_and(|rows| rows.part_len().is_some()) { vec![&mut parts[..]] } else { parts.chunks_mut(1).collect() };
    let mut readable = 0;
    for file in files {
        let Some(rows) = file.first().map(|(rows, _)| *rows) else { continue };
        let each = |line, weights: &[f32]| {
            file.iter_mut().filter(|(rows, _)| rows.part().has(line)).for_each(|(_, cuts)| cuts.count(weights));
        };
        match rows.targets(model, &mut between, each) {
            Ok(()) => readable += file.len(),
            Err(Refusal::Internal(what)) => bail!("reading data to plan a job: {what}"),
            Err(_) => break,
        }
    }
    let measured: Vec<Vec<Spread>> = parts.into_iter().take(readable).map(|(_, cuts)| cuts.spreads()).collect();
    let at = |(place, length): (usize, &usize)| {
        let spreads =
            measured.iter().filter_map(|spreads| spreads.get(place)).take_while(|spread| !spread.is_empty() && *length <= longest);
        (*length, spreads.cloned().collect())
    };
    Ok(lengths.iter().enumerate().map(at).collect())
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

    use super::{Cuts, ROW_ALIGN};

    proptest! {
        /// Read once for all lengths it is what reading at each one would find.
        #[test]
        fn one_reading_is_as_good_as_one_for_each_length(
            examples in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0.0_f32), Just(1.0), Just(0.5)], 1..400), 1..12),
            lengths in prop::collection::btree_set(0_usize..500, 1..8),
            batch in 1_usize..14,
        ) {
            let lengths: Vec<usize> = lengths.into_iter().collect();
            let mut cuts = Cuts::at(&lengths);
            examples.iter().for_each(|weights| cuts.count(weights));
            for (length, spread) in lengths.iter().zip(cuts.spreads()) {
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
