//! Head and loss by chunks of rows.
//!
//! Never holds the logits of more rows than a chunk has.

use super::linear;
use super::math::{exp, ln, max, sum, wide};
use super::matrix::{Mat, MatMut, Write, product};
use super::rows::pieces;
use super::workers::{Scratch, Workers};
use crate::Layout;

/// Rows of one sequence whose logits exist at once.
const ROWS: usize = 128;
/// Columns of dx of one work item: wide, since each item reads all rows of the head.
const COLUMNS: usize = 288;
/// Elements between rows of logits. Without them rows of a vocabulary that is a multiple of 1024 would share few sets of the caches.
const GAP: usize = 16;

/// losses\[r\] = lse(W x\[r\]) - (W x\[r\])\[targets\[r\]\]; dx\[r\] = weights\[r\] (softmax(W x\[r\]) - onehot(targets\[r\])) W, which is 0 where the
/// weight is 0. The product of dx runs over the whole vocabulary in one piece.
#[expect(clippy::too_many_arguments, reason = "one argument an operand")]
pub(super) fn head_loss(
    workers: &Workers,
    shared: &mut [Scratch; 2],
    layout: &Layout,
    x: Mat<'_>,
    head: Mat<'_>,
    targets: &[u32],
    weights: &[f32],
    mut losses: MatMut<'_>,
    mut dx: Option<MatMut<'_>>,
) {
    let stride = head.height() + GAP;
    let [turned, logits] = shared;
    for rows in pieces(layout, ROWS) {
        let [logits] = logits.take([rows.len() * stride]);
        let mut part = MatMut::new(logits, rows.len(), stride).into_cols(0..head.height());
        linear::chunk(workers, turned, x.rows(rows.clone()), head, part.rows(0..rows.len()));
        let outs = losses.rows(rows.clone()).split_all_rows().into_iter().zip(part.split_all_rows());
        let wants_gradient = dx.is_some();
        workers.each(rows.clone().zip(outs).collect(), |(row, (mut loss, mut logits)): (usize, (MatMut<'_>, MatMut<'_>)), _| {
            let (logits, weight) = (logits.row(0), weights[row]);
            loss.row(0)[0] = wide!(softmax_loss(logits, targets[row] as usize, wants_gradient.then_some(weight)));
        });
        if let Some(dx) = &mut dx {
            let dlogits = Mat::new(logits, rows.len(), stride).cols(0..head.height());
            workers.each(dx.rows(rows).split_cols(COLUMNS), |(cols, mut dx), _| {
                product(&mut dx, Write::Assign, 1.0, dlogits, head.cols(cols));
            });
        }
    }
}

/// The loss of one row. Where its weight is given, the logits become the loss's gradient times the weight.
#[inline(always)]
fn softmax_loss(logits: &mut [f32], target: usize, weight: Option<f32>) -> f32 {
    let (top, at_target) = (max(logits), logits[target]);
    for x in &mut *logits {
        *x = exp(*x - top);
    }
    let total = sum(logits, |x| x) as f32;
    match weight {
        None => {}
        Some(0.0) => logits.fill(0.0),
        Some(weight) => {
            let factor = weight / total;
            for x in &mut *logits {
                *x *= factor;
            }
            logits[target] -= weight;
        }
    }
    top + ln(total) - at_target
}
