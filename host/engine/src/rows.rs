//! The row map of a pass: which rows each half of each layer computes, and whose they are.
//!
//! Knows no device and no weight: batches and cuts in, layouts and indices out.

use std::ops::Range;
use std::sync::Arc;

use nodus_kernels::Layout;
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
}

/// Rows in a buffer, and where they come from at a fan-out.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) rows: Layout,
    /// For each buffer row the row of the level below that it continues; none where the level below is the embedding.
    pub(crate) origin: Option<Vec<u32>>,
}

/// The streams of some consecutive half layers: blocks of rows, each of one member above its cut or of several below theirs.
#[derive(Debug)]
pub(crate) struct Level {
    first_half: usize,
    /// Every row that a labelled row of its sequence can see. Sequences without labelled rows have none.
    pub(crate) all: View,
    /// The labelled rows, for the last layer above keys and values; segments correspond to those of `all`.
    pub(crate) labelled: View,
    /// For each row of `labelled` its row in `all`.
    pub(crate) narrow: Vec<u32>,
    /// Each member's segments. Members of one stream have the same.
    members: Vec<Range<usize>>,
    streams: Vec<Vec<usize>>,
}

/// The levels of a pass, bottom up, and what feeds the lowest and meets the highest.
#[derive(Debug)]
pub(crate) struct RowMap {
    levels: Vec<Level>,
    cuts: Vec<(bool, Stage)>,
    halves: usize,
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
            let streams = streams(sources, half);
            if levels.last().is_none_or(|below| below.streams != streams) {
                let level = Level::new(sources, streams, half, levels.last(), align);
                levels.push(level);
            }
        }
        let mut map = Self {
            levels,
            cuts: sources.iter().map(|s| (s.trains, s.cut)).collect(),
            halves,
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

    /// The level of a half layer; where it begins just there, so that rows fan out, also the level they come from.
    pub(crate) fn level(&self, half: usize) -> (&Level, Option<&Level>) {
        let index = self.levels.partition_point(|level| level.first_half <= half).saturating_sub(1);
        #[expect(clippy::indexing_slicing, reason = "the first level begins at half 0, so there is one at or below every half")]
        let level = &self.levels[index];
        let below = if level.first_half == half && index > 0 { self.levels.get(index - 1) } else { None };
        (level, below)
    }

    /// The lowest stage that the backward pass reaches; none where no member trains.
    pub(crate) fn lowest_cut(&self) -> Option<Stage> {
        self.cuts.iter().filter(|(trains, _)| *trains).map(|(_, cut)| *cut).min()
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
        self.cuts.get(member).is_some_and(|(trains, cut)| *trains && *cut < stage)
    }

    /// The labelled rows at the top of the members that train (or of those that do not); none where there are none.
    pub(crate) fn top(&self, level: &Level, trains: bool) -> Option<Layout> {
        select(level, &level.labelled, |member| self.cuts.get(member).is_some_and(|cut| cut.0 == trains))
    }

    fn select(&self, level: &Level, view: &View, chosen: impl Fn(Stage) -> bool) -> Option<Layout> {
        select(level, view, |member| self.cuts.get(member).is_some_and(|(trains, cut)| *trains && chosen(*cut)))
    }

    /// Of one value a labelled row at the top, those of a member, in order.
    pub(crate) fn losses_of<'v>(&self, member: usize, values: &'v [f32]) -> impl Iterator<Item = f32> + use<'v, '_> {
        let level = self.levels.last();
        let segments = level.and_then(|level| level.labelled.rows.segments().get(level.segments(member))).unwrap_or_default();
        segments.iter().flat_map(|segment| values.iter().skip(segment.start).take(segment.rows).copied())
    }

    /// Rows times half layers that this pass computes, and those that sharing spares it.
    pub(crate) fn work(&self) -> (u64, u64) {
        let (mut computed, mut spared) = (0, 0);
        let ends = self.levels.iter().skip(1).map(|level| level.first_half).chain([self.halves]);
        for (level, end) in self.levels.iter().zip(ends) {
            let rows = |members: &Range<usize>| -> usize {
                level.all.rows.segments().get(members.clone()).unwrap_or_default().iter().map(|segment| segment.rows).sum()
            };
            let unshared: usize = level.members.iter().map(rows).sum();
            let shared: usize = level.all.rows.segments().iter().map(|segment| segment.rows).sum();
            let halves = (end - level.first_half) as u64;
            computed += shared as u64 * halves;
            spared += (unshared - shared) as u64 * halves;
        }
        (computed, spared)
    }
}

