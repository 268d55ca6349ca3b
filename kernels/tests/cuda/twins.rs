//! Every operation of the card against the CPU device on random shapes. Padding rows and neighbours are NaN on both.

use nodus_kernels::AttentionShape;
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::cuda::{CudaDevice, Precision};
use nodus_kernels::exercise::{self, Sequences, Sizes, exercise, names};
use nodus_kernels::philox;

use super::{PRECISIONS, cases, only, open};

/// One of `items`, by the case's random words.
fn pick<T: Copy>(case: u32, what: u32, items: &[T]) -> T {
    items[philox(77, [case, what, 0, 0])[0] as usize % items.len()]
}

fn sizes(case: u32) -> Sizes {
    let kv_heads = pick(case, 0, &[1, 2, 3]);
    let attention = AttentionShape {
        heads: kv_heads * pick(case, 1, &[1, 2, 3, 4]),
        kv_heads,
        head_dim: pick(case, 2, &[8, 16, 40, 64, 80, 128, 200]),
        window: pick(case, 3, &[Some(1), Some(37), Some(64), Some(300)]),
    };
    Sizes {
        attention,
        vocabulary: pick(case, 4, &[3, 64, 997, 1024, 20_001]),
        rank: pick(case, 5, &[1, 4, 8, 13, 16, 64, 70]),
        seed: u64::from(case),
    }
}

/// The card's numbers against the twin's.
fn compare(
    cuda: &mut CudaDevice,
    cpu: &mut CpuDevice,
    precision: Precision,
    (sizes, sequences): (Sizes, Sequences<'_>),
    worst: &mut [f64],
) {
    for (index, name) in names().into_iter().enumerate().filter(|(_, name)| only().is_none_or(|only| only == *name)) {
        let error = difference((&mut *cuda, &mut *cpu), index, (sizes, sequences));
        let tolerance = if precision == Precision::F32 { 2e-5 } else { 1.5e-2 };
        assert!(error <= tolerance, "{name}: {error:e} of {sizes:?} {sequences:?} in {precision:?}");
        worst[index] = worst[index].max(error);
    }
}

/// How far an operation's results are from the twin's.
fn difference((cuda, cpu): (&mut CudaDevice, &mut CpuDevice), index: usize, (sizes, sequences): (Sizes, Sequences<'_>)) -> f64 {
    let ours =
        exercise(cuda, index, sizes, sequences).unwrap_or_else(|error| panic!("{} {sizes:?} {sequences:?}: {error}", names()[index]));
    exercise::difference(&ours, &exercise::exercise(cpu, index, sizes, sequences).unwrap())
}

#[test]
fn every_operation_agrees_with_its_twin() {
    for precision in PRECISIONS {
        let Some(mut cuda) = open("every_operation_agrees_with_its_twin", precision) else { return };
        let mut cpu = CpuDevice::new(8).unwrap();
        let mut worst = vec![0.0; names().len()];
        for case in 0..cases() {
            let lengths = [1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 300, 513];
            let anchors: Vec<usize> = (0..pick(case, 6, &[1, 2, 3])).map(|i| pick(case, 10 + i, &lengths)).collect();
            let (before, after) = (pick(case, 7, &[&[][..], &[5][..], &[128, 130][..]]), pick(case, 8, &[&[][..], &[1][..], &[200][..]]));
            compare(&mut cuda, &mut cpu, precision, (sizes(case), Sequences { anchors: &anchors, before, after }), &mut worst);
        }
        for (name, worst) in names().iter().zip(worst) {
            println!("{precision:?} {name:<30} worst relative error {worst:.2e}");
        }
    }
}

/// The same on one shape so small that every sanitizer comes to its end.
#[test]
fn a_small_shape_agrees_with_its_twin() {
    for precision in PRECISIONS {
        let Some(mut cuda) = open("a_small_shape_agrees_with_its_twin", precision) else { return };
        let attention = AttentionShape { heads: 2, kv_heads: 1, head_dim: 16, window: Some(50) };
        let sizes = Sizes { attention, vocabulary: 100, rank: 8, seed: 3 };
        let (mut cpu, mut worst) = (CpuDevice::new(8).unwrap(), vec![0.0; names().len()]);
        compare(&mut cuda, &mut cpu, precision, (sizes, Sequences { anchors: &[130], before: &[2], after: &[] }), &mut worst);
    }
}

/// Heads that Hopper's own products take, on rows so few that every sanitizer comes to its end: two tiles of keys, of which the second is not full.
#[test]
fn attention_of_few_rows_agrees_with_its_twin() {
    let Some(mut cuda) = open("attention_of_few_rows_agrees_with_its_twin", Precision::Bf16) else { return };
    let index = names().iter().position(|name| *name == "attention").unwrap();
    for (heads, kv_heads, head_dim) in [(1, 1, 64), (2, 1, 64), (1, 1, 128), (2, 1, 128)] {
        let attention = AttentionShape { heads, kv_heads, head_dim, window: Some(50) };
        let sizes = Sizes { attention, vocabulary: 3, rank: 1, seed: 7 };
        let sequences = Sequences { anchors: &[70], before: &[2], after: &[] };
        let difference = difference((&mut cuda, &mut CpuDevice::new(8).unwrap()), index, (sizes, sequences));
        println!("{attention:?} {difference:.2e}");
        assert!(difference <= 1.5e-2, "{difference:e} of {attention:?}");
    }
}

/// The loss of a few rows: a sanitizer comes to its end with the largest vocabularies too.
#[test]
fn the_loss_of_few_rows_agrees_with_its_twin() {
    let Some(mut cuda) = open("the_loss_of_few_rows_agrees_with_its_twin", Precision::Bf16) else { return };
    let attention = AttentionShape { heads: 2, kv_heads: 1, head_dim: 16, window: None };
    let sizes = Sizes { attention, vocabulary: 100, rank: 8, seed: 3 };
    let index = names().iter().position(|name| *name == "head_loss").unwrap();
    let sequences = Sequences { anchors: &[5], before: &[], after: &[] };
    let difference = difference((&mut cuda, &mut CpuDevice::new(8).unwrap()), index, (sizes, sequences));
    assert!(difference <= 1.5e-2, "{difference:e}");
}

/// Widths of heads that a card goes about in ways of their own, with and without a window.
#[test]
fn attention_agrees_with_its_twin_for_heads_of_every_width() {
    for precision in PRECISIONS {
        let Some(mut cuda) = open("attention_agrees_with_its_twin_for_heads_of_every_width", precision) else { return };
        let (mut cpu, mut worst) = (CpuDevice::new(8).unwrap(), Vec::new());
        let index = names().iter().position(|name| *name == "attention").unwrap();
        for head_dim in [16, 64, 72, 128, 200] {
            for (heads, window) in [(6, None), (4, Some(100)), (8, None)] {
                let attention = AttentionShape { heads, kv_heads: 2, head_dim, window };
                let sizes = Sizes { attention, vocabulary: 3, rank: 1, seed: head_dim as u64 };
                let sequences = Sequences { anchors: &[300, 129, 64, 1], before: &[200], after: &[5] };
                let error = difference((&mut cuda, &mut cpu), index, (sizes, sequences));
                let tolerance = if precision == Precision::F32 { 2e-5 } else { 1.5e-2 };
                assert!(error <= tolerance, "{error:e} of {attention:?} in {precision:?}");
                worst.push(format!("{head_dim}: {error:.1e}"));
            }
        }
        println!("{precision:?} attention {}", worst.join(", "));
    }
}
