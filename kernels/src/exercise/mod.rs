//! Every operation of a device, run on given sequences with random numbers: to compare devices with each other, and a sequence alone with the
//! same among neighbours of nothing but NaN, which must give equal bits.
//!
//! Never looks inside a device: it asks through the `Device` trait, and so fits every device.

mod agreement;
mod operations;

use rayon::prelude::*;

use crate::{AttentionShape, Device, DeviceError, HostTensor, Layout, Use, philox};

pub use agreement::difference;

/// Sizes of what is run.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Heads; the stream is `heads * head_dim` wide.
    pub attention: AttentionShape,
    /// Rows of the head.
    pub vocabulary: usize,
    /// Rank of adapters.
    pub rank: usize,
    /// Decides every number.
    pub seed: u64,
}

impl Sizes {
    fn width(&self) -> usize {
        self.attention.heads * self.attention.head_dim
    }

    fn kv_width(&self) -> usize {
        self.attention.kv_heads * self.attention.head_dim
    }
}

/// Lengths of sequences: those looked at, and their neighbours before and after, whose numbers are all NaN.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// One adapter's sequences. At most 1024 long each.
    pub anchors: &'a [usize],
    /// Before them.
    pub before: &'a [usize],
    /// After them.
    pub after: &'a [usize],
}

/// The results of one operation for the sequences looked at: arrays in a fixed order.
pub type Results = Vec<Vec<f32>>;

/// An operation, or several that belong together.
type Operation<D> = fn(&mut Run<'_, D>) -> Result<(), DeviceError>;

fn operations<D: Device>() -> [(&'static str, Operation<D>); 12] {
    use operations as o;
    [
        ("embed", o::embed),
        ("rms_norm", o::norms),
        ("linear", o::linear),
        ("together", o::together),
        ("lora", o::lora),
        ("lora with dropout", o::lora_dropout),
        ("rope", o::rope),
        ("attention", o::attention),
        ("swiglu", o::swiglu),
        ("add, gather, scatter_add", o::moves),
        ("head_loss", o::head_loss),
        ("adamw", o::adamw),
    ]
}

/// Names of the operations, in the order of `exercise`.
#[must_use]
pub fn names() -> Vec<&'static str> {
    operations::<crate::cpu::CpuDevice>().map(|(name, _)| name).to_vec()
}

/// Runs an operation of [`names`] by its place in them.
///
/// # Errors
/// What the device fails with.
pub fn exercise<D: Device>(device: &mut D, operation: usize, sizes: Sizes, sequences: Sequences<'_>) -> Result<Results, DeviceError> {
    let scene = Scene::new(sequences, device.row_align());
    let mut run = Run { device, scene: &scene, sizes, results: Vec::new() };
    operations::<D>()[operation].1(&mut run)?;
    Ok(run.results)
}

/// What was found of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Independence {
    /// The operation.
    pub operation: &'static str,
    /// Comparisons made.
    pub cases: usize,
    /// Comparisons in which a bit of the sequences' results differed, or in which a result was not finite.
    pub unequal: usize,
}

/// Checks every operation of a device: the same sequences alone and among neighbours, before, after and around.
///
/// # Errors
/// What the device fails with.
pub fn independence<D: Device>(device: &mut D, sizes: Sizes) -> Result<Vec<Independence>, DeviceError> {
    let anchors: [&[usize]; 3] = [&[1], &[129], &[300, 17, 128]];
    let neighbours: [(&[usize], &[usize]); 4] = [(&[], &[]), (&[128, 1], &[]), (&[], &[260]), (&[5, 129, 384], &[127, 2])];
    let mut found = Vec::new();
    for (index, name) in names().into_iter().enumerate() {
        let mut result = Independence { operation: name, cases: 0, unequal: 0 };
        for anchors in anchors {
            let mut alone: Option<Vec<Vec<u32>>> = None;
            for (before, after) in neighbours {
                let results = exercise(device, index, sizes, Sequences { anchors, before, after })?;
                // Results that are not finite would compare equal to any other failure.
                let mut good = !results.is_empty() && results.iter().flatten().all(|value| value.is_finite());
                let bits: Vec<Vec<u32>> = results.iter().map(|array| array.iter().map(|value| value.to_bits()).collect()).collect();
                good &= *alone.get_or_insert_with(|| bits.clone()) == bits;
                result.cases += 1;
                result.unequal += usize::from(!good);
            }
        }
        found.push(result);
    }
    Ok(found)
}

/// A layout in which some neighbouring segments are looked at.
struct Scene {
    rows: Layout,
    /// Of each sequence the rows at some positions, the last among them: as the label-only top has them.
    labelled: Layout,
    anchors: std::ops::Range<usize>,
}

