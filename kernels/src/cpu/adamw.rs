//! AdamW, each adapter by itself.
//!
//! Never touches an adapter whose gradient is not finite, beyond writing down its norm.

use super::buffer::CpuBuffer;
use super::math::wide;
use super::workers::Workers;
use crate::AdamWItem;

/// Elements of one work item and of one partial sum of a norm.
const BLOCK: usize = 16_384;

/// A block of one adapter.
struct Block<'a> {
    params: &'a mut [f32],
    grads: &'a mut [f32],
    moment1: &'a mut [f32],
    moment2: &'a mut [f32],
    factors: Factors,
}

/// What is the same for all elements of an adapter, computed in float64 and rounded once.
#[derive(Clone, Copy)]
struct Factors {
    divisor: f32,
    clip: f32,
    /// lr wd
    decay: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    /// lr / (1 - b1^t)
    step: f32,
    /// sqrt(1 - b2^t)
    correction2: f32,
    eps: f32,
}

impl Factors {
    fn new(item: &AdamWItem<'_, CpuBuffer>, norm: f32) -> Self {
        let [beta1, beta2, learning_rate, decay] = [item.beta1, item.beta2, item.learning_rate, item.weight_decay].map(f64::from);
        let correction = |beta: f64| 1.0 - libm::pow(beta, item.step as f64);
        let clip = item.max_grad_norm.map_or(1.0, |most| most / (norm + 1e-6));
        Self {
            divisor: item.divisor,
            clip: if clip < 1.0 { clip } else { 1.0 },
            decay: (learning_rate * decay) as f32,
            beta1: item.beta1,
            rest1: (1.0 - beta1) as f32,
            beta2: item.beta2,
            rest2: (1.0 - beta2) as f32,
            step: (learning_rate / correction(beta1)) as f32,
            correction2: correction(beta2).sqrt() as f32,
            eps: item.eps,
        }
    }
}

/// One step of each item; see [`AdamWItem`].
pub(super) fn step(workers: &Workers, items: &mut [AdamWItem<'_, CpuBuffer>], norms: &mut [f32]) {
    let mut blocks = Vec::new();
    for item in items {
        let norm = norm(workers, &item.grads.data, item.divisor);
        norms[item.norm_index] = norm;
        if !norm.is_finite() {
            continue;
        }
        let factors = Factors::new(item, norm);
        let [params, grads, moment1, moment2] =
            [&mut item.params.data, &mut item.grads.data, &mut item.moment1.data, &mut item.moment2.data].map(|d| d.chunks_mut(BLOCK));
        let zipped = params.zip(grads).zip(moment1.zip(moment2));
        blocks.extend(zipped.map(|((params, grads), (moment1, moment2))| Block { params, grads, moment1, moment2, factors }));
    }
    workers.each(blocks, |block, _| wide!(update(block)));
}

#[inline(always)]
fn update(block: Block<'_>) {
    let f = block.factors;
    let elements = block.params.iter_mut().zip(block.grads).zip(block.moment1.iter_mut().zip(block.moment2));
    for ((p, grad), (m, v)) in elements {
        let g = *grad / f.divisor * f.clip;
        *p -= f.decay * *p;
        *m = f.beta1 * *m + f.rest1 * g;
        *v = f.beta2 * *v + f.rest2 * g * g;
        *p -= f.step * *m / (v.sqrt() / f.correction2 + f.eps);
        *grad = 0.0;
    }
}

/// |grads / divisor|: squares in float64, summed in 16 lanes a block, the blocks in order.
fn norm(workers: &Workers, grads: &[f32], divisor: f32) -> f32 {
    let mut partial = vec![0.0_f64; grads.len().div_ceil(BLOCK)];
    let items = grads.chunks(BLOCK).zip(&mut partial).collect();
    workers.each(items, |(grads, partial): (&[f32], &mut f64), _| *partial = wide!(squares(grads, divisor)));
    partial.iter().sum::<f64>().sqrt() as f32
}

#[inline(always)]
fn squares(grads: &[f32], divisor: f32) -> f64 {
    let mut lanes = [0.0_f64; 16];
    let (whole, rest) = grads.as_chunks::<16>();
    for grads in whole {
        for (lane, grad) in lanes.iter_mut().zip(grads) {
            let g = f64::from(grad / divisor);
            *lane += g * g;
        }
    }
    for (lane, grad) in lanes.iter_mut().zip(rest) {
        let g = f64::from(grad / divisor);
        *lane += g * g;
    }
    lanes.iter().sum()
}
