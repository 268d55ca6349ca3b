//! What the kernels must know of a layout, in device memory: positions, and what attention walks over; kept for a pass.
//!
//! Never looks at whose rows they are.

use std::cmp::Reverse;
use std::ops::Range;

use super::ROW_ALIGN;
use super::device::CudaDevice;
use super::driver::Address;
use crate::{DeviceError, Layout, Segment};

/// `Span` of attention.cuh: up to 128 rows of a sequence's queries or keys, and its rows of the other kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::NoUninit)]
pub(crate) struct Span {
    row: u32,
    valid: u32,
    before: u32,
    rows: u32,
    other: u32,
    others: u32,
    zero: [u32; 2],
}

/// Where the spans of queries and of keys are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spans {
    pub(crate) queries: Address,
    pub(crate) keys: Address,
}

/// The tables of the layouts of a pass.
#[derive(Debug, Default)]
pub(crate) struct TableCache {
    positions: Vec<(Layout, Address)>,
    spans: Vec<([Layout; 2], Spans)>,
}

impl TableCache {
    /// Forgets them: their places are going to be used again.
    pub(crate) fn clear(&mut self) {
        self.positions.clear();
        self.spans.clear();
    }

    pub(crate) fn positions(&self, layout: &Layout) -> Option<Address> {
        self.positions.iter().rev().find(|(kept, _)| kept.is_clone_of(layout)).map(|(_, positions)| *positions)
    }

    pub(crate) fn spans(&self, [queries, keys]: [&Layout; 2]) -> Option<Spans> {
        let is = |kept: &[Layout; 2]| kept[0].is_clone_of(queries) && kept[1].is_clone_of(keys);
        self.spans.iter().rev().find(|(kept, _)| is(kept)).map(|(_, spans)| *spans)
    }

    pub(crate) fn keep_positions(&mut self, layout: &Layout, positions: Address) {
        self.positions.push((layout.clone(), positions));
    }

    pub(crate) fn keep_spans(&mut self, layouts: [&Layout; 2], spans: Spans) {
        self.spans.push((layouts.map(Layout::clone), spans));
    }
}

/// Spans of queries and of keys. Their order is that in which blocks begin: first those that take longest, or cards would wait for the last ones.
fn spans(queries: &Layout, keys: &Layout) -> [Vec<Span>; 2] {
    let positions = |segment: &Segment| &queries.positions()[segment.start..segment.start + segment.rows];
    // A query sees all keys up to its position; a key is seen by all queries from its position on.
    let of_queries = list(queries, keys, |segment, _, rows| positions(segment)[rows.end - 1] as usize);
    let of_keys =
        list(keys, queries, |_, queries, rows| queries.rows - positions(queries).partition_point(|at| (*at as usize) < rows.start));
    [of_queries, of_keys]
}

/// Spans of `own`, first those with most `work` (a segment, that of the other kind, and rows of the segment). There are as many as tiles, whatever is padding, so
/// that launches over them are the same; the last may be empty.
fn list(own: &Layout, other: &Layout, work: impl Fn(&Segment, &Segment, Range<usize>) -> usize) -> Vec<Span> {
    let mut list = Vec::with_capacity(own.rows() / ROW_ALIGN);
    for (segment, others) in own.segments().iter().zip(other.segments()) {
        assert!(
            segment.start.is_multiple_of(ROW_ALIGN),
            "a segment starts at row {}; a multiple of {ROW_ALIGN} was expected",
            segment.start
        );
        for before in (0..segment.rows).step_by(ROW_ALIGN) {
            let valid = (segment.rows - before).min(ROW_ALIGN);
            let span = Span {
                row: (segment.start + before) as u32,
                valid: valid as u32,
                before: before as u32,
                rows: segment.rows as u32,
                other: others.start as u32,
                others: others.rows as u32,
                zero: [0; 2],
            };
            list.push((work(segment, others, before..before + valid), span));
        }
    }
    list.sort_by_key(|(work, _)| Reverse(*work));
    let mut list: Vec<_> = list.into_iter().map(|(_, span)| span).collect();
    list.resize(own.rows() / ROW_ALIGN, Span::default());
    list
}

impl CudaDevice {
    /// Puts a table where the operation that is launched next finds it.
    pub(super) fn table<T: bytemuck::NoUninit>(&mut self, data: &[T]) -> Result<Address, DeviceError> {
        let data: &[u8] = bytemuck::cast_slice(data);
        self.make_room(data.len())?;
        self.staging.table(data)
    }

