//! Weights on the host: views into mapped files, as stored.
//!
//! Maps an open file; never opens one by name.
#![expect(unsafe_code, reason = "the address of mapped weights")]

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::Mmap;

use crate::{philox, uniform};

/// How an element is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants are the field's own names")]
pub enum DType {
    F32,
    F16,
    BF16,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }
}

/// Random numbers of a weight, uniform in [`centre` - `range`, `centre` + `range`): element 4 i + j, in row-major order, is
/// `(2 uniform(philox(key, [i, i >> 32, 0, 1])[j]) - 1) range + centre`, the last two operations rounded once, then rounded to how it is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// Key of the stream.
    pub key: u64,
    /// The middle.
    pub centre: f32,
    /// How far from it.
    pub range: f32,
}

/// Where a weight comes from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A tensor at hand.
    Stored(&'a HostTensor),
    /// [`HostTensor::random`] of this shape.
    Random {
        /// The shape.
        shape: &'a [usize],
        /// How it is stored.
        dtype: DType,
        /// The numbers.
        numbers: Numbers,
    },
}

/// Weights on a card that other processes can hold too.
#[derive(Debug)]
pub struct SharedWeights {
    /// Extents of memory: a descriptor and bytes each. The memory lives as long as any process holds it.
    pub extents: Vec<(OwnedFd, u64)>,
    /// Where the weights lie, in the order in which they are loaded.
    pub places: Vec<SharedPlace>,
}

/// Where a weight lies in memory that is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPlace {
    /// In which extent.
    pub extent: u64,
    /// Its first byte there.
    pub first: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// A mapped file.
#[derive(Clone, Debug)]
pub struct Mapped(Arc<Mmap>);

/// A file could not be mapped.
#[derive(Debug, thiserror::Error)]
#[error("the file could not be mapped")]
pub struct MapError(#[from] std::io::Error);

impl Mapped {
    /// Maps the whole file for reading.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn new(file: &File) -> Result<Self, MapError> {
        // SAFETY: the mapping is private and read-only. What could break it is another process that truncates or rewrites the file while it is
        // mapped; the store that hands us files writes each once, under a temporary name, and then only ever unlinks it.
        let map = unsafe { Mmap::map(file) }?;
        Ok(Self(Arc::new(map)))
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A tensor in a mapped file, or in memory.
#[derive(Clone, Debug)]
pub struct HostTensor {
    storage: Storage,
    dtype: DType,
    shape: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Storage {
    Mapped(Mapped, Range<usize>),
    Owned(Arc<[u8]>),
}

impl HostTensor {
    /// A view of `range` of a mapped file. None where the range is not inside the file or not of the shape's size.
    #[must_use]
    pub fn mapped(file: &Mapped, range: Range<usize>, dtype: DType, shape: Vec<usize>) -> Option<Self> {
        let len = shape.iter().try_fold(dtype.bytes(), |n, d| n.checked_mul(*d))?;
        let fits = range.start <= range.end && range.end <= file.bytes().len() && range.len() == len;
        fits.then(|| Self { storage: Storage::Mapped(file.clone(), range), dtype, shape })
    }

    /// A float32 tensor in memory. None where the data is not of the shape's size.
    #[must_use]
    pub fn from_f32(data: &[f32], shape: Vec<usize>) -> Option<Self> {
        let fits = shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d))? == data.len();
        fits.then(|| Self { storage: Storage::Owned(bytemuck::cast_slice(data).into()), dtype: DType::F32, shape })
    }

    /// Random numbers in memory. None where the shape holds more elements than can be counted.
    #[must_use]
    pub fn random(shape: &[usize], dtype: DType, numbers: Numbers) -> Option<Self> {
        let len = shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d))?;
        let mut bytes = Vec::with_capacity(len.checked_mul(dtype.bytes())?);
        for quad in 0..len.div_ceil(4) as u64 {
            let words = philox(numbers.key, [quad as u32, (quad >> 32) as u32, 0, 1]);
            let left = len - 4 * quad as usize;
            for value in words.into_iter().take(left).map(|word| (2.0 * uniform(word) - 1.0).mul_add(numbers.range, numbers.centre)) {
                match dtype {
                    DType::F32 => bytes.extend(value.to_le_bytes()),
                    DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                    DType::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
                }
            }
        }
        Some(Self { storage: Storage::Owned(bytes.into()), dtype, shape: shape.to_vec() })
    }

    /// How it is stored.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its shape; a weight matrix is (out, in).
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its bytes, little-endian, row-major.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Mapped(file, range) => &file.bytes()[range.clone()],
            Storage::Owned(bytes) => bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::{DType, HostTensor, Numbers};

    #[test]
    fn random_numbers_lie_about_their_centre_and_are_rounded_to_their_type() {
        let numbers = Numbers { key: 7, centre: 1.0, range: 0.25 };
        let wide = HostTensor::random(&[9, 1111], DType::F32, numbers).unwrap();
        let values: &[f32] = bytemuck::cast_slice(wide.bytes());
        assert_eq!(values.len(), 9999);
        assert!(values.iter().all(|value| (0.75..1.25).contains(value)));
        let mean = values.iter().sum::<f32>() / 9999.0;
        assert!((mean - 1.0).abs() < 0.01, "{mean}");
        let narrow = HostTensor::random(&[9, 1111], DType::BF16, numbers).unwrap();
        let rounded: Vec<u8> = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        assert_eq!(narrow.bytes(), rounded);
        assert!(HostTensor::random(&[usize::MAX, 2], DType::F32, numbers).is_none());
    }
}
