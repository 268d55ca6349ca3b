//! Safetensors: mapped files to tensors by name, and tensors to bytes.
//!
//! The container is the `safetensors` crate's business; here its refusals get a file, a tensor and an expectation.

use std::collections::HashMap;

use nodus_kernels::{DType, HostTensor, Mapped};
use safetensors::tensor::{Dtype, Metadata, TensorInfo, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use serde_json::Value;

use crate::error::{FormatError, Place, clip};

/// A mapped safetensors file whose header is sound: every tensor lies inside the file and is of its shape's size.
pub(crate) struct TensorFile {
    name: String,
    map: Mapped,
    data_start: usize,
    metadata: Metadata,
}

impl TensorFile {
    pub(crate) fn parse(name: &str, map: Mapped) -> Result<Self, FormatError> {
        let (header, metadata) = SafeTensors::read_metadata(map.bytes()).map_err(|e| refusal(name, map.bytes(), &e))?;
        Ok(Self { name: name.into(), data_start: 8 + header, metadata, map })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = String> {
        self.metadata.tensors().into_keys()
    }

    pub(crate) fn contains(&self, tensor: &str) -> bool {
        self.metadata.info(tensor).is_some()
    }

    /// A view of a tensor, which must be of this shape and of a type that can be computed with.
    pub(crate) fn tensor(&self, tensor: &str, shape: &[usize]) -> Result<HostTensor, FormatError> {
        let invalid = |found: String, expected: String| FormatError::invalid(&self.name, Place::tensor(tensor), found, expected);
        let info = self.metadata.info(tensor).ok_or_else(|| invalid("absent".into(), format!("a tensor of shape {shape:?}")))?;
        if info.shape != shape {
            return Err(invalid(format!("shape {:?}", info.shape), format!("{shape:?}")));
        }
        let dtype = match info.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => return Err(FormatError::unsupported(&self.name, Place::tensor(tensor), format!("type {other}"), "F32, F16 or BF16")),
        };
        let (start, end) = info.data_offsets;
        HostTensor::mapped(&self.map, self.data_start + start..self.data_start + end, dtype, shape.to_vec())
            .ok_or_else(|| invalid("offsets outside the file".into(), "offsets inside it".into()))
    }
}

/// The elements of a tensor, widened to float32 (exactly: every F16 and BF16 value is a float32 value).
pub(crate) fn to_f32(tensor: &HostTensor) -> Vec<f32> {
    widened(tensor.bytes(), tensor.dtype())
}

/// [`to_f32`] of elements of this type.
pub(crate) fn widened(bytes: &[u8], dtype: DType) -> Vec<f32> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        DType::F16 => pairs().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
        DType::BF16 => pairs().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}

/// A whole float32 file with the metadata that transformers and PEFT expect, tensors in the order of their names.
pub(crate) fn to_bytes<'a>(name: &str, tensors: impl IntoIterator<Item = (String, Vec<usize>, &'a [f32])>) -> Result<Vec<u8>, FormatError> {
    let failed = |e: SafeTensorError| FormatError::invalid(name, Place::File, e, "tensors that safetensors can hold");
    let mut views = Vec::new();
    for (tensor, shape, data) in tensors {
        views.push((tensor, TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(data)).map_err(failed)?));
    }
    safetensors::serialize(views, Some(pytorch())).map_err(failed)
}

/// The start of a file: everything before the data of these tensors, which follows in the order given.
pub(crate) fn header(name: &str, tensors: &[(String, DType, Vec<usize>)]) -> Result<Vec<u8>, FormatError> {
    let failed = |e: String| FormatError::invalid(name, Place::File, e, "tensors that safetensors can hold");
    let mut offset = 0;
    let infos = tensors.iter().map(|(tensor, dtype, shape)| {
        let start = offset;
        offset += dtype.bytes() * shape.iter().product::<usize>();
        let dtype = match dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
        };
        (tensor.clone(), TensorInfo { dtype, shape: shape.clone(), data_offsets: (start, offset) })
    });
    let metadata = Metadata::new(Some(pytorch()), infos.collect()).map_err(|e| failed(e.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| failed(e.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

fn pytorch() -> HashMap<String, String> {
    HashMap::from([("format".into(), "pt".into())])
}

/// Turns the crate's refusal into one that says which tensor and what would be right.
fn refusal(file: &str, bytes: &[u8], error: &SafeTensorError) -> FormatError {
    let whole = |found: String, expected: &str| FormatError::invalid(file, Place::File, found, expected);
    match error {
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            whole(format!("{} bytes, which end inside the header", bytes.len()), "a whole safetensors file")
        }
        SafeTensorError::HeaderTooLarge => whole("a header of more than 100 MB".into(), "a safetensors file"),
        SafeTensorError::InvalidHeader(_) | SafeTensorError::InvalidHeaderDeserialization(_) => {
            whole(format!("a header that is not a list of tensors ({error})"), "a safetensors file")
        }
        SafeTensorError::InvalidOffset(tensor) => {
            let expected = "each tensor to begin where the one before it ends, and each name once";
            FormatError::invalid(file, Place::tensor(tensor), "a gap, an overlap or a duplicate", expected)
        }
        _ => sized_wrong(file, bytes).unwrap_or_else(|| whole(error.to_string(), "a safetensors file")),
    }
}

/// Finds the first tensor that is not of its shape's size, or that the file is too short for.
fn sized_wrong(file: &str, bytes: &[u8]) -> Option<FormatError> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let map: serde_json::Map<String, Value> = serde_json::from_slice(header).ok()?;
    let mut end_max = 0;
    for (tensor, info) in map.iter().filter(|(name, _)| *name != "__metadata__") {
        let TensorInfo { dtype, shape, data_offsets: (start, end) } = serde_json::from_value(info.clone()).ok()?;
        let bits = shape.iter().try_fold(dtype.bitsize(), |n, d| n.checked_mul(*d));
        if bits.is_none_or(|bits| Some(bits / 8) != end.checked_sub(start) || bits % 8 != 0) {
            let found = format!("{} bytes for {dtype} of shape {}", end.saturating_sub(start), clip(&format!("{shape:?}")));
            return Some(FormatError::invalid(file, Place::tensor(tensor), found, "as many bytes as type and shape make"));
        }
        if end > data.len() {
            let found = format!("a file that ends {} bytes before the tensor does", end - data.len());
            return Some(FormatError::invalid(file, Place::tensor(tensor), found, "a whole file; it was cut off"));
        }
        end_max = end_max.max(end);
    }
    let found = format!("{} bytes after the last tensor", data.len().checked_sub(end_max)?);
    Some(FormatError::invalid(file, Place::File, found, "none"))
}
