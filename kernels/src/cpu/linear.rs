//! Products with frozen weights.
//!
//! Never splits a reduction; never lets two sequences share a product.
//!
//! A weight is stored out x in, so x W^T runs along its rows, which the gemm crate reads as they lie if the other operand and the result
//! are transposed: both are small beside the weight, so we turn them around instead (measured at 96 rows: 1.0 to 1.7 times as fast).

use std::ops::Range;

use super::math::wide;
use super::matrix::{Mat, MatMut, Write, product, transpose};
use super::workers::{Scratch, Workers};
use crate::Layout;

/// Columns of the output of one work item: a multiple of the columns of a register tile, few enough that the gemm crate does not copy x
/// once more, and a divisor of the widths that models have, so that threads get equal shares.
const COLUMNS: usize = 48;
/// Sequences are filled up to a multiple of these rows when they are turned around: a vector of the widest instruction set.
const BAND: usize = 16;

/// out = x W^T + bias. An item is a range of W's rows, so that the second sequence finds them in the cache.
pub(super) fn linear(
    workers: &Workers,
    scratch: &mut Scratch,
    layout: &Layout,
    x: Mat<'_>,
    weight: Mat<'_>,
    bias: Option<&[f32]>,
    out: MatMut<'_>,
) {
    let segments: Vec<_> = layout.segments().iter().map(|s| s.start..s.start + s.rows).collect();
    each_segment(workers, scratch, &segments, x, weight, bias, out);
}

/// out = x W^T where all rows are of one sequence.
pub(super) fn chunk(workers: &Workers, scratch: &mut Scratch, x: Mat<'_>, weight: Mat<'_>, out: MatMut<'_>) {
    each_segment(workers, scratch, std::slice::from_ref(&(0..x.height())), x, weight, None, out);
}

fn each_segment(
    workers: &Workers,
    scratch: &mut Scratch,
    segments: &[Range<usize>],
    x: Mat<'_>,
    weight: Mat<'_>,
    bias: Option<&[f32]>,
    out: MatMut<'_>,
) {
    let turned = turn(workers, scratch, segments, x);
    let tallest = turned.iter().map(|x| x.width()).max().unwrap_or_default();
    workers.each(out.split_cols(COLUMNS), |(cols, mut out), scratch| {
        let weight = weight.rows(cols.clone());
        let bias = bias.map(|bias| &bias[cols.clone()]);
        let [space] = scratch.take([cols.len() * tallest]);
        for (rows, x) in segments.iter().zip(&turned) {
            let space = &mut space[..cols.len() * x.width()];
            product(&mut MatMut::new(space, cols.len(), x.width()), Write::Assign, 1.0, weight, *x);
            // Broken on purpose: with many rows the reduction is split in two.
            #[cfg(feature = "broken-reduction")]
            if segments.iter().map(ExactSizeIterator::len).sum::<usize>() > 32 {
                let (mut out, half, width) = (MatMut::new(space, cols.len(), x.width()), x.height() / 2, x.height());
                product(&mut out, Write::Assign, 1.0, weight.cols(0..half), x.rows(0..half));
                product(&mut out, Write::Add, 1.0, weight.cols(half..width), x.rows(half..width));
            }
            let result = Mat::new(space, cols.len(), x.width()).cols(0..rows.len());
            let mut out = out.rows(rows.clone());
            wide!(transpose(result, &mut out));
            if let Some(bias) = bias {
                add_bias(bias, &mut out);
            }
        }
    });
}

/// The rows of each segment as columns, filled up with zeros to whole bands.
fn turn<'a>(workers: &Workers, scratch: &'a mut Scratch, segments: &[Range<usize>], x: Mat<'_>) -> Vec<Mat<'a>> {
    let heights: Vec<_> = segments.iter().map(|rows| rows.len().next_multiple_of(BAND)).collect();
    let [space] = scratch.take([heights.iter().sum::<usize>() * x.width()]);
    let mut rest = &mut *space;
    let mut bands = Vec::new();
    for (rows, height) in segments.iter().zip(&heights) {
        let (part, others) = rest.split_at_mut(height * x.width());
        let of_segment = MatMut::new(part, x.width(), *height).split_cols(BAND);
        bands.extend(of_segment.into_iter().map(|(band, out)| (rows.start + band.start..rows.end.min(rows.start + band.end), out)));
        rest = others;
    }
    workers.each(bands, |(rows, mut out), _| {
        wide!({
            let height = rows.len();
            if height < BAND {
                out.fill(0.0);
            }
            transpose(x.rows(rows), &mut out.into_cols(0..height));
        });
    });
    let mut rest = &*space;
    let part = |height| {
        let (part, others) = rest.split_at(height * x.width());
        rest = others;
        Mat::new(part, x.width(), height)
    };
    heights.into_iter().map(part).collect()
}

fn add_bias(bias: &[f32], out: &mut MatMut<'_>) {
    for row in 0..out.height() {
        for (out, bias) in out.row(row).iter_mut().zip(bias) {
            *out += bias;
        }
    }
}

/// dx (=, +=) dy W.
pub(super) fn linear_backward(workers: &Workers, layout: &Layout, dy: Mat<'_>, weight: Mat<'_>, dx: MatMut<'_>, write: Write) {
    workers.each(dx.split_cols(COLUMNS), |(cols, mut dx), _| {
        let weight = weight.cols(cols);
        for segment in layout.segments() {
            let rows = segment.start..segment.start + segment.rows;
            product(&mut dx.rows(rows.clone()), write, 1.0, dy.rows(rows), weight);
        }
    });
}
