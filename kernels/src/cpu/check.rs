//! Shapes that a caller owes, held at the entry of every operation.
//!
//! Never returns an error: a wrong shape is a fault of the engine, so it panics with what was expected.

use super::buffer::CpuBuffer;
use super::matrix::{Mat, MatMut};
use super::rows;
use super::weight::CpuWeight;
use crate::{AttentionShape, Layout, LoraRows, LoraSite};

/// The rows of a buffer of this width over the layout.
pub(super) fn read<'a>(what: &str, buffer: &'a CpuBuffer, rows: usize, width: usize) -> Mat<'a> {
    check(what, buffer, rows, width);
    Mat::new(&buffer.data, rows, width)
}

pub(super) fn write<'a>(what: &str, buffer: &'a mut CpuBuffer, rows: usize, width: usize) -> MatMut<'a> {
    check(what, buffer, rows, width);
    MatMut::new(&mut buffer.data, rows, width)
}

fn check(what: &str, buffer: &CpuBuffer, rows: usize, width: usize) {
    let len = buffer.data.len();
    assert!(rows.checked_mul(width) == Some(len), "{what} has {len} elements; {rows} rows of width {width} were expected");
}

/// The width of a buffer over the layout.
pub(super) fn width(what: &str, buffer: &CpuBuffer, layout: &Layout) -> usize {
    let (len, rows) = (buffer.data.len(), layout.rows());
    let width = len.checked_div(rows).unwrap_or_default();
    assert!(width * rows == len, "{what} has {len} elements, no multiple of {rows} rows");
    width
}

pub(super) fn matrix(weight: &CpuWeight) -> Mat<'_> {
    let (outputs, inputs) = weight.matrix();
    Mat::new(weight.data(), outputs, inputs)
}

/// Checks that the entries of `index` for rows that are not padding lie below `bound`.
pub(super) fn check_index(what: &str, layout: &Layout, index: &[u32], bound: usize) {
    let rows = layout.rows();
    assert!(index.len() == rows, "{what} has {} entries; one for each of {rows} rows was expected", index.len());
    for row in rows::live(layout) {
        assert!((index[row] as usize) < bound, "{what}[{row}] is {}, not below {bound}", index[row]);
    }
}

/// Checks a group's site on a module of a call.
pub(super) fn check_module(
    layout: &Layout,
    group: &LoraRows<'_, CpuBuffer>,
    number: usize,
    (inputs, outputs): (usize, usize),
    s_width: usize,
) {
    let Some(LoraSite { module: m, .. }) = group.sites[number] else { return };
    let len = group.params.data.len();
    assert!(group.segments.end <= layout.segments().len(), "segments {:?} of {}", group.segments, layout.segments().len());
    assert!(m.inputs == inputs && m.outputs == outputs, "a module of {} -> {} on x of {inputs}, y of {outputs}", m.inputs, m.outputs);
    assert!(m.rank > 0 && m.rank <= s_width, "rank {} does not fit s of width {s_width}", m.rank);
    let inside = m.a + m.rank * inputs <= len && m.b + outputs * m.rank <= len;
    assert!(inside, "A at {} and B at {} do not lie inside {len} parameters", m.a, m.b);
}

pub(super) fn check_attention(q_rows: &Layout, kv_rows: &Layout, shape: AttentionShape) {
    let AttentionShape { heads, kv_heads, head_dim, window } = shape;
    assert!(heads > 0 && kv_heads > 0 && head_dim > 0 && heads.is_multiple_of(kv_heads), "no attention: {shape:?}");
    assert!(window != Some(0), "a window holds at least the row itself");
    assert!(q_rows.segments().len() == kv_rows.segments().len(), "queries and keys are not of the same sequences");
    for (q, kv) in q_rows.segments().iter().zip(kv_rows.segments()) {
        let keys = &kv_rows.positions()[kv.start..kv.start + kv.rows];
        assert!(keys.iter().enumerate().all(|(i, p)| *p as usize == i), "a key segment lacks positions of its sequence");
        let queries = &q_rows.positions()[q.start..q.start + q.rows];
        assert!(queries.iter().all(|p| (*p as usize) < kv.rows), "a query has no key of its own position");
        assert!(queries.is_sorted(), "positions of a segment ascend");
    }
}