    /// Where a layout's positions are: a u32 a row, `u32::MAX` for padding.
    pub(super) fn positions(&mut self, layout: &Layout) -> Result<Address, DeviceError> {
        if let Some(positions) = self.tables.positions(layout) {
            return Ok(positions);
        }
        let rows = layout.rows();
        assert!(rows.is_multiple_of(ROW_ALIGN) && i32::try_from(rows).is_ok(), "{rows} rows; a multiple of {ROW_ALIGN} was expected");
        let positions = self.table(layout.positions())?;
        if self.recorder.is_open() {
            self.tables.keep_positions(layout, positions);
        }
        Ok(positions)
    }

    /// Where the spans are that attention of these queries and keys walks over.
    pub(super) fn spans(&mut self, queries: &Layout, keys: &Layout) -> Result<Spans, DeviceError> {
        if let Some(spans) = self.tables.spans([queries, keys]) {
            return Ok(spans);
        }
        let [of_queries, of_keys] = spans(queries, keys);
        let spans = Spans { queries: self.table(&of_queries)?, keys: self.table(&of_keys)? };
        if self.recorder.is_open() {
            self.tables.keep_spans([queries, keys], spans);
        }
        Ok(spans)
    }

    /// Outside a pass, tables start again where they would end. Those of the operation at hand are sent before; they stand behind and stay: an operation's
    /// tables are less than half of all.
    fn make_room(&mut self, bytes: usize) -> Result<(), DeviceError> {
        if !self.recorder.is_open() && !self.staging.has_room(bytes) {
            self.staging.send_tables()?;
            self.staging.restart_tables()?;
        }
        Ok(())
    }
}

/// The rows of a layout in tiles of 128, as the fewest runs of tiles that hold any row. Tiles of padding alone lie in no run: they may be
/// another pass's rows.
pub(crate) fn runs(layout: &Layout) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for segment in layout.segments().iter().filter(|segment| segment.rows > 0) {
        let end = (segment.start + segment.rows).next_multiple_of(ROW_ALIGN);
        match runs.last_mut() {
            Some(run) if run.end == segment.start => run.end = end,
            _ => runs.push(segment.start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::{runs, spans};
    use crate::Layout;

    #[test]
    fn tiles_of_padding_alone_are_in_no_run() {
        let positions: Vec<u32> = (0..300).collect();
        let layout = Layout::new([(0, &positions[..130]), (1, &positions[..0]), (2, &positions[..128]), (3, &positions[..1])], 128);
        assert_eq!(runs(&layout).as_slice(), std::slice::from_ref(&(0..512)));
        let some = layout.select(|segment| segment == 0 || segment == 3);
        assert_eq!(runs(&some), [0..256, 384..512]);
        assert_eq!(runs(&layout.select(|_| false)), []);
    }

    #[test]
    fn spans_with_most_to_do_come_first() {
        let positions: Vec<u32> = (0..300).collect();
        let keys = Layout::new([(0, &positions[..130]), (1, &positions[..0]), (2, &positions[..300])], 128);
        // Row, rows, rows before, rows in all; the other kind's first, and how many.
        let words =
            |spans: Vec<super::Span>| spans.iter().map(|s| [s.row, s.valid, s.before, s.rows, s.other, s.others]).collect::<Vec<_>>();
        let [of_queries, of_keys] = spans(&keys, &keys).map(words);
        let [a, b, c, d, e] = [
            [0, 128, 0, 130, 0, 130],
            [128, 2, 128, 130, 0, 130],
            [256, 128, 0, 300, 256, 300],
            [384, 128, 128, 300, 256, 300],
            [512, 44, 256, 300, 256, 300],
        ];
        assert_eq!(of_queries, [e, d, b, a, c], "the last query sees 300, 256, 130, 128, 128 keys");
        assert_eq!(of_keys, [c, d, a, e, b], "the first key is seen by 300, 172, 130, 44, 2 queries");

        let [of_queries, of_keys] = spans(&keys.select(|segment| segment == 0), &keys.select(|segment| segment == 0)).map(words);
        assert_eq!(of_queries, [b, a, [0; 6], [0; 6], [0; 6]], "as many as before");
        assert_eq!(of_keys, [a, b, [0; 6], [0; 6], [0; 6]]);

        let few = Layout::new([(0, &positions[5..5]), (1, &positions[..0]), (2, &positions[130..140])], 128);
        let [of_queries, of_keys] = spans(&few, &keys).map(words);
        assert_eq!(of_queries, [[0, 10, 0, 10, 256, 300]]);
        assert_eq!(
            of_keys.iter().map(|span| span[0]).collect::<Vec<_>>(),
            [256, 384, 0, 128, 512],
            "10 see the first two of the last sequence"
        );
    }
}
