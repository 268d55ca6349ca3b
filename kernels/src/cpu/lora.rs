//! Low-rank adapters: grouped forward and backward, with dropout on the module's input.
//!
//! Never adds two adapters into one sum; never mixes rows of two sequences but in the gradient of the adapter that owns both, in
//! segment order.

use std::ops::Range;

use super::buffer::CpuBuffer;
use super::matrix::{Mat, MatMut, Write, product, steps};
use super::workers::Workers;
use crate::{Dropout, Layout, LoraGrads, LoraModule, LoraRows, LoraSite, Segment, philox, uniform};

/// Rows of one work item that computes rows.
const ROWS: usize = 128;
/// Columns of A or rows of B of one work item that computes gradients.
const WIDTH: usize = 192;

/// Some rows of one sequence of one group, on one module.
#[derive(Clone)]
struct Piece<'a> {
    module: LoraModule,
    dropout: Option<Dropout>,
    params: &'a [f32],
    sequence: u32,
    rows: Range<usize>,
    wants_dx: bool,
}

impl<'a> Piece<'a> {
    /// The rows of a group in pieces; none where it has no site on the module.
    fn of_group(layout: &Layout, group: &LoraRows<'a, CpuBuffer>, number: usize, wants_dx: bool) -> Vec<Self> {
        let Some(LoraSite { module, dropout }) = group.sites[number] else { return Vec::new() };
        let params = group.params.data.as_slice();
        let of_segment = |s: &Segment| {
            let (start, sequence) = (s.start, s.sequence);
            steps(s.rows, ROWS).map(move |r| Self { module, dropout, params, sequence, rows: start + r.start..start + r.end, wants_dx })
        };
        layout.segments()[group.segments.clone()].iter().flat_map(of_segment).collect()
    }

    fn a(&self) -> Mat<'a> {
        Mat::new(&self.params[self.module.a..][..self.module.rank * self.module.inputs], self.module.rank, self.module.inputs)
    }

    fn b(&self) -> Mat<'a> {
        Mat::new(&self.params[self.module.b..][..self.module.outputs * self.module.rank], self.module.outputs, self.module.rank)
    }
}

/// Pieces of all groups by ascending rows, with the rows.
fn sorted<'a>(groups: impl Iterator<Item = Vec<Piece<'a>>>) -> (Vec<Piece<'a>>, Vec<Range<usize>>) {
    let mut pieces: Vec<_> = groups.flatten().collect();
    pieces.sort_by_key(|piece| piece.rows.start);
    let rows = pieces.iter().map(|piece| piece.rows.clone()).collect();
    (pieces, rows)
}

