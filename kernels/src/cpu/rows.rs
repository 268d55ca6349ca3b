//! Operations in which every row stands for itself: embedding, norms, rotation, SwiGLU, sums and moves of rows.
//!
//! Never lets a row see another one; padding rows are neither read nor written.

use std::ops::Range;

use super::math::{exp, sum, sum3, wide};
use super::matrix::{Mat, MatMut};
use super::workers::Workers;
use crate::Layout;

/// Rows of one work item.
const ROWS: usize = 16;
/// Columns of one work item where rows move between buffers.
const COLUMNS: usize = 128;

/// Ranges of buffer rows, each of at most `step` rows of one segment, ascending.
pub(super) fn pieces(layout: &Layout, step: usize) -> Vec<Range<usize>> {
    let of_segment = |s: &crate::Segment| {
        let (start, end) = (s.start, s.start + s.rows);
        (start..end).step_by(step).map(move |first| first..end.min(first + step))
    };
    layout.segments().iter().flat_map(of_segment).collect()
}

/// The buffer rows that are not padding.
pub(super) fn live(layout: &Layout) -> impl Iterator<Item = usize> {
    layout.segments().iter().flat_map(|s| s.start..s.start + s.rows)
}

/// out\[r\] = table\[tokens\[r\]\]
pub(super) fn embed(workers: &Workers, layout: &Layout, tokens: &[u32], table: Mat<'_>, out: MatMut<'_>) {
    let pieces = pieces(layout, ROWS);
    let items = pieces.iter().cloned().zip(out.split_rows(&pieces)).collect();
    workers.each(items, |(rows, mut out): (Range<usize>, MatMut<'_>), _| {
        for (i, row) in rows.enumerate() {
            out.row(i).copy_from_slice(table.row(tokens[row] as usize));
        }
    });
}

/// out = x / sqrt(mean(x^2) + eps) * weight, for each part of a row as wide as `weight`.
pub(super) fn rms_norm(workers: &Workers, layout: &Layout, x: Mat<'_>, weight: &[f32], eps: f32, out: MatMut<'_>) {
    let pieces = pieces(layout, ROWS);
    let items = pieces.iter().cloned().zip(out.split_rows(&pieces)).collect();
    workers.each(items, |(rows, mut out): (Range<usize>, MatMut<'_>), _| {
        wide!({
            for (i, row) in rows.enumerate() {
                for (x, out) in x.row(row).chunks_exact(weight.len()).zip(out.row(i).chunks_exact_mut(weight.len())) {
                    let r = inverse_rms(x, eps);
                    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                        *out = x * r * w;
                    }
                }
            }
        });
    });
}

/// With r = 1 / sqrt(mean(x^2) + eps) and g = dy * weight: dx (=, +=) r (g - x r mean(g x r)).
#[expect(clippy::too_many_arguments, reason = "one argument an operand")]
pub(super) fn rms_norm_backward(
    workers: &Workers,
    layout: &Layout,
    dy: Mat<'_>,
    x: Mat<'_>,
    weight: &[f32],
    eps: f32,
    dx: MatMut<'_>,
    accumulate: bool,
) {
    let pieces = pieces(layout, ROWS);
    let items = pieces.iter().cloned().zip(dx.split_rows(&pieces)).collect();
    let width = weight.len();
    workers.each(items, |(rows, mut dx): (Range<usize>, MatMut<'_>), _| {
        wide!({
            for (i, row) in rows.enumerate() {
                let parts = x.row(row).chunks_exact(width).zip(dy.row(row).chunks_exact(width));
                for ((x, dy), dx) in parts.zip(dx.row(i).chunks_exact_mut(width)) {
                    let r = inverse_rms(x, eps);
                    let c = (sum3(dy, weight, x, |dy, w, x| dy * w * (x * r)) / width as f64) as f32;
                    for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                        let d = r * (dy * w - x * r * c);
                        *dx = if accumulate { *dx + d } else { d };
                    }
                }
            }
        });
    });
}

#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = (sum(x, |x| x * x) / x.len() as f64) as f32;
    1.0 / (mean + eps).sqrt()
}

