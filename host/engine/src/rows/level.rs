//! One level of a pass: the rows of some consecutive half layers, and which member's they are.
//!
//! Never computes: layouts and indices.

use std::ops::Range;
use std::rc::Rc;

use nodus_kernels::Layout;
use nodus_protocol::Sequence;

use super::source::{Needed, Source, needed};

/// Rows in a buffer, and where they come from at a fan-out.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) rows: Layout,
    /// For each buffer row the row of the level below that it continues; none where the level below is the embedding.
    pub(crate) origin: Option<Rc<Vec<u32>>>,
}

impl View {
    /// For each buffer row the row of the level below that it continues.
    pub(crate) fn origin(&self) -> &[u32] {
        self.origin.as_ref().map_or(&[], |origin| origin.as_slice())
    }
}

/// The streams of some consecutive half layers: blocks of rows, each of one member above its cut or of several below theirs.
///
/// At one half layer two levels may begin: one in which rows come in that were at hand, then one in which streams fan out.
#[derive(Debug)]
pub(crate) struct Level {
    pub(super) first_half: usize,
    /// Every row that a labelled row of its sequence can see. Sequences without labelled rows have none, nor have those that come in higher up.
    pub(crate) all: View,
    /// The labelled rows, for the last layer above keys and values; segments correspond to those of `all`.
    pub(crate) labelled: View,
    /// For each row of `labelled` its row in `all`.
    pub(crate) narrow: Vec<u32>,
    /// Each member's segments. Members of one stream have the same.
    pub(super) members: Vec<Range<usize>>,
    pub(super) streams: Vec<Vec<usize>>,
}

impl Level {
    pub(super) fn new(sources: &[Source<'_>], streams: Vec<Vec<usize>>, first_half: usize, below: Option<&Level>, align: usize) -> Self {
        let mut members = vec![0..0; sources.len()];
        let mut rows: Vec<(u32, Needed)> = Vec::new();
        for stream in &streams {
            let start = rows.len();
            let batch = stream.first().and_then(|owner| sources.get(*owner)).map(|source| source.batch);
            rows.extend(batch.into_iter().flat_map(needed).map(|(number, needed)| {
                let here = stream.iter().filter_map(|member| sources.get(*member)).any(|source| source.is_in(number, first_half));
                (number, if here { needed } else { Needed::default() })
            }));
            for member in stream {
                if let Some(segments) = members.get_mut(*member) {
                    *segments = start..rows.len();
                }
            }
        }
        let positions: Vec<u32> = (0..rows.iter().map(|(_, needed)| needed.rows as u32).max().unwrap_or(0)).collect();
        let first = |rows| positions.get(..rows).unwrap_or_default();
        let all = Layout::new(rows.iter().map(|(sequence, needed)| (*sequence, first(needed.rows))), align);
        // Most often every row is labelled. A device knows a clone again, and so does a layer that would copy rows to where they stand.
        let labelled = match rows.iter().all(|(_, needed)| needed.labelled.len() == needed.rows) {
            true => all.clone(),
            false => Layout::new(rows.iter().map(|(sequence, needed)| (*sequence, needed.labelled.as_slice())), align),
        };
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
            let origin = Rc::new(level.origin(&level.all.rows, below, &below.all.rows));
            level.labelled.origin = Some(match level.is_all_labelled() && below.is_all_labelled() {
                true => Rc::clone(&origin),
                false => Rc::new(level.origin(&level.labelled.rows, below, &below.labelled.rows)),
            });
            level.all.origin = Some(origin);
        }
        level
    }

    pub(super) fn equals(&self, other: &Self) -> bool {
        self.streams == other.streams && self.all.rows == other.all.rows
    }

    /// Whether the sequence of this segment has rows here.
    pub(super) fn has(&self, segment: usize) -> bool {
        self.all.rows.segments().get(segment).is_some_and(|segment| segment.rows > 0)
    }

    /// Whether every row is labelled, so that both views have the same rows.
    pub(crate) fn is_all_labelled(&self) -> bool {
        self.labelled.rows.is_clone_of(&self.all.rows)
    }

    /// The rows of a view of this level that are in the level below too.
    pub(crate) fn going_on(&self, view: &View, below: &Level) -> Option<Layout> {
        let rows = view.rows.select(|segment| below.has(segment));
        below.all.rows.segments().iter().any(|segment| segment.rows > 0).then_some(rows)
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
        rows.positions().iter().zip(0..).map(|(position, row)| if *position == u32::MAX { 0 } else { row }).collect()
    }

    /// For each row of `rows`, a layout of this level, its row in the same layout of the level below.
    fn origin(&self, rows: &Layout, below: &Level, below_rows: &Layout) -> Vec<u32> {
        let mut origin = vec![0; rows.rows()];
        for stream in &self.streams {
            let Some(&owner) = stream.first() else { continue };
            let (own, other) = (rows.segments().get(self.segments(owner)), below_rows.segments().get(below.segments(owner)));
            for (to, from) in own.into_iter().flatten().zip(other.into_iter().flatten()) {
                let places = origin.get_mut(to.start..to.start + to.rows).unwrap_or_default();
                places.iter_mut().zip(from.start as u32..).for_each(|(place, row)| *place = row);
            }
        }
        origin
    }

    /// One value a buffer row, taken from its sequence at its position; the default for padding.
    pub(super) fn values<T: Copy + Default>(&self, rows: &Layout, sources: &[Source<'_>], list: impl Fn(&Sequence) -> &[T]) -> Vec<T> {
        let mut values = vec![T::default(); rows.rows()];
        for stream in &self.streams {
            let Some((owner, source)) = stream.first().and_then(|owner| Some((*owner, sources.get(*owner)?))) else { continue };
            for segment in rows.segments().get(self.segments(owner)).unwrap_or_default() {
                let Some(sequence) = source.batch.sequences.get(segment.sequence as usize) else { continue };
                let here = segment.start..segment.start + segment.rows;
                let (Some(positions), Some(places)) = (rows.positions().get(here.clone()), values.get_mut(here)) else { continue };
                let list = list(sequence);
                match neighbours(positions).and_then(|range| list.get(range)) {
                    Some(all) => places.copy_from_slice(all),
                    None => {
                        let value = |position: &u32| list.get(*position as usize).copied().unwrap_or_default();
                        places.iter_mut().zip(positions).for_each(|(place, position)| *place = value(position));
                    }
                }
            }
        }
        values
    }
}

/// For each labelled row its row among all.
fn narrow(all: &Layout, labelled: &Layout) -> Vec<u32> {
    let mut index = vec![0; labelled.rows()];
    for (from, to) in all.segments().iter().zip(labelled.segments()) {
        let here = to.start..to.start + to.rows;
        let (Some(positions), Some(places)) = (labelled.positions().get(here.clone()), index.get_mut(here)) else { continue };
        places.iter_mut().zip(positions).for_each(|(place, position)| *place = from.start as u32 + position);
    }
    index
}

/// The range that ascending positions fill, where they leave none out.
fn neighbours(positions: &[u32]) -> Option<Range<usize>> {
    let range = *positions.first()? as usize..*positions.last()? as usize + 1;
    (range.len() == positions.len()).then_some(range)
}

pub(super) fn select(level: &Level, view: &View, chosen: impl Fn(usize) -> bool) -> Option<Layout> {
    let segments: Vec<Range<usize>> =
        (0..level.members.len()).filter(|member| chosen(*member)).map(|member| level.segments(member)).collect();
    let rows = view.rows.select(|segment| segments.iter().any(|range| range.contains(&segment)));
    rows.segments().iter().any(|segment| segment.rows > 0).then_some(rows)
}
