//! Which examples make up which batch, in which epoch: indices, epochs, seeded shuffle, gradient accumulation.
//!
//! Never touches the data itself: indices out, and the same ones for the same arguments.

use std::iter::FusedIterator;

use crate::Rng;

/// Batches of example indices, one epoch after the other. An epoch holds every example once; its last batch is smaller
/// where the size does not divide the number of examples, and no batch crosses from one epoch into the next.
///
/// ```
/// use nodus_guest::Batches;
///
/// let batches: Vec<Vec<u64>> = Batches::new(5, 2).collect();
/// assert_eq!(batches, [vec![0, 1], vec![2, 3], vec![4]]);
/// assert_eq!(Batches::new(5, 2).epochs(3).total(), 9);
/// ```
#[derive(Clone, Debug)]
pub struct Batches {
    examples: u64,
    size: u64,
    epochs: Option<u64>,
    seed: Option<u64>,
    epoch: u64,
    next: u64,
    order: Vec<u64>,
}

impl Batches {
    /// One epoch over so many examples, in their order, `size` of them a batch (at least 1: a size of 0 counts as 1).
    #[must_use]
    pub fn new(examples: u64, size: u64) -> Self {
        Self { examples, size: size.max(1), epochs: Some(1), seed: None, epoch: 0, next: 0, order: Vec::new() }
    }

    /// So many epochs.
    #[must_use]
    pub fn epochs(self, epochs: u64) -> Self {
        Self { epochs: Some(epochs), ..self }
    }

    /// Epochs without end; the caller stops. Over no examples there is no batch at all.
    #[must_use]
    pub fn endless(self) -> Self {
        Self { epochs: None, ..self }
    }

    /// A new random order in each epoch, by seed and epoch alone (SplitMix64 and Fisher-Yates, see [`Rng`]).
    #[must_use]
    pub fn shuffle(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Number of batches in one epoch.
    #[must_use]
    pub fn per_epoch(&self) -> u64 {
        self.examples.div_ceil(self.size)
    }

    /// Number of batches in all epochs, those already taken included; `u64::MAX` without end.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.epochs.map_or(u64::MAX, |epochs| self.per_epoch().saturating_mul(epochs))
    }

    /// The epoch of the next batch, from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Groups `count` batches (at least 1: 0 counts as 1) for each optimiser step. An epoch's last step has fewer batches
    /// where `count` does not divide them: the normalisation by accumulated weight makes that exact.
    #[must_use]
    pub fn accumulate(self, count: u64) -> Steps {
        Steps { batches: self, count: count.max(1) }
    }

    fn begin_epoch(&mut self) {
        if let Some(seed) = self.seed {
            self.order = (0..self.examples).collect();
            Rng::stream(seed, self.epoch).shuffle(&mut self.order);
        }
    }
}

impl Iterator for Batches {
    type Item = Vec<u64>;

    fn next(&mut self) -> Option<Vec<u64>> {
        if self.examples == 0 || self.epochs.is_some_and(|epochs| self.epoch >= epochs) {
            return None;
        }
        if self.next == 0 {
            self.begin_epoch();
        }
        let (from, to) = (self.next, self.next.saturating_add(self.size).min(self.examples));
        let batch = match self.seed {
            Some(_) => self.order.get(from as usize..to as usize)?.to_vec(),
            None => (from..to).collect(),
        };
        let ended = to == self.examples;
        (self.epoch, self.next) = if ended { (self.epoch + 1, 0) } else { (self.epoch, to) };
        Some(batch)
    }
}

impl FusedIterator for Batches {}

/// The batches of each optimiser step, see [`Batches::accumulate`].
#[derive(Clone, Debug)]
pub struct Steps {
    batches: Batches,
    count: u64,
}

impl Steps {
    /// Number of optimiser steps in one epoch.
    #[must_use]
    pub fn per_epoch(&self) -> u64 {
        self.batches.per_epoch().div_ceil(self.count)
    }
}

impl Iterator for Steps {
    type Item = Vec<Vec<u64>>;

    fn next(&mut self) -> Option<Vec<Vec<u64>>> {
        let epoch = self.batches.epoch();
        let mut step = vec![self.batches.next()?];
        while (step.len() as u64) < self.count && self.batches.epoch() == epoch {
            step.extend(self.batches.next());
        }
        Some(step)
    }
}

impl FusedIterator for Steps {}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(mut list: Vec<u64>) -> Vec<u64> {
        list.sort_unstable();
        list
    }

    #[test]
    fn every_epoch_holds_every_example_once() {
        for (examples, size) in [(1, 1), (10, 3), (10, 5), (10, 99), (7, 2)] {
            let mut batches = Batches::new(examples, size).epochs(3).shuffle(4);
            for _ in 0..3 {
                let epoch: Vec<u64> = (0..batches.per_epoch()).flat_map(|_| batches.next().unwrap()).collect();
                assert_eq!(sorted(epoch), (0..examples).collect::<Vec<_>>());
            }
            assert_eq!(batches.next(), None);
            assert_eq!(batches.next(), None, "it stays at its end");
        }
    }

    #[test]
    fn only_the_last_batch_of_an_epoch_is_smaller() {
        let sizes: Vec<usize> = Batches::new(10, 4).epochs(2).shuffle(1).map(|b| b.len()).collect();
        assert_eq!(sizes, [4, 4, 2, 4, 4, 2]);
        assert_eq!(Batches::new(10, 4).epochs(2).total(), 6);
    }

    #[test]
    fn the_order_is_a_function_of_seed_and_epoch() {
        let order = |seed, size| -> Vec<u64> { Batches::new(50, size).epochs(2).shuffle(seed).flatten().collect() };
        assert_eq!(order(9, 7), order(9, 7));
        assert_eq!(order(9, 7), order(9, 50), "the batch size does not change the order");
        assert_ne!(order(9, 7), order(10, 7));
        let both = order(9, 7);
        assert_ne!(both[..50], both[50..], "each epoch has its own order");
        assert_ne!(both[..50], (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn nothing_gives_nothing_even_without_end() {
        assert_eq!(Batches::new(0, 4).endless().next(), None);
        assert_eq!(Batches::new(4, 4).epochs(0).next(), None);
        assert_eq!(Batches::new(3, 0).next(), Some(vec![0]));
        assert_eq!(Batches::new(3, 3).endless().nth(1000), Some(vec![0, 1, 2]));
        assert_eq!(Batches::new(3, 3).endless().total(), u64::MAX);
    }

    #[test]
    fn a_step_gathers_batches_and_an_epoch_ends_its_last_one() {
        let steps = Batches::new(10, 2).epochs(2).accumulate(3);
        assert_eq!(steps.per_epoch(), 2);
        let taken: Vec<Vec<Vec<u64>>> = steps.collect();
        assert_eq!(taken.iter().map(Vec::len).collect::<Vec<_>>(), [3, 2, 3, 2]);
        assert_eq!(taken[1], [vec![6, 7], vec![8, 9]]);
        let again: Vec<u64> = Batches::new(10, 2).epochs(2).accumulate(3).flatten().flatten().collect();
        assert_eq!(again, Batches::new(10, 2).epochs(2).flatten().collect::<Vec<_>>(), "accumulation changes no order");
    }
}
