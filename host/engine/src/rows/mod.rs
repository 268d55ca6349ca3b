//! The row map of a pass: which rows each half of each layer computes, and whose they are.
//!
//! Knows no device and no weight: batches and cuts in, layouts and indices out.

mod level;
mod source;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use nodus_kernels::{Layout, Segment};

pub(crate) use level::{Level, View};
pub(crate) use source::{Needed, Source, Stage, order};

use level::select;
use source::streams;

/// A member's cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    trains: bool,
    stage: Stage,
    shared: bool,
}

/// One sequence of a member at the member's cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AtCut {
    pub(crate) half: usize,
    pub(crate) member: usize,
    /// Where its rows lie in the level that reaches the cut.
    pub(crate) segment: Segment,
}

/// The levels of a pass, bottom up, and what feeds the lowest and meets the highest.
#[derive(Debug)]
pub(crate) struct RowMap {
    levels: Vec<Level>,
    cuts: Vec<Cut>,
    halves: usize,
    /// The rows of a view of the first so many members, where they were asked for: a pass asks for few, and often.
    selected: RefCell<BTreeMap<(*const View, usize), Option<Layout>>>,
    /// One a row of the lowest level.
    pub(crate) tokens: Vec<u32>,
    /// One a labelled row of the highest level.
    pub(crate) targets: Vec<u32>,
    /// One a labelled row of the highest level.
    pub(crate) weights: Vec<f32>,
}