impl Level {
    fn new(sources: &[Source<'_>], streams: Vec<Vec<usize>>, first_half: usize, below: Option<&Level>, align: usize) -> Self {
        let mut members = vec![0..0; sources.len()];
        let mut rows: Vec<(u32, Needed)> = Vec::new();
        for stream in &streams {
            let start = rows.len();
            let batch = stream.first().and_then(|owner| sources.get(*owner)).map(|source| source.batch);
            rows.extend(batch.into_iter().flat_map(needed));
            for member in stream {
                if let Some(segments) = members.get_mut(*member) {
                    *segments = start..rows.len();
                }
            }
        }
        let all = Layout::new(rows.iter().map(|(sequence, needed)| (*sequence, needed.positions.as_slice())), align);
        let labelled = Layout::new(rows.iter().map(|(sequence, needed)| (*sequence, needed.labelled.as_slice())), align);
        let narrow = narrow(&all, &labelled);
        let mut level = Self {
            first_half,
            all: View { rows: all, origin: None },
            labelled: View { rows: labelled, origin: None },
            narrow,
            members,
            streams,
        };
        if let Some(below) = below {
            level.all.origin = Some(level.origin(&level.all.rows, below, &below.all.rows));
            level.labelled.origin = Some(level.origin(&level.labelled.rows, below, &below.labelled.rows));
        }
        level
    }

    /// Rows of the last layer above keys and values, or of any other place.
    pub(crate) fn view(&self, above_last_keys: bool) -> &View {
        if above_last_keys { &self.labelled } else { &self.all }
    }

    /// A member's segments.
    pub(crate) fn segments(&self, member: usize) -> Range<usize> {
        self.members.get(member).cloned().unwrap_or_default()
    }

    /// For each row of the level below, on which a member of the backward pass stands, its row in this level: the same row, since these
    /// members come first in both.
    pub(crate) fn descent(rows: &Layout) -> Vec<u32> {
        (0..rows.rows()).map(|row| if is_row(rows, row) { row as u32 } else { 0 }).collect()
    }

    /// For each row of `rows`, a layout of this level, its row in the same layout of the level below.
    fn origin(&self, rows: &Layout, below: &Level, below_rows: &Layout) -> Vec<u32> {
        let mut origin = vec![0; rows.rows()];
        for stream in &self.streams {
            let Some(&owner) = stream.first() else { continue };
            let (own, other) = (rows.segments().get(self.segments(owner)), below_rows.segments().get(below.segments(owner)));
            for (to, from) in own.into_iter().flatten().zip(other.into_iter().flatten()) {
                for (slot, row) in origin.iter_mut().skip(to.start).zip(from.start..from.start + from.rows) {
                    *slot = row as u32;
                }
            }
        }
        origin
    }

    /// One value a buffer row, taken from its sequence at its position; the default for padding.
    fn values<T: Copy + Default>(&self, rows: &Layout, sources: &[Source<'_>], list: impl Fn(&Sequence) -> &[T]) -> Vec<T> {
        let mut values = vec![T::default(); rows.rows()];
        for stream in &self.streams {
            let Some((owner, source)) = stream.first().and_then(|owner| Some((*owner, sources.get(*owner)?))) else { continue };
            for segment in rows.segments().get(self.segments(owner)).unwrap_or_default() {
                let Some(sequence) = source.batch.sequences.get(segment.sequence as usize) else { continue };
                let places = rows.positions().iter().zip(&mut values).skip(segment.start).take(segment.rows);
                for (position, value) in places {
                    *value = list(sequence).get(*position as usize).copied().unwrap_or_default();
                }
            }
        }
        values
    }
}

/// The order in which members enter a row map: training before evaluation, then by cut, bottom first.
pub(crate) fn order(trains: bool, cut: Stage) -> impl Ord {
    (!trains, cut)
}

/// The positions of one sequence that are computed, and those of its labelled rows.
struct Needed {
    positions: Vec<u32>,
    labelled: Vec<u32>,
}

/// The sequences of a batch that have labelled rows, by number. Rows after the last labelled one are seen by nobody.
fn needed(batch: &Batch) -> impl Iterator<Item = (u32, Needed)> {
    batch.sequences.iter().enumerate().filter_map(|(number, sequence)| {
        let labelled: Vec<u32> = (0..).zip(sequence.weights()).filter(|(_, weight)| **weight > 0.0).map(|(i, _)| i).collect();
        let last = *labelled.last()?;
        Some((number as u32, Needed { positions: (0..=last).collect(), labelled }))
    })
}

/// For each labelled row its row among all.
fn narrow(all: &Layout, labelled: &Layout) -> Vec<u32> {
    let mut index = vec![0; labelled.rows()];
    for (from, to) in all.segments().iter().zip(labelled.segments()) {
        let places = labelled.positions().iter().zip(&mut index).skip(to.start).take(to.rows);
        for (position, slot) in places {
            *slot = from.start as u32 + position;
        }
    }
    index
}

fn is_row(rows: &Layout, row: usize) -> bool {
    rows.positions().get(row).is_some_and(|position| *position != u32::MAX)
}

fn select(level: &Level, view: &View, chosen: impl Fn(usize) -> bool) -> Option<Layout> {
    let segments: Vec<Range<usize>> =
        (0..level.members.len()).filter(|member| chosen(*member)).map(|member| level.segments(member)).collect();
    let rows = view.rows.select(|segment| segments.iter().any(|range| range.contains(&segment)));
    rows.segments().iter().any(|segment| segment.rows > 0).then_some(rows)
}

/// Which members share rows in this half layer: those of one cohort with equal batches that are still below their cuts.
fn streams(sources: &[Source<'_>], half: usize) -> Vec<Vec<usize>> {
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
