//! The gate's comparison of gate, up and SwiGLU in one kernel with their product and SwiGLU's kernel after it.
//!
//! Never raises a shape of which one byte differs.
#![expect(unsafe_code, reason = "launches kernels")]

use super::CASES;
use super::bench::{Bench, Mode, nan};
use crate::DeviceError;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::Address;
use crate::cuda::memory::{Block, Owner};
use crate::cuda::plan::{Key, Product};
use crate::cuda::record::Access;
use crate::cuda::verdict::GateUpCheck;
use crate::cuda::{ROW_ALIGN, gate_up, rows};

/// Compares, of a shape (outputs of gate and up together, and inputs), what the one kernel makes of rows alone and among others with what the product and the
/// kernel after it make of them alone, also of operands that cancel. That those two do not care who stands beside a row is found of each by itself.
pub(super) fn check(device: &mut CudaDevice, shape: (usize, usize)) -> Result<GateUpCheck, DeviceError> {
    let (outputs, inputs) = shape;
    let tiles = CASES.into_iter().map(|(tiles, _)| tiles).max().unwrap_or(1);
    let bench = Bench::new(device, Key { product: Product::Linear, outputs, inputs }, tiles)?;
    let bytes = ROW_ALIGN * outputs / 2 * device.precision.bytes();
    let (both, spare) = (device.pool.alloc(bytes, Owner::Device)?, device.pool.alloc(4, Owner::Device)?);
    let mut found = GateUpCheck { shape, cases: 0, unequal: 0 };
    for cancels in [false, true] {
        bench.fill(device, cancels)?;
        bench.run(device, &bench.solo, (1, 0), Mode { accumulates: false, cancels })?;
        swiglu(device, &bench.solo, &both, outputs)?;
        for (tiles, slot) in [(1, 0)].into_iter().chain(CASES) {
            device.busy(&spare)?;
            bench.place(device, slot, cancels)?;
            // Gate and up are twice as wide as their product: what takes them has room for it.
            device.fill_word(&bench.fused, nan(device.precision))?;
            let [x, weight, out] = [&bench.x, &bench.weight, &bench.fused].map(Block::address);
            // SAFETY: the blocks were made for this weight and for at least as many tiles.
            unsafe { gate_up::launch(device, shape, tiles * ROW_ALIGN, [x, weight, out], Access { reads: &[x], writes: &[out] }) }?;
            found.cases += 1;
            found.unequal += usize::from(device.unequal((&both, 0), (&bench.fused, slot * bytes), bytes)? != 0);
        }
    }
    device.gpu.synchronize_side()?;
    Ok(found)
}

/// SwiGLU's kernel on a tile of rows of gate and up, one beside the other.
fn swiglu(device: &mut CudaDevice, gate_up: &Block, out: &Block, outputs: usize) -> Result<(), DeviceError> {
    let (gate, width) = (gate_up.address(), outputs / 2);
    let up: Address = gate + (width * device.precision.bytes()) as u64;
    device.fill_word(out, nan(device.precision))?;
    let positions = device.table(&[0_u32; ROW_ALIGN])?;
    let access = Access { reads: &[gate], writes: &[out.address()] };
    // SAFETY: the blocks hold a tile of rows so wide, gate and up between them, and positions are as many.
    unsafe { rows::launch_swiglu(device, [gate, up, out.address(), positions], (ROW_ALIGN, width, outputs), access) }
}
