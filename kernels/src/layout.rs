//! Which rows of a buffer belong to which sequence, and where in its sequence each row stands.
//!
//! Never knows whose sequence it is.

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    segments: Vec<Segment>,
    positions: Vec<u32>,
}

impl Layout {
    /// A layout of sequences, each given by its number and by the positions (0, 1, ...; ascending) of those of its tokens that
    /// have a row. `align` is the device's [`crate::Device::row_align`].
    ///
    /// Sequences without rows keep an empty segment, so that layouts of one pass correspond segment by segment.
    #[must_use]
    pub fn new<'a>(sequences: impl IntoIterator<Item = (u32, &'a [u32])>, align: usize) -> Self {
        let mut layout = Self { segments: Vec::new(), positions: Vec::new() };
        for (sequence, positions) in sequences {
            let start = layout.positions.len();
            layout.segments.push(Segment { start, rows: positions.len(), sequence });
            layout.positions.extend_from_slice(positions);
            layout.positions.resize(start + positions.len().next_multiple_of(align), u32::MAX);
        }
        layout
    }

    /// The segments, in order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Number of buffer rows, padding included.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.positions.len()
    }

    /// For each buffer row its position in its sequence; `u32::MAX` for padding.
    #[must_use]
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }
}
