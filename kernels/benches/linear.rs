//! Products of a training step of SmolLM2-135M (2 sequences of 96 rows) on two threads: this crate beside the gemm crate alone, which
//! computes each product by one call with its own threads, and by one call on one thread.
#![expect(unsafe_code, reason = "the gemm crate alone is what is measured against")]
#![expect(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::{Device, HostTensor, Layout, Use, philox, uniform};

const ROWS: usize = 96;
const SEQUENCES: usize = 2;

fn noise(len: usize) -> Vec<f32> {
    (0..len).map(|i| uniform(philox(1, [i as u32, 0, 0, 0])[0]) - 0.5).collect()
}

/// c (rows x cols) = a b, b at these strides, by the gemm crate alone.
fn alone(c: &mut [f32], a: &[f32], b: &[f32], [rows, cols, inner]: [usize; 3], [b_cs, b_rs]: [usize; 2], parallelism: gemm::Parallelism) {
    assert!(c.len() == rows * cols && a.len() == rows * inner && b.len() == inner * cols);
    let [cols_stride, inner_stride, b_cs, b_rs] = [cols, inner, b_cs, b_rs].map(|stride| stride as isize);
    // SAFETY: c and a are row-major and of these sizes by the assert; the strides of b are those of a matrix or of its transpose.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            inner,
            c.as_mut_ptr(),
            1,
            cols_stride,
            false,
            a.as_ptr(),
            1,
            inner_stride,
            b.as_ptr(),
            b_cs,
            b_rs,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn product(criterion: &mut Criterion, inputs: usize, outputs: usize) {
    let rows = ROWS * SEQUENCES;
    let mut group: BenchmarkGroup<'_, WallTime> = criterion.benchmark_group(format!("{inputs}-{outputs}"));
    group.throughput(Throughput::Elements((2 * rows * inputs * outputs) as u64)).sample_size(20);
    let (w, x, dy) = (noise(inputs * outputs), noise(rows * inputs), noise(rows * outputs));
    let (mut out, mut dx) = (vec![0.0; rows * outputs], vec![0.0; rows * inputs]);
    for (name, parallelism) in [("gemm on 2 threads", gemm::Parallelism::Rayon(2)), ("gemm on 1 thread", gemm::Parallelism::None)] {
        let (forward, backward) = ([rows, outputs, inputs], [rows, inputs, outputs]);
        group.bench_function(format!("forward/{name}"), |b| b.iter(|| alone(&mut out, &x, &w, forward, [inputs, 1], parallelism)));
        group.bench_function(format!("backward/{name}"), |b| b.iter(|| alone(&mut dx, &dy, &w, backward, [1, inputs], parallelism)));
    }
    let positions: Vec<u32> = (0..ROWS as u32).collect();
    let layout = Layout::new((0..SEQUENCES as u32).map(|id| (id, positions.as_slice())), 1);
    for threads in [2, 1] {
        let mut device = CpuDevice::new(threads).unwrap();
        let weight = device.load(&HostTensor::from_f32(&w, vec![outputs, inputs]).unwrap()).unwrap();
        let [mut x_buffer, mut out, mut dx] =
            [rows * inputs, rows * outputs, rows * inputs].map(|len| device.alloc(Use::Activation, len).unwrap());
        device.upload(&x, &mut x_buffer, 0).unwrap();
        let name = if threads == 1 { "ours on 1 thread" } else { "ours on 2 threads" };
        group.bench_function(format!("forward/{name}"), |b| b.iter(|| device.linear(&layout, &x_buffer, &weight, None, &mut out).unwrap()));
        device.upload(&dy, &mut out, 0).unwrap();
        group.bench_function(format!("backward/{name}"), |b| {
            b.iter(|| device.linear_backward(&layout, &out, &weight, &mut dx, false).unwrap());
        });
    }
}

/// The head and its loss, forward and backward: two products and everything between them.
fn head(criterion: &mut Criterion) {
    let (rows, width, vocabulary) = (ROWS * SEQUENCES, 576, 49_152);
    let mut group = criterion.benchmark_group("head and loss");
    group.throughput(Throughput::Elements((4 * rows * width * vocabulary) as u64)).sample_size(10);
    let positions: Vec<u32> = (0..ROWS as u32).collect();
    let layout = Layout::new((0..SEQUENCES as u32).map(|id| (id, positions.as_slice())), 1);
    for threads in [2, 1] {
        let mut device = CpuDevice::new(threads).unwrap();
        let head = device.load(&HostTensor::from_f32(&noise(width * vocabulary), vec![vocabulary, width]).unwrap()).unwrap();
        let [mut x, mut losses, mut dx] = [rows * width, rows, rows * width].map(|len| device.alloc(Use::Activation, len).unwrap());
        device.upload(&noise(rows * width), &mut x, 0).unwrap();
        let (targets, weights) = (vec![7; rows], vec![1.0; rows]);
        group.bench_function(format!("{threads} threads"), |b| {
            b.iter(|| device.head_loss(&layout, &x, &head, &targets, &weights, &mut losses, Some(&mut dx)).unwrap());
        });
    }
}

fn products(criterion: &mut Criterion) {
    for (inputs, outputs) in [(576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49_152)] {
        product(criterion, inputs, outputs);
    }
    head(criterion);
}

criterion_group!(benches, products);
criterion_main!(benches);