/// s = dropout(x) A^T; y += scale s B^T, on one module of the call.
pub(super) fn forward(
    workers: &Workers,
    layout: &Layout,
    groups: &[LoraRows<'_, CpuBuffer>],
    number: usize,
    x: Mat<'_>,
    s: MatMut<'_>,
    y: MatMut<'_>,
) {
    let (pieces, rows) = sorted(groups.iter().map(|group| Piece::of_group(layout, group, number, false)));
    let outs = s.split_rows(&rows).into_iter().zip(y.split_rows(&rows));
    workers.each(pieces.into_iter().zip(outs).collect(), |(piece, (s, mut y)): (Piece<'_>, (MatMut<'_>, MatMut<'_>)), scratch| {
        let mut s = s.into_cols(0..piece.module.rank);
        let [space] = scratch.take([piece.dropout.map_or(0, |_| piece.rows.len() * piece.module.inputs)]);
        let x = dropped(piece.dropout, layout, piece.sequence, piece.rows.clone(), x, 0, space);
        product(&mut s, Write::Assign, 1.0, x, piece.a().t());
        product(&mut y, Write::Add, piece.module.scale, s.as_mat(), piece.b().t());
    });
}

/// ds = scale dy B; dx += dropout'(ds A); dB += scale dy^T s; dA += ds^T dropout(x), on one module of the call.
#[expect(clippy::too_many_arguments, reason = "one argument an operand")]
pub(super) fn backward(
    workers: &Workers,
    layout: &Layout,
    groups: &mut [LoraGrads<'_, CpuBuffer>],
    number: usize,
    dy: Mat<'_>,
    x: Mat<'_>,
    s: Mat<'_>,
    ds: &mut [f32],
    dx: Option<MatMut<'_>>,
) {
    let ds_width = s.width();
    let (pieces, rows) = sorted(groups.iter().map(|group| Piece::of_group(layout, &group.rows, number, group.wants_dx)));
    let ds_parts = MatMut::new(ds, dy.height(), ds_width).split_rows(&rows);
    let dx_parts: Vec<_> = match dx {
        Some(dx) => dx.split_rows(&rows).into_iter().map(Some).collect(),
        None => rows.iter().map(|_| None).collect(),
    };
    let items = pieces.into_iter().zip(ds_parts.into_iter().zip(dx_parts)).collect();
    workers.each(items, |(piece, (ds, dx)): (Piece<'_>, (MatMut<'_>, Option<MatMut<'_>>)), scratch| {
        let mut ds = ds.into_cols(0..piece.module.rank);
        product(&mut ds, Write::Assign, piece.module.scale, dy.rows(piece.rows.clone()), piece.b());
        let Some(mut dx) = dx.filter(|_| piece.wants_dx) else { return };
        let Some(dropout) = piece.dropout else { return product(&mut dx, Write::Add, 1.0, ds.as_mat(), piece.a()) };
        let [space] = scratch.take([piece.rows.len() * piece.module.inputs]);
        let mut through = MatMut::new(space, piece.rows.len(), piece.module.inputs);
        product(&mut through, Write::Assign, 1.0, ds.as_mat(), piece.a());
        for (i, row) in piece.rows.enumerate() {
            let through = through.row(i);
            drop_features(dropout, piece.sequence, layout.positions()[row], 0, through);
            for (dx, through) in dx.row(i).iter_mut().zip(through) {
                *dx += *through;
            }
        }
    });

    let ds = Mat::new(ds, dy.height(), ds_width);
    let items = groups.iter_mut().flat_map(|group| Gradient::of_group(layout, group, number)).collect();
    workers.each(items, |gradient: Gradient<'_>, scratch| gradient.accumulate(layout, dy, x, s, ds, scratch));
}

/// A part of the gradient of one module.
struct Gradient<'a> {
    module: LoraModule,
    dropout: Option<Dropout>,
    segments: &'a [Segment],
    part: Part,
    grads: MatMut<'a>,
}

enum Part {
    /// These columns of A.
    A(Range<usize>),
    /// These rows of B.
    B(Range<usize>),
}

impl<'a> Gradient<'a> {
    fn of_group(layout: &'a Layout, group: &'a mut LoraGrads<'_, CpuBuffer>, number: usize) -> Vec<Self> {
        let Some(LoraSite { module, dropout }) = group.rows.sites[number] else { return Vec::new() };
        let segments = &layout.segments()[group.rows.segments.clone()];
        let LoraModule { a, b, rank, inputs, outputs, .. } = module;
        let grads = group.grads.data.as_mut_slice();
        // A and B lie apart in the flat buffer, in either order.
        let (low, high) = grads.split_at_mut(a.max(b));
        let (a_grads, b_grads) = if a < b { (&mut low[a..], high) } else { (high, &mut low[b..]) };
        let a_grads = MatMut::new(&mut a_grads[..rank * inputs], rank, inputs);
        let b_grads = MatMut::new(&mut b_grads[..outputs * rank], outputs, rank);
        let a_items = a_grads.split_cols(WIDTH).into_iter().map(|(cols, grads)| (Part::A(cols), grads));
        let ranges: Vec<_> = steps(outputs, WIDTH).collect();
        let b_items = b_grads.split_rows(&ranges);
        let b_items = ranges.into_iter().map(Part::B).zip(b_items);
        a_items.chain(b_items).map(|(part, grads)| Self { module, dropout, segments, part, grads }).collect()
    }

    /// Adds every sequence's share, in segment order, each by one product over its rows.
    fn accumulate(mut self, layout: &Layout, dy: Mat<'_>, x: Mat<'_>, s: Mat<'_>, ds: Mat<'_>, scratch: &mut super::workers::Scratch) {
        for segment in self.segments {
            let rows = segment.start..segment.start + segment.rows;
            match &self.part {
                Part::A(cols) => {
                    let [space] = scratch.take([self.dropout.map_or(0, |_| rows.len() * cols.len())]);
                    let x = dropped(self.dropout, layout, segment.sequence, rows.clone(), x.cols(cols.clone()), cols.start, space);
                    product(&mut self.grads, Write::Add, 1.0, ds.rows(rows).cols(0..self.module.rank).t(), x);
                }
                Part::B(outputs) => {
                    let dy = dy.rows(rows.clone()).cols(outputs.clone());
                    product(&mut self.grads, Write::Add, self.module.scale, dy.t(), s.rows(rows).cols(0..self.module.rank));
                }
            }
        }
    }
}

/// Rows of x after dropout, in `space`; x itself where there is none. Column 0 of x is feature `first` (a multiple of 4).
fn dropped<'a>(
    dropout: Option<Dropout>,
    layout: &Layout,
    sequence: u32,
    rows: Range<usize>,
    x: Mat<'a>,
    first: usize,
    space: &'a mut [f32],
) -> Mat<'a> {
    let x = x.rows(rows.clone());
    let Some(dropout) = dropout else { return x };
    let mut out = MatMut::new(space, x.height(), x.width());
    for (i, row) in rows.enumerate() {
        let out = out.row(i);
        out.copy_from_slice(x.row(i));
        drop_features(dropout, sequence, layout.positions()[row], first, out);
    }
    Mat::new(space, x.height(), x.width())
}

/// Dropout of consecutive features of one row; see [`Dropout`].
fn drop_features(dropout: Dropout, sequence: u32, position: u32, first: usize, features: &mut [f32]) {
    let keep = 1.0 - dropout.probability;
    for (i, features) in features.chunks_mut(4).enumerate() {
        let words = philox(dropout.key, [(first / 4 + i) as u32, position, sequence, 0]);
        for (x, word) in features.iter_mut().zip(words) {
            *x = if uniform(word) >= dropout.probability { *x / keep } else { 0.0 };
        }
    }
}
