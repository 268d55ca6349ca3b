//! Causal attention within each sequence, by blocks of queries.
//!
//! Never multiplies by a mask: keys that a query may not see get the weight 0 by selection. Never holds more scores than a block of
//! queries has.

use std::ops::Range;

use super::math::{exp, ln, max, sum, sum2, wide};
use super::matrix::{Mat, MatMut, Write, product, steps};
use super::workers::Workers;
use crate::{AttentionShape, Layout, Segment};

/// Queries whose scores exist at once.
const QUERIES: usize = 64;

/// What every pass over scores reads.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub(super) q_rows: &'a Layout,
    pub(super) kv_rows: &'a Layout,
    pub(super) shape: AttentionShape,
    pub(super) q: Mat<'a>,
    pub(super) k: Mat<'a>,
    pub(super) v: Mat<'a>,
}

/// One head of one sequence.
struct Head<'a> {
    q: Mat<'a>,
    k: Mat<'a>,
    v: Mat<'a>,
    positions: &'a [u32],
    window: Option<usize>,
    scale: f32,
}

fn range(segment: &Segment) -> Range<usize> {
    segment.start..segment.start + segment.rows
}

fn columns(head: usize, width: usize) -> Range<usize> {
    head * width..(head + 1) * width
}

fn split<'a>(matrix: MatMut<'a>, layout: &Layout) -> Vec<MatMut<'a>> {
    matrix.split_rows(&layout.segments().iter().map(range).collect::<Vec<_>>())
}

impl<'a> Operands<'a> {
    fn head(&self, segment: usize, head: usize) -> Head<'a> {
        let AttentionShape { heads, kv_heads, head_dim, window } = self.shape;
        let queries = range(&self.q_rows.segments()[segment]);
        let keys = range(&self.kv_rows.segments()[segment]);
        let kv_columns = columns(head / (heads / kv_heads), head_dim);
        Head {
            q: self.q.rows(queries.clone()).cols(columns(head, head_dim)),
            k: self.k.rows(keys.clone()).cols(kv_columns.clone()),
            v: self.v.rows(keys).cols(kv_columns),
            positions: &self.q_rows.positions()[queries],
            window,
            scale: 1.0 / (head_dim as f32).sqrt(),
        }
    }
}

impl Head<'_> {
    /// Keys that the query at this position sees.
    fn visible(&self, position: u32) -> Range<usize> {
        let end = position as usize + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Keys that some of these queries (positions ascend) see.
    fn block(&self, queries: &Range<usize>) -> Range<usize> {
        self.visible(self.positions[queries.start]).start..self.visible(self.positions[queries.end - 1]).end
    }

    /// Columns of the block's scores that query `query` sees.
    fn visible_in(&self, keys: &Range<usize>, query: usize) -> Range<usize> {
        let visible = self.visible(self.positions[query]);
        visible.start - keys.start..visible.end - keys.start
    }
}

/// out = softmax(scale q k^T) v; lse = ln(sum(exp(scale q k^T))).
pub(super) fn forward(workers: &Workers, operands: Operands<'_>, out: MatMut<'_>, lse: MatMut<'_>) {
    let head_dim = operands.shape.head_dim;
    let mut items = Vec::new();
    for (segment, (out, lse)) in split(out, operands.q_rows).into_iter().zip(split(lse, operands.q_rows)).enumerate() {
        let of_heads = out.split_cols(head_dim).into_iter().zip(lse.split_cols(1)).enumerate();
        items.extend(of_heads.map(|(head, ((_, out), (_, lse)))| (operands.head(segment, head), out, lse)));
    }
    workers.each(items, |(head, mut out, mut lse): (Head<'_>, MatMut<'_>, MatMut<'_>), scratch| {
        for queries in steps(head.positions.len(), QUERIES) {
            let keys = head.block(&queries);
            let [weights] = scratch.take([queries.len() * keys.len()]);
            let mut scores = MatMut::new(weights, queries.len(), keys.len());
            product(&mut scores, Write::Assign, head.scale, head.q.rows(queries.clone()), head.k.rows(keys.clone()).t());
            let mut out = out.rows(queries.clone());
            for (i, query) in queries.enumerate() {
                let visible = head.visible_in(&keys, query);
                let (row, out_lse) = (scores.row(i), lse.row(query));
                wide!(softmax(row, visible, &mut out_lse[0]));
            }
            let weights = Mat::new(weights, out.height(), keys.len());
            product(&mut out, Write::Assign, 1.0, weights, head.v.rows(keys));
        }
    });
}