/// Rotates the halves of each head by its row's position; see the trait.
pub(super) fn rope(workers: &Workers, layout: &Layout, head_dim: usize, table: Mat<'_>, x: MatMut<'_>, inverse: bool) {
    let pieces = pieces(layout, ROWS);
    let items = pieces.iter().cloned().zip(x.split_rows(&pieces)).collect();
    let half = head_dim / 2;
    workers.each(items, |(rows, mut x): (Range<usize>, MatMut<'_>), _| {
        wide!({
            for (i, row) in rows.enumerate() {
                let (cos, sin) = table.row(layout.positions()[row] as usize).split_at(half);
                for head in x.row(i).chunks_exact_mut(head_dim) {
                    let (a, b) = head.split_at_mut(half);
                    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                        let sin = if inverse { -sin } else { *sin };
                        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                    }
                }
            }
        });
    });
}

/// out = silu(gate) * up, silu(g) = g / (1 + exp(-g)).
pub(super) fn swiglu(workers: &Workers, layout: &Layout, gate: Mat<'_>, up: Mat<'_>, out: MatMut<'_>) {
    let pieces = pieces(layout, ROWS);
    let items = pieces.iter().cloned().zip(out.split_rows(&pieces)).collect();
    workers.each(items, |(rows, mut out): (Range<usize>, MatMut<'_>), _| {
        wide!({
            for (i, row) in rows.enumerate() {
                for ((out, g), u) in out.row(i).iter_mut().zip(gate.row(row)).zip(up.row(row)) {
                    *out = g / (1.0 + exp(-g)) * u;
                }
            }
        });
    });
}

/// With s = 1 / (1 + exp(-gate)): dup = dy gate s; dgate = dy up s (1 + gate (1 - s)).
pub(super) fn swiglu_backward(
    workers: &Workers,
    layout: &Layout,
    dy: Mat<'_>,
    gate: Mat<'_>,
    up: Mat<'_>,
    dgate: MatMut<'_>,
    dup: MatMut<'_>,
) {
    let pieces = pieces(layout, ROWS);
    let outs = dgate.split_rows(&pieces).into_iter().zip(dup.split_rows(&pieces));
    workers.each(
        pieces.iter().cloned().zip(outs).collect(),
        |(rows, (mut dgate, mut dup)): (Range<usize>, (MatMut<'_>, MatMut<'_>)), _| {
            wide!({
                for (i, row) in rows.enumerate() {
                    let outs = dgate.row(i).iter_mut().zip(dup.row(i));
                    for (((outs, dy), g), u) in outs.zip(dy.row(row)).zip(gate.row(row)).zip(up.row(row)) {
                        let s = 1.0 / (1.0 + exp(-g));
                        *outs.0 = dy * u * s * (1.0 + g * (1.0 - s));
                        *outs.1 = dy * g * s;
                    }
                }
            });
        },
    );
}

/// y += x
pub(super) fn add(workers: &Workers, layout: &Layout, x: Mat<'_>, y: MatMut<'_>) {
    let pieces = pieces(layout, ROWS);
    let items = pieces.iter().cloned().zip(y.split_rows(&pieces)).collect();
    workers.each(items, |(rows, mut y): (Range<usize>, MatMut<'_>), _| {
        for (i, row) in rows.enumerate() {
            add_row(x.row(row), y.row(i));
            // Broken on purpose: the last row of a sequence leaks into the first of the next.
            #[cfg(feature = "broken-row-leak")]
            if row > 0 && layout.segments().iter().any(|segment| segment.start == row) {
                add_row(x.row(row - 1), y.row(i));
            }
        }
    });
}

/// out\[r\] = x\[index\[r\]\]
pub(super) fn gather(workers: &Workers, layout: &Layout, index: &[u32], x: Mat<'_>, out: MatMut<'_>) {
    embed(workers, layout, index, x, out);
}

/// y\[index\[r\]\] += x\[r\]
pub(super) fn scatter_add(workers: &Workers, layout: &Layout, index: &[u32], x: Mat<'_>, y: MatMut<'_>) {
    workers.each(y.split_cols(COLUMNS), |(cols, mut y), _| {
        let x = x.cols(cols);
        for row in live(layout) {
            add_row(x.row(row), y.row(index[row] as usize));
        }
    });
}

fn add_row(x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}
