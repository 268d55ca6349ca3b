//! Which rows of a buffer belong to which sequence, and where in its sequence each row stands.
//!
//! Never knows whose sequence it is.

use std::sync::Arc;

/// The rows of one sequence in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First buffer row; a multiple of the layout's alignment.
    pub start: usize,
    /// Number of rows; the rest up to the next multiple of the alignment is padding that no operation reads or writes.
    pub rows: usize,
    /// The sequence's number in its batch (dropout draws by it).
    pub sequence: u32,
}

/// The rows of a pass in a buffer: one segment a sequence, in order, each starting at a multiple of the device's alignment.
///
/// Cloning shares it: a device keeps what it derived from a layout, and knows a clone again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout(Arc<Rows>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rows {
    segments: Vec<Segment>,
    positions: Vec<u32>,
    last_position: Option<u32>,
}

impl Layout {
    /// A layout of sequences, each given by its number and by the positions (0, 1, ...; ascending) of those of its tokens that
    /// have a row. `align` is the device's [`crate::Device::row_align`].
    ///
    /// Sequences without rows keep an empty segment, so that layouts of one pass correspond segment by segment.
    #[must_use]
    pub fn new<'a>(sequences: impl IntoIterator<Item = (u32, &'a [u32])>, align: usize) -> Self {
        let sequences: Vec<(u32, &[u32])> = sequences.into_iter().collect();
        let rows = sequences.iter().map(|(_, positions)| positions.len().next_multiple_of(align)).sum();
        let mut layout = Rows { segments: Vec::with_capacity(sequences.len()), positions: Vec::with_capacity(rows), last_position: None };
        for (sequence, positions) in sequences {
            let start = layout.positions.len();
            layout.segments.push(Segment { start, rows: positions.len(), sequence });
            layout.last_position = layout.last_position.max(positions.last().copied());
            layout.positions.extend_from_slice(positions);
            layout.positions.resize(start + positions.len().next_multiple_of(align), u32::MAX);
        }
        Self(Arc::new(layout))
    }

    /// The same buffer rows, of which only those of the chosen segments are still rows: every other segment is empty and its rows are
    /// padding. An operation over it leaves the rows of the others alone.
    #[must_use]
    pub fn select(&self, mut chosen: impl FnMut(usize) -> bool) -> Self {
        let mut selected = (*self.0).clone();
        for (i, segment) in selected.segments.iter_mut().enumerate() {
            if !chosen(i) {
                selected.positions[segment.start..segment.start + segment.rows].fill(u32::MAX);
                segment.rows = 0;
            }
        }
        Self(Arc::new(selected))
    }

    /// The segments, in order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.0.segments
    }

    /// Number of buffer rows, padding included.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.0.positions.len()
    }

    /// For each buffer row its position in its sequence; `u32::MAX` for padding.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.0.positions
    }

    /// The largest position of any row, also of rows that [`Layout::select`] left out; none where there never was a row.
    #[must_use]
    pub fn last_position(&self) -> Option<u32> {
        self.0.last_position
    }

    /// Whether this is a clone of the other.
    #[must_use]
    pub fn is_clone_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