impl Scene {
    fn new(sequences: Sequences<'_>, align: usize) -> Self {
        let Sequences { anchors, before, after } = sequences;
        let positions: Vec<u32> = (0..1024).collect();
        let lengths: Vec<usize> = before.iter().chain(anchors).chain(after).copied().collect();
        // The sequences keep their numbers: dropout draws by them.
        let number = |i: usize| (1000 + i - before.len()) as u32;
        let rows = Layout::new(lengths.iter().enumerate().map(|(i, length)| (number(i), &positions[..*length])), align);
        let some: Vec<Vec<u32>> =
            lengths.iter().map(|length| (0..*length as u32).filter(|p| p % 3 == 1 || p + 1 == *length as u32).collect()).collect();
        let labelled = Layout::new(some.iter().enumerate().map(|(i, some)| (number(i), some.as_slice())), align);
        Self { rows, labelled, anchors: before.len()..before.len() + anchors.len() }
    }

    /// The ranges of elements of the sequences looked at, in a buffer of this width over one of the layouts.
    fn ranges<'a>(&self, layout: &'a Layout, width: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<'a> {
        let segments = &layout.segments()[self.anchors.clone()];
        segments.iter().map(move |segment| segment.start * width..(segment.start + segment.rows) * width)
    }
}

/// Numbers that bf16 holds exactly, of magnitudes from 1/128 to 1: so spread that sums of them and of their products depend on the order. Made by all
/// processors, since the gate waits for tens of millions of them.
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let number = |word: u32| f32::from_bits((word & 0x8000_0000) | ((120 + word % 7) << 23) | (word & 0x007f_0000));
    let mut quads = vec![[0.0; 4]; len.div_ceil(4)];
    let make = |(quad, numbers): (usize, &mut [f32; 4])| *numbers = philox(seed, [quad as u32, 0, 0, 9]).map(number);
    quads.par_iter_mut().with_min_len(1 << 14).enumerate().for_each(make);
    let mut numbers = quads.into_flattened();
    numbers.truncate(len);
    numbers
}

/// A run of one operation: its device, its sequences, and what it has read back.
struct Run<'a, D: Device> {
    device: &'a mut D,
    scene: &'a Scene,
    sizes: Sizes,
    results: Results,
}

impl<D: Device> Run<'_, D> {
    fn seed(&self, seed: u64) -> u64 {
        self.sizes.seed.wrapping_mul(1000).wrapping_add(seed)
    }

    /// A buffer over a layout: random in the sequences looked at, NaN elsewhere.
    fn over(&mut self, layout: &Layout, usage: Use, width: usize, seed: u64) -> Result<D::Buffer, DeviceError> {
        let mut data = vec![f32::NAN; layout.rows() * width];
        let len = self.scene.ranges(layout, width).map(|range| range.len()).sum();
        let (random, mut taken) = (numbers(self.seed(seed), len), 0);
        for range in self.scene.ranges(layout, width) {
            data[range.clone()].copy_from_slice(&random[taken..taken + range.len()]);
            taken += range.len();
        }
        let mut buffer = self.device.alloc(usage, data.len())?;
        self.device.upload(&data, &mut buffer, 0)?;
        Ok(buffer)
    }

    /// Activations over all rows.
    fn activations(&mut self, width: usize, seed: u64) -> Result<D::Buffer, DeviceError> {
        self.over(&self.scene.rows, Use::Activation, width, seed)
    }

    /// A float32 array: random numbers times a power of two, or NaN for a neighbour's.
    fn flat(&mut self, len: usize, seed: Option<u64>, scale: f32) -> Result<D::Buffer, DeviceError> {
        let data: Vec<f32> =
            seed.map_or_else(|| vec![f32::NAN; len], |seed| numbers(self.seed(seed), len).into_iter().map(|value| value * scale).collect());
        let mut buffer = self.device.alloc(Use::State, len)?;
        self.device.upload(&data, &mut buffer, 0)?;
        Ok(buffer)
    }

    /// A weight on the host: random numbers times a power of two.
    fn tensor(&self, shape: &[usize], seed: u64, scale: f32) -> Result<HostTensor, DeviceError> {
        let data: Vec<f32> = numbers(self.seed(seed), shape.iter().product()).into_iter().map(|value| value * scale).collect();
        HostTensor::from_f32(&data, shape.to_vec()).ok_or_else(|| DeviceError::Failed("a tensor is not of its shape".to_owned()))
    }

    fn weight(&mut self, shape: &[usize], seed: u64) -> Result<D::Weight, DeviceError> {
        let tensor = self.tensor(shape, seed, 0.25)?;
        self.device.load(&tensor)
    }

    /// Keeps a whole array.
    fn read(&mut self, buffer: &D::Buffer, range: std::ops::Range<usize>) -> Result<(), DeviceError> {
        let mut data = vec![0.0; range.len()];
        self.device.download(buffer, range.start, &mut data)?;
        self.results.push(data);
        Ok(())
    }

    /// Keeps the rows of the sequences looked at.
    fn read_over(&mut self, layout: &Layout, buffer: &D::Buffer, width: usize) -> Result<(), DeviceError> {
        let mut data = Vec::new();
        for range in self.scene.ranges(layout, width) {
            let first = data.len();
            data.resize(first + range.len(), 0.0);
            self.device.download(buffer, range.start, &mut data[first..])?;
        }
        self.results.push(data);
        Ok(())
    }

    fn read_rows(&mut self, buffer: &D::Buffer, width: usize) -> Result<(), DeviceError> {
        self.read_over(&self.scene.rows, buffer, width)
    }
}
