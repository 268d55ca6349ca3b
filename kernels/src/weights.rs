//! Weights on the host: views into mapped files, as stored.
//!
//! Maps an open file; never opens one by name.
#![expect(unsafe_code, reason = "the address of mapped weights")]

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

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
