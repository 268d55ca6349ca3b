//! What a member brings to a pass: its batch, its cut, and which rows of the batch anybody needs.
//!
//! Knows no device and no buffer.

use std::sync::Arc;

use nodus_protocol::{Batch, Module, Sequence};

/// A point in the forward pass. A layer has four, in the order of its modules: q, k and v; o; gate and up; down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stage(usize);

impl Stage {
    /// Where a module stands.
    pub(crate) fn of(layer: usize, module: Module) -> Self {
        let within = match module {
            Module::QProj | Module::KProj | Module::VProj => 0,
            Module::OProj => 1,
            Module::GateProj | Module::UpProj => 2,
            Module::DownProj => 3,
        };
        Self(4 * layer + within)
    }

    /// The first stage of a half layer.
    pub(crate) fn first_of(half: usize) -> Self {
        Self(2 * half)
    }

    /// The half layer it belongs to: 2 n is the attention of layer n, 2 n + 1 its MLP.
    pub(crate) fn half(self) -> usize {
        self.0 / 2
    }
}

/// What one member brings to a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) batch: &'a Batch,
    /// Members of one cohort with equal batches share rows below their cuts.
    pub(crate) cohort: Option<u64>,
    /// The lowest stage that carries the member's adapter.
    pub(crate) cut: Stage,
    /// Whether it takes part in the backward pass.
    pub(crate) trains: bool,
    /// For each sequence whether its rows are at hand at the member's cut, so that nothing below it is computed; none where the list ends.
    pub(crate) at_hand: &'a [bool],
}

impl Source<'_> {
    /// Whether a sequence's rows are there from this half layer on.
    pub(super) fn is_in(&self, sequence: u32, half: usize) -> bool {
        half >= self.cut.half() || !self.at_hand.get(sequence as usize).copied().unwrap_or(false)
    }
}

/// How many rows of one sequence are computed, from its first on, and the positions of those that are labelled.
#[derive(Debug, Default)]
pub(crate) struct Needed {
    pub(crate) rows: usize,
    pub(crate) labelled: Vec<u32>,
}

impl Needed {
    /// None where no row is labelled: rows after the last labelled one are seen by nobody.
    pub(crate) fn of(sequence: &Sequence) -> Option<Self> {
        let weights = sequence.weights();
        let last = weights.iter().rposition(|weight| *weight > 0.0)?;
        let mut labelled = Vec::with_capacity(last + 1);
        // Most often every row is labelled, which is seen faster than a list is made row by row.
        if weights.iter().take(last).all(|weight| *weight > 0.0) {
            labelled.extend(0..=last as u32);
        } else {
            labelled.extend((0..).zip(weights).filter(|(_, weight)| **weight > 0.0).map(|(i, _)| i));
        }
        Some(Self { rows: last + 1, labelled })
    }
}

/// The sequences of a batch that have labelled rows, by number.
pub(super) fn needed(batch: &Batch) -> impl Iterator<Item = (u32, Needed)> {
    (0..).zip(&batch.sequences).filter_map(|(number, sequence)| Some((number, Needed::of(sequence)?)))
}

/// The order in which members enter a row map: training before evaluation, then by cut, bottom first.
pub(crate) fn order(trains: bool, cut: Stage) -> impl Ord {
    (!trains, cut)
}

/// Which members share rows in this half layer: those of one cohort with equal batches that are still below their cuts.
pub(super) fn streams(sources: &[Source<'_>], half: usize) -> Vec<Vec<usize>> {
    let mut streams: Vec<Vec<usize>> = Vec::new();
    for (member, source) in sources.iter().enumerate() {
        let twin = streams.iter_mut().find(|stream| {
            let owner = stream.first().and_then(|owner| sources.get(*owner));
            owner.is_some_and(|owner| share(owner, source, half))
        });
        match twin {
            Some(stream) => stream.push(member),
            None => streams.push(vec![member]),
        }
    }
    streams
}

fn share(a: &Source<'_>, b: &Source<'_>, half: usize) -> bool {
    let below = a.cut.half() > half && b.cut.half() > half;
    below && a.cohort.is_some() && a.cohort == b.cohort && equal(a.batch, b.batch)
}

fn equal(a: &Batch, b: &Batch) -> bool {
    let pairs = || a.sequences.iter().zip(&b.sequences);
    a.sequences.len() == b.sequences.len() && pairs().all(|(a, b)| Arc::ptr_eq(a, b) || a == b)
}
