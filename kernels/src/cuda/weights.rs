//! Frozen weights: from files or random numbers to the card, those that are used together one after another in one block; or those that another process has there.
//!
//! Never written to again.
#![expect(unsafe_code, reason = "fills memory of its own")]

use std::sync::Arc;

use super::device::{CudaDevice, CudaWeight, Element};
use super::memory::Block;
use super::{linear, support};
use crate::{DeviceError, Source, Use};

fn shape<'a>(source: &Source<'a>) -> &'a [usize] {
    match source {
        Source::Stored(tensor) => tensor.shape(),
        Source::Random { shape, .. } => shape,
    }
}

/// Rows and columns of a weight; a vector is one row.
fn matrix_shape(shape: &[usize]) -> Result<(usize, usize), DeviceError> {
    match *shape {
        [len] => Ok((1, len)),
        [rows, columns] => Ok((rows, columns)),
        _ => Err(DeviceError::Unsupported(format!("a weight of shape {shape:?}; a matrix or a vector was expected"))),
    }
}

/// Elements of all of them.
fn count(shapes: &[(usize, usize)], free_bytes: u64) -> Result<usize, DeviceError> {
    let too_large = DeviceError::OutOfMemory { needed_bytes: u64::MAX, free_bytes };
    let mut lens = shapes.iter().map(|(rows, columns)| rows.checked_mul(*columns));
    let sum = lens.try_fold(0_usize, |sum, len| sum.checked_add(len?));
    sum.filter(|len| *len <= usize::MAX / 4).ok_or(too_large)
}

/// A weight by itself.
pub(super) fn load_one(device: &mut CudaDevice, part: Source<'_>) -> Result<CudaWeight, DeviceError> {
    load(device, &[part])?.pop().ok_or_else(|| DeviceError::Failed("a weight was loaded as none".to_owned()))
}

/// Loads weights that read the same inputs and pins the algorithms of the product of all of them; or vectors, one after another.
pub(super) fn load(device: &mut CudaDevice, parts: &[Source<'_>]) -> Result<Vec<CudaWeight>, DeviceError> {
    let shapes = parts.iter().map(|part| matrix_shape(shape(part))).collect::<Result<Vec<_>, _>>()?;
    let vectors = parts.iter().all(|part| shape(part).len() == 1);
    let Some((_, inputs)) = shapes.first().copied() else { return Ok(Vec::new()) };
    if !vectors && shapes.iter().zip(parts).any(|((_, columns), part)| *columns != inputs || shape(part).len() == 1) {
        return Err(DeviceError::Unsupported(format!("weights of shapes {shapes:?} together; one number of inputs was expected")));
    }
    let len = count(&shapes, device.pool.available_bytes(0))?;
    let element = device.element(Use::Activation);
    let (block, is_there) = device.pool.weight(len * element.bytes())?;
    let block = Arc::new(block);
    let (mut weights, mut offset) = (Vec::with_capacity(parts.len()), 0);
    for (number, (part, shape)) in parts.iter().zip(&shapes).enumerate() {
        let len = shape.0 * shape.1;
        if !is_there {
            fill(device, part, (&block, offset), element, len)?;
        }
        let mut wide = None;
        if vectors {
            let (block, is_there) = device.pool.weight(len * 4)?;
            if !is_there {
                fill(device, part, (&block, 0), Element::F32, len)?;
            }
            wide = Some(block);
        }
        weights.push(CudaWeight { block: Arc::clone(&block), offset, place: (number, parts.len()), wide, shape: *shape });
        offset += len * element.bytes();
    }
    if !vectors {
        linear::plan(device, shapes.iter().map(|(outputs, _)| outputs).sum(), inputs)?;
    }
    Ok(weights)
}

/// The elements of one of them, `offset` bytes into a block that has room for them.
fn fill(
    device: &mut CudaDevice,
    part: &Source<'_>,
    (block, offset): (&Block, usize),
    element: Element,
    len: usize,
) -> Result<(), DeviceError> {
    assert!(offset + len * element.bytes() <= block.bytes(), "a weight past the end of its block");
    match part {
        Source::Stored(tensor) => device.upload_as((block, offset), element, tensor.dtype(), tensor.bytes()),
        Source::Random { dtype, numbers, .. } => {
            // SAFETY: checked just above.
            unsafe { support::fill_random(device, block.address() + offset as u64, (len, element), *dtype, *numbers) }
        }
    }
}

/// The outputs of some weights together, where they are all of those that were loaded together, in order.
pub(super) fn together<'w>(weights: impl ExactSizeIterator<Item = &'w CudaWeight>) -> Option<usize> {
    let (count, mut block, mut outputs) = (weights.len(), None, 0);
    for (number, weight) in weights.enumerate() {
        let first = *block.get_or_insert(&weight.block);
        if !Arc::ptr_eq(&weight.block, first) || weight.place != (number, count) {
            return None;
        }
        outputs += weight.shape.0;
    }
    Some(outputs)
}