/// Replaces scores by softmax over `visible` and by 0 elsewhere.
#[inline(always)]
fn softmax(row: &mut [f32], visible: Range<usize>, lse: &mut f32) {
    row[..visible.start].fill(0.0);
    row[visible.end..].fill(0.0);
    let row = &mut row[visible];
    let top = max(row);
    for x in &mut *row {
        *x = exp(*x - top);
    }
    let total = sum(row, |x| x) as f32;
    *lse = top + ln(total);
    let inverse = 1.0 / total;
    for x in row {
        *x *= inverse;
    }
}

/// What the backward pass reads besides.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a> {
    pub(super) out: Mat<'a>,
    pub(super) lse: Mat<'a>,
    pub(super) dout: Mat<'a>,
}

/// The gradients that one key head and its query heads receive.
struct Gradients<'a> {
    segment: usize,
    kv_head: usize,
    dq: MatMut<'a>,
    dk: MatMut<'a>,
    dv: MatMut<'a>,
}

/// dq, dk, dv = gradients of [`forward`]. dk and dv are summed over their query heads in order, then over blocks of queries in order.
pub(super) fn backward(workers: &Workers, operands: Operands<'_>, saved: Saved<'_>, dq: MatMut<'_>, dk: MatMut<'_>, dv: MatMut<'_>) {
    let AttentionShape { heads, kv_heads, head_dim, .. } = operands.shape;
    let group = heads / kv_heads;
    let keys = split(dk, operands.kv_rows).into_iter().zip(split(dv, operands.kv_rows));
    let mut items = Vec::new();
    for (segment, (dq, (dk, dv))) in split(dq, operands.q_rows).into_iter().zip(keys).enumerate() {
        let of_heads = dq.split_cols(group * head_dim).into_iter().zip(dk.split_cols(head_dim)).zip(dv.split_cols(head_dim)).enumerate();
        items.extend(of_heads.map(|(kv_head, (((_, dq), (_, dk)), (_, dv)))| Gradients { segment, kv_head, dq, dk, dv }));
    }
    workers.each(items, |mut gradients: Gradients<'_>, scratch| {
        gradients.dk.fill(0.0);
        gradients.dv.fill(0.0);
        let queries = range(&operands.q_rows.segments()[gradients.segment]);
        for member in 0..group {
            let number = gradients.kv_head * group + member;
            let head = operands.head(gradients.segment, number);
            let columns = columns(number, head_dim);
            let saved = Saved {
                out: saved.out.rows(queries.clone()).cols(columns.clone()),
                lse: saved.lse.rows(queries.clone()).cols(number..number + 1),
                dout: saved.dout.rows(queries.clone()).cols(columns),
            };
            for block in steps(head.positions.len(), QUERIES) {
                block_backward(&head, saved, block, member, &mut gradients, scratch);
            }
        }
    });
}

/// With p = exp(scale q k^T - lse): dv += p^T dout; ds = p (dout v^T - rowsum(dout out)) scale; dq = ds k; dk += ds^T q.
fn block_backward(
    head: &Head<'_>,
    saved: Saved<'_>,
    queries: Range<usize>,
    member: usize,
    gradients: &mut Gradients<'_>,
    scratch: &mut super::workers::Scratch,
) {
    let keys = head.block(&queries);
    let (height, width) = (queries.len(), keys.len());
    let [weights, dscores] = scratch.take([height * width, height * width]);
    let (q, k, dout) = (head.q.rows(queries.clone()), head.k.rows(keys.clone()), saved.dout.rows(queries.clone()));
    product(&mut MatMut::new(weights, height, width), Write::Assign, head.scale, q, k.t());
    product(&mut MatMut::new(dscores, height, width), Write::Assign, 1.0, dout, head.v.rows(keys.clone()).t());
    for (i, query) in queries.clone().enumerate() {
        let visible = head.visible_in(&keys, query);
        let (p, ds) = (&mut weights[columns(i, width)], &mut dscores[columns(i, width)]);
        wide!({
            let delta = sum2(saved.dout.row(query), saved.out.row(query), |dout, out| dout * out) as f32;
            let lse = saved.lse.row(query)[0];
            for row in [&mut *p, &mut *ds] {
                row[..visible.start].fill(0.0);
                row[visible.end..].fill(0.0);
            }
            for (p, ds) in p[visible.clone()].iter_mut().zip(&mut ds[visible]) {
                *p = exp(*p - lse);
                *ds = *p * (*ds - delta) * head.scale;
            }
        });
    }
    let (p, ds) = (Mat::new(weights, height, width), Mat::new(dscores, height, width));
    product(&mut gradients.dv.rows(keys.clone()), Write::Add, 1.0, p.t(), dout);
    product(&mut gradients.dk.rows(keys), Write::Add, 1.0, ds.t(), q);
    let head_dim = dout.width();
    let mut dq = gradients.dq.rows(queries).into_cols(columns(member, head_dim));
    product(&mut dq, Write::Assign, 1.0, ds, k);
}
