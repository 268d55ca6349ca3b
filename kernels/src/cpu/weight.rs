//! Frozen weights: mapped where they are stored as aligned float32, else widened once.
//!
//! Never written to.

use half::{bf16, f16};

use crate::{DType, HostTensor};

/// A frozen weight of the CPU device.
#[derive(Debug)]
pub struct CpuWeight(Elements);

#[derive(Debug)]
enum Elements {
    /// Stored as this machine reads float32.
    Stored(HostTensor),
    Widened {
        data: Vec<f32>,
        shape: Vec<usize>,
    },
}

impl CpuWeight {
    pub(super) fn load(tensor: &HostTensor) -> Self {
        if as_f32(tensor).is_some() {
            return Self(Elements::Stored(tensor.clone()));
        }
        let data = match tensor.dtype() {
            DType::F32 => tensor.bytes().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::F16 => tensor.bytes().as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            DType::BF16 => tensor.bytes().as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        };
        Self(Elements::Widened { data, shape: tensor.shape().to_vec() })
    }

    /// The elements, row-major.
    pub(super) fn data(&self) -> &[f32] {
        match &self.0 {
            Elements::Stored(tensor) => as_f32(tensor).unwrap_or_default(),
            Elements::Widened { data, .. } => data,
        }
    }

    /// (out, in).
    pub(super) fn matrix(&self) -> (usize, usize) {
        match *self.shape() {
            [outputs, inputs] => (outputs, inputs),
            ref other => panic!("a weight matrix (out, in) was expected, this weight's shape is {other:?}"),
        }
    }

    /// The elements of a vector.
    pub(super) fn vector(&self) -> &[f32] {
        assert!(self.shape().len() == 1, "a weight vector was expected, this weight's shape is {:?}", self.shape());
        self.data()
    }

    fn shape(&self) -> &[usize] {
        match &self.0 {
            Elements::Stored(tensor) => tensor.shape(),
            Elements::Widened { shape, .. } => shape,
        }
    }
}

/// The tensor's bytes as elements, where they are float32, little-endian like this machine, and aligned.
fn as_f32(tensor: &HostTensor) -> Option<&[f32]> {
    let readable = tensor.dtype() == DType::F32 && cfg!(target_endian = "little");
    readable.then(|| bytemuck::try_cast_slice(tensor.bytes()).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use half::{bf16, f16};

    use super::CpuWeight;
    use crate::{DType, HostTensor, Mapped};

    fn mapped(bytes: &[u8], start: usize, dtype: DType, len: usize) -> HostTensor {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        HostTensor::mapped(&Mapped::new(&file).unwrap(), start..start + len * dtype.bytes(), dtype, vec![len]).unwrap()
    }

    #[test]
    fn aligned_float32_is_used_where_it_is_mapped() {
        let tensor = mapped(bytemuck::cast_slice(&[0.0_f32, 1.5, -2.0]), 4, DType::F32, 2);
        let weight = CpuWeight::load(&tensor);
        assert_eq!(weight.vector(), [1.5, -2.0]);
        assert!(std::ptr::eq(weight.data().as_ptr().cast(), tensor.bytes().as_ptr()), "the weight was copied");
    }

    #[test]
    fn everything_else_is_widened() {
        let mut odd = vec![0; 2];
        odd.extend([1.5_f32, -2.0].iter().flat_map(|x| x.to_le_bytes()));
        let half: Vec<u8> = [1.5, -2.0].iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        let brain: Vec<u8> = [1.5, -2.0].iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        for (bytes, start, dtype) in [(odd, 2, DType::F32), (half, 0, DType::F16), (brain, 0, DType::BF16)] {
            assert_eq!(CpuWeight::load(&mapped(&bytes, start, dtype, 2)).vector(), [1.5, -2.0], "{dtype:?}");
        }
    }

    #[test]
    #[should_panic(expected = "a weight matrix (out, in) was expected, this weight's shape is [2]")]
    fn a_vector_is_no_matrix() {
        CpuWeight::load(&HostTensor::from_f32(&[1.0, 2.0], vec![2]).unwrap()).matrix();
    }
}
