//! AdamW of many adapters at once: the launches of adamw.cu.
//!
//! Never lets one adapter's numbers meet another's.
#![expect(unsafe_code, reason = "launches kernels")]

use super::device::{CudaBuffer, CudaDevice};
use super::driver::Address;
use super::record::Access;
use crate::{AdamWItem, DeviceError, Use};

/// Of adamw.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct Item {
    params: Address,
    grads: Address,
    moment1: Address,
    moment2: Address,
    len: u64,
    divisor: f32,
    max_norm: f32,
    learning_rate: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    step_size: f32,
    correction2: f32,
    norm_index: u32,
    first_block: u32,
    blocks: u32,
}

/// The parameters of adamw.cu.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::NoUninit)]
struct AdamW {
    items: Address,
    item_of_block: Address,
    squares: Address,
    factors: Address,
    norms: Address,
}

/// Elements of a block; as adamw.cu.
const BLOCK: usize = 4096;

pub(super) fn adamw(device: &mut CudaDevice, items: &mut [AdamWItem<'_, CudaBuffer>], norms: &mut CudaBuffer) -> Result<(), DeviceError> {
    let (mut table, mut item_of_block) = (Vec::with_capacity(items.len()), Vec::new());
    for (index, item) in items.iter().enumerate() {
        let len = item.params.len;
        assert!([item.grads.len, item.moment1.len, item.moment2.len] == [len; 3], "an adapter's arrays are not of one size");
        assert!(item.norm_index < norms.len, "norm {} of {}", item.norm_index, norms.len);
        assert!(item.max_grad_norm.is_none_or(|max| max >= 0.0), "a negative maximum norm");
        let correction = |beta: f32| 1.0 - f64::from(beta).powf(item.step as f64);
        let first_block = item_of_block.len();
        item_of_block.resize(first_block + len.div_ceil(BLOCK), index as u32);
        table.push(Item {
            params: device.read("params", item.params, Use::State),
            grads: device.read("grads", item.grads, Use::State),
            moment1: device.read("moment1", item.moment1, Use::State),
            moment2: device.read("moment2", item.moment2, Use::State),
            len: len as u64,
            divisor: item.divisor,
            max_norm: item.max_grad_norm.unwrap_or(-1.0),
            learning_rate: item.learning_rate,
            beta1: item.beta1,
            beta2: item.beta2,
            eps: item.eps,
            weight_decay: item.weight_decay,
            step_size: (f64::from(item.learning_rate) / correction(item.beta1)) as f32,
            correction2: correction(item.beta2).sqrt() as f32,
            norm_index: item.norm_index as u32,
            first_block: first_block as u32,
            blocks: len.div_ceil(BLOCK) as u32,
        });
    }
    let arguments = AdamW {
        items: device.table(&table)?,
        item_of_block: device.table(&item_of_block)?,
        squares: device.scratch("adamw squares", item_of_block.len() * 8)?,
        factors: device.scratch("adamw factors", table.len() * 4)?,
        norms: device.read("norms", norms, Use::State),
    };
    let blocks = [item_of_block.len(), 1, 1];
    // The items' arrays are written by this step alone.
    let scratch = [arguments.squares, arguments.factors];
    let (squares, norms, update) =
        (device.kernels.get("adamw_squares"), device.kernels.get("adamw_norms"), device.kernels.get("adamw_update"));
    // SAFETY: `AdamW` and `Item` are adamw.cu's structs; blocks cover the items; the scratch, a number a block, is all that is written.
    unsafe { device.launch(squares, blocks, 256, 0, &arguments, Access { reads: &[], writes: &scratch[..1] }) }?;
    let written = [arguments.factors, arguments.norms];
    // SAFETY: as above; a block an item; norms, at checked places, and the scratch are written.
    unsafe { device.launch(norms, [table.len(), 1, 1], 256, 0, &arguments, Access { reads: &scratch[..1], writes: &written }) }?;
    // SAFETY: as above; the items' arrays, unique references of checked sizes, are written.
    unsafe { device.launch(update, blocks, 256, 0, &arguments, Access { reads: &scratch[1..], writes: &[] }) }
}