impl RowMap {
    /// Plans a pass through `halves` half layers. Members must come in the order that [`order`] gives: then those that a stage of the
    /// backward pass concerns are the first ones, on the same rows in every level.
    pub(crate) fn new(sources: &[Source<'_>], halves: usize, align: usize) -> Self {
        let mut starts: Vec<usize> = sources.iter().map(|s| s.cut.half()).chain([0]).collect();
        starts.sort_unstable();
        starts.dedup();
        let mut levels: Vec<Level> = Vec::new();
        for half in starts {
            // Rows come in among the streams of the half layer below, then these fan out.
            for sharing in half.checked_sub(1).into_iter().chain([half]) {
                let level = Level::new(sources, streams(sources, sharing), half, levels.last(), align);
                if levels.last().is_none_or(|below| !level.equals(below)) {
                    levels.push(level);
                }
            }
        }
        let mut map = Self {
            levels,
            cuts: sources.iter().map(|s| Cut { trains: s.trains, stage: s.cut, shared: s.cohort.is_some() }).collect(),
            halves,
            selected: RefCell::default(),
            tokens: Vec::new(),
            targets: Vec::new(),
            weights: Vec::new(),
        };
        map.fill(sources);
        map
    }

    fn fill(&mut self, sources: &[Source<'_>]) {
        let (Some(lowest), Some(highest)) = (self.levels.first(), self.levels.last()) else { return };
        self.tokens = lowest.values(&lowest.all.rows, sources, |sequence| sequence.tokens());
        self.targets = highest.values(&highest.labelled.rows, sources, |sequence| sequence.targets());
        self.weights = highest.values(&highest.labelled.rows, sources, |sequence| sequence.weights());
    }

    /// Number of half layers.
    pub(crate) fn halves(&self) -> usize {
        self.halves
    }

    /// The level of a half layer; where streams fan out just there, also the level they come from.
    pub(crate) fn level(&self, half: usize) -> (&Level, Option<&Level>) {
        let index = self.levels.partition_point(|level| level.first_half <= half).saturating_sub(1);
        #[expect(clippy::indexing_slicing, reason = "the first level begins at half 0, so there is one at or below every half")]
        let level = &self.levels[index];
        let below = index.checked_sub(1).and_then(|below| self.levels.get(below));
        (level, below.filter(|below| level.first_half == half && below.streams != level.streams))
    }

    /// The level of the half layer below, where another begins at this one.
    pub(crate) fn beneath(&self, half: usize) -> Option<&Level> {
        let index = self.levels.partition_point(|level| level.first_half < half);
        let begins = self.levels.get(index).is_some_and(|level| level.first_half == half);
        index.checked_sub(1).filter(|_| begins).and_then(|below| self.levels.get(below))
    }

    /// Where rows come in that were at hand: the level below, and the one with them.
    pub(crate) fn entry(&self, half: usize) -> Option<(&Level, &Level)> {
        let below = self.beneath(half)?;
        let (level, fanned_out) = self.level(half);
        let level = fanned_out.unwrap_or(level);
        Some((below, level)).filter(|_| !std::ptr::eq(below, level) && below.streams == level.streams)
    }

    /// The sequences that reach a member's cut, each once however many members share it: those that come in there, or those computed up to it.
    pub(crate) fn at_cuts(&self, half: usize, come_in: bool) -> Vec<AtCut> {
        let (level, fanned_out) = self.level(half);
        let level = fanned_out.unwrap_or(level);
        let below = self.entry(half).map(|(below, _)| below);
        let rows = &level.view(half + 1 == self.halves).rows;
        let mut all = Vec::new();
        for stream in &level.streams {
            let cut_here = |member: &&usize| self.cuts.get(**member).is_some_and(|cut| cut.shared && cut.stage.half() == half);
            let Some(&member) = stream.iter().find(cut_here) else { continue };
            for place in level.segments(member) {
                let was_there = below.is_none_or(|below| below.has(place));
                if level.has(place) && was_there != come_in {
                    all.extend(rows.segments().get(place).map(|segment| AtCut { half, member, segment: *segment }));
                }
            }
        }
        all
    }

    /// The half layers at which a member of a cohort has its cut, ascending.
    pub(crate) fn shared_cuts(&self) -> BTreeSet<usize> {
        self.cuts.iter().filter(|cut| cut.shared).map(|cut| cut.stage.half()).collect()
    }

    /// The lowest half layer that has rows.
    pub(crate) fn first_half(&self) -> usize {
        self.levels.iter().find(|level| level.all.rows.rows() > 0).map_or(self.halves, |level| level.first_half)
    }

    /// The half layer of the lowest cut of all members: what lies below is the trunk alone.
    pub(crate) fn trunk_end(&self) -> usize {
        self.cuts.iter().map(|cut| cut.stage.half()).min().unwrap_or(0)
    }

    /// The lowest stage that the backward pass reaches; none where no member trains.
    pub(crate) fn lowest_cut(&self) -> Option<Stage> {
        self.cuts.iter().filter(|cut| cut.trains).map(|cut| cut.stage).min()
    }

    /// The rows of the members that the backward pass concerns at this stage; none where there are none.
    pub(crate) fn at(&self, stage: Stage, level: &Level, view: &View) -> Option<Layout> {
        self.select(level, view, |cut| cut <= stage)
    }

    /// The rows of the members that also need a gradient below this stage; none where there are none.
    pub(crate) fn below(&self, stage: Stage, level: &Level, view: &View) -> Option<Layout> {
        self.select(level, view, |cut| cut < stage)
    }

    /// Whether a member takes part in the backward pass, and needs a gradient below this stage.
    pub(crate) fn continues_below(&self, member: usize, stage: Stage) -> bool {
        self.cuts.get(member).is_some_and(|cut| cut.trains && cut.stage < stage)
    }

    /// The labelled rows at the top of the members that train (or of those that do not); none where there are none.
    pub(crate) fn top(&self, level: &Level, trains: bool) -> Option<Layout> {
        select(level, &level.labelled, |member| self.cuts.get(member).is_some_and(|cut| cut.trains == trains))
    }

    /// The rows of the training members with such a cut: the first ones, by [`order`].
    fn select(&self, level: &Level, view: &View, chosen: impl Fn(Stage) -> bool) -> Option<Layout> {
        let count = self.cuts.iter().filter(|cut| cut.trains && chosen(cut.stage)).count();
        if count == self.cuts.len() {
            return Some(view.rows.clone()).filter(|rows| rows.segments().iter().any(|segment| segment.rows > 0));
        }
        let key = (std::ptr::from_ref(view), count);
        self.selected.borrow_mut().entry(key).or_insert_with(|| select(level, view, |member| member < count)).clone()
    }

    /// Of one value a labelled row at the top, those of a member, in order.
    pub(crate) fn losses_of<'v>(&self, member: usize, values: &'v [f32]) -> impl Iterator<Item = f32> + use<'v, '_> {
        let level = self.levels.last();
        let segments = level.and_then(|level| level.labelled.rows.segments().get(level.segments(member))).unwrap_or_default();
        segments.iter().flat_map(|segment| values.iter().skip(segment.start).take(segment.rows).copied())
    }

    /// Rows times half layers that this pass computes, and those that sharing and rows at hand spare it.
    pub(crate) fn work(&self) -> (u64, u64) {
        let rows = |level: &Level, members: Range<usize>| -> usize {
            level.all.rows.segments().get(members).unwrap_or_default().iter().map(|segment| segment.rows).sum()
        };
        let alone = self.levels.last().map_or(0, |top| top.members.iter().map(|members| rows(top, members.clone())).sum::<usize>());
        let (mut computed, mut spared) = (0, 0);
        let ends = self.levels.iter().skip(1).map(|level| level.first_half).chain([self.halves]);
        for (level, end) in self.levels.iter().zip(ends) {
            let here = rows(level, 0..level.all.rows.segments().len());
            let halves = (end - level.first_half) as u64;
            computed += here as u64 * halves;
            spared += (alone - here) as u64 * halves;
        }
        (computed, spared)
    }
}
