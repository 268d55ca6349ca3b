//! The card at work for two at once: what a block finds must not depend on how long its neighbours on a multiprocessor make it wait.
//!
//! Never in one stream: each has a device of its own, as two processes have under MPS.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use nodus_kernels::cuda::{CudaBuffer, CudaDevice, CudaWeight, Precision};
use nodus_kernels::{AttentionShape, DType, Device as _, Layout, Numbers, Use};

use super::open;

const LENGTHS: [usize; 4] = [128; 4];
const WIDTH: usize = 256;
/// Rows by one block, by two, by eight, and by eight with more columns each.
const VOCABULARIES: [usize; 4] = [16_003, 32_000, 128_256, 151_936];

/// Everything that the loss of some rows takes.
struct Loss {
    rows: Layout,
    x: CudaBuffer,
    head: CudaWeight,
    targets: Vec<u32>,
    losses: CudaBuffer,
    dx: CudaBuffer,
}

impl Loss {
    fn new(device: &mut CudaDevice, vocabulary: usize) -> Self {
        let positions: Vec<u32> = (0..128).collect();
        let rows = Layout::new(LENGTHS.iter().zip(0..).map(|(length, number)| (number, &positions[..*length])), device.row_align());
        let mut alloc = |usage, width: usize| device.alloc(usage, rows.rows() * width).unwrap();
        let (mut x, losses, dx) = (alloc(Use::Activation, WIDTH), alloc(Use::State, 1), alloc(Use::Activation, WIDTH));
        device.fill_uniform(&mut x, 5, 1.0).unwrap();
        let head = device.random(&[vocabulary, WIDTH], DType::BF16, Numbers { key: 1, centre: 0.0, range: 0.3 }).unwrap();
        let targets = (0..rows.rows()).map(|row| (row * 97 % vocabulary) as u32).collect();
        Self { rows, x, head, targets, losses, dx }
    }

    fn run(&mut self, device: &mut CudaDevice) {
        let weights = vec![0.5; self.rows.rows()];
        device.head_loss(&self.rows, &self.x, &self.head, &self.targets, &weights, &mut self.losses, Some(&mut self.dx)).unwrap();
    }

    fn bits(&mut self, device: &mut CudaDevice) -> Vec<u32> {
        self.run(device);
        let (mut losses, mut dx) = (vec![0.0; self.rows.rows()], vec![0.0; self.rows.rows() * WIDTH]);
        device.download(&self.losses, 0, &mut losses).unwrap();
        device.download(&self.dx, 0, &mut dx).unwrap();
        losses.into_iter().chain(dx).map(f32::to_bits).collect()
    }
}

/// Attention and losses without a pause, until it is told to stop.
fn be_at_work(mut device: CudaDevice, stop: &AtomicBool) {
    let shape = AttentionShape { heads: 32, kv_heads: 4, head_dim: 64, window: None };
    let mut losses = VOCABULARIES.map(|vocabulary| Loss::new(&mut device, vocabulary));
    let rows = losses[0].rows.clone();
    let mut alloc = |usage, width: usize| device.alloc(usage, rows.rows() * width).unwrap();
    let [mut q, mut k, mut out] = [2048, 256, 2048].map(|width| alloc(Use::Activation, width));
    let mut lse = alloc(Use::State, 32);
    device.fill_uniform(&mut q, 6, 1.0).unwrap();
    device.fill_uniform(&mut k, 7, 1.0).unwrap();
    while !stop.load(Relaxed) {
        for loss in &mut losses {
            for _ in 0..8 {
                device.attention(&rows, &rows, shape, &q, &k, &k, &mut out, &mut lse).unwrap();
                loss.run(&mut device);
            }
        }
        device.synchronize().unwrap();
    }
}

/// Seen to fail where a copy to shared memory began while the last row's reads were still under way: one row of some thousands, and only beside other work.
#[test]
fn the_loss_is_the_same_beside_other_work() {
    let name = "the_loss_is_the_same_beside_other_work";
    let (Some(mut device), Some(other)) = (open(name, Precision::Bf16), open(name, Precision::Bf16)) else { return };
    let mut losses = VOCABULARIES.map(|vocabulary| Loss::new(&mut device, vocabulary));
    let alone: Vec<Vec<u32>> = losses.iter_mut().map(|loss| loss.bits(&mut device)).collect();
    assert!(alone.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    let stop = AtomicBool::new(false);
    let mut unequal = [0; VOCABULARIES.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| be_at_work(other, &stop));
        for _ in 0..1000 {
            for ((loss, alone), unequal) in losses.iter_mut().zip(&alone).zip(&mut unequal) {
                *unequal += usize::from(loss.bits(&mut device) != *alone);
            }
        }
        stop.store(true, Relaxed);
    });
    assert_eq!(unequal, [0; VOCABULARIES.len()], "of 1000 each, of vocabularies {VOCABULARIES:?}");
}
