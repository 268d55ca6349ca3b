//! Sequences with data that depends on nothing but their number, laid out alone or in company, and the slow truth in float64.
#![allow(dead_code, unreachable_pub, clippy::allow_attributes, reason = "each test file uses a part")]

pub mod reference;

use nodus_kernels::cpu::{CpuBuffer, CpuDevice, CpuWeight};
use nodus_kernels::{Device, HostTensor, Layout, Use, philox, stream_key, uniform};

/// What padding rows hold: a NaN that no operation makes.
pub const POISON: u32 = 0x7fc0_dead;

/// One sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sequence {
    /// Its number; data depend on it.
    pub id: u32,
    /// Its positions.
    pub rows: usize,
    /// Every so many positions there is a query.
    pub stride: usize,
    /// Whether its data are NaN.
    pub nan: bool,
}

/// Sequences in one pass.
#[derive(Debug)]
pub struct World {
    pub sequences: Vec<Sequence>,
    /// Every position.
    pub all: Layout,
    /// The positions that are queries.
    pub some: Layout,
}

impl World {
    pub fn new(sequences: &[Sequence], align: usize) -> Self {
        let positions = |step: fn(&Sequence) -> usize| {
            let of =
                |s: &Sequence| (s.id, (0..s.rows as u32).rev().step_by(step(s)).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>());
            let all: Vec<_> = sequences.iter().map(of).collect();
            Layout::new(all.iter().map(|(id, p)| (*id, p.as_slice())), align)
        };
        Self { sequences: sequences.to_vec(), all: positions(|_| 1), some: positions(|s| s.stride) }
    }

    /// A field over a layout of this world: numbers in -1..1, NaN for NaN sequences, poison for padding.
    pub fn field(&self, layout: &Layout, name: &str, width: usize) -> Vec<f32> {
        let mut field = vec![f32::from_bits(POISON); layout.rows() * width];
        for (segment, sequence) in layout.segments().iter().zip(&self.sequences) {
            let rows = &mut field[segment.start * width..(segment.start + segment.rows) * width];
            if sequence.nan {
                rows.fill(f32::NAN);
            } else {
                rows.copy_from_slice(&noise(name, u64::from(sequence.id), rows.len()));
            }
        }
        field
    }

    /// Indices below `bound` for each row, out of any bound for padding.
    pub fn index(&self, layout: &Layout, name: &str, bound: usize) -> Vec<u32> {
        let of = |x: &f32| if x.to_bits() == POISON { u32::MAX } else { ((x + 1.0) / 2.0 * bound as f32) as u32 % bound as u32 };
        let mut world = Self::new(&self.sequences, 1);
        world.sequences.iter_mut().for_each(|s| s.nan = false);
        world.field(layout, name, 1).iter().map(of).collect()
    }
}

/// Numbers in -1..1.
pub fn noise(name: &str, id: u64, len: usize) -> Vec<f32> {
    let name = name.bytes().fold(0_u64, |hash, byte| hash.wrapping_mul(257).wrapping_add(u64::from(byte)));
    let key = stream_key(name, &[id]);
    (0..len).map(|i| uniform(philox(key, [i as u32, 0, 0, 0])[0]) * 2.0 - 1.0).collect()
}

/// The same in float64.
pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

pub fn weight(device: &mut CpuDevice, data: &[f32], shape: &[usize]) -> CpuWeight {
    device.load(&HostTensor::from_f32(data, shape.to_vec()).unwrap()).unwrap()
}

pub fn buffer(device: &mut CpuDevice, data: &[f32]) -> CpuBuffer {
    let mut buffer = device.alloc(Use::Activation, data.len()).unwrap();
    device.upload(data, &mut buffer, 0).unwrap();
    buffer
}

pub fn read(device: &mut CpuDevice, buffer: &CpuBuffer) -> Vec<f32> {
    let mut data = vec![0.0; device.len(buffer)];
    device.download(buffer, 0, &mut data).unwrap();
    data
}

/// A buffer that an operation is to write: poison in every row.
pub fn blank(device: &mut CpuDevice, layout: &Layout, width: usize) -> CpuBuffer {
    buffer(device, &vec![f32::from_bits(POISON); layout.rows() * width])
}

/// Rows of one segment.
pub fn segment<'a>(layout: &Layout, segment: usize, field: &'a [f32]) -> &'a [f32] {
    let width = field.len() / layout.rows().max(1);
    let s = layout.segments()[segment];
    &field[s.start * width..(s.start + s.rows) * width]
}

/// Whether padding rows still hold what they held.
pub fn assert_padding_untouched(layout: &Layout, field: &[f32]) {
    let width = field.len() / layout.rows().max(1);
    for (row, position) in layout.positions().iter().enumerate() {
        if *position == u32::MAX {
            let row = &field[row * width..(row + 1) * width];
            assert!(row.iter().all(|x| x.to_bits() == POISON), "a padding row was written");
        }
    }
}

/// Whether all are within `tolerance`, relative to the largest magnitude (at least 1).
#[track_caller]
pub fn assert_close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let size = want.iter().fold(1.0_f64, |m, x| m.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let off = (f64::from(*got) - want).abs();
        assert!(off <= tolerance * size, "{what}[{i}]: {got} for {want}, largest {size}");
    }
}

/// Whether `gradient` is the derivative of `loss` at x: central differences in float64 along every coordinate (at most 12, evenly chosen)
/// and along one dense direction.
#[track_caller]
pub fn assert_gradient(what: &str, x: &[f32], gradient: &[f32], loss: impl Fn(&[f64]) -> f64) {
    assert_eq!(x.len(), gradient.len(), "{what}: length");
    let x = wide(x);
    let step = 1e-5;
    let size = gradient.iter().fold(1.0_f64, |m, g| m.max(f64::from(g.abs())));
    let along = |direction: &dyn Fn(usize) -> f64| {
        let moved = |sign: f64| loss(&x.iter().enumerate().map(|(i, x)| x + sign * step * direction(i)).collect::<Vec<_>>());
        (moved(1.0) - moved(-1.0)) / (2.0 * step)
    };
    for chosen in (0..x.len()).step_by(x.len().div_ceil(12).max(1)) {
        let (want, got) = (along(&|i| f64::from(u8::from(i == chosen))), f64::from(gradient[chosen]));
        assert!((want - got).abs() <= 2e-5 * size, "{what}[{chosen}]: {got} for {want}");
    }
    let direction = wide(&noise("direction", 0, x.len()));
    let want = along(&|i| direction[i]);
    let got: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * d).sum();
    assert!((want - got).abs() <= 2e-5 * size * (x.len() as f64).sqrt().max(1.0), "{what}, dense direction: {got} for {want}");
}
