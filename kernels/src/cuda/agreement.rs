//! The check beside the gate: what an operation computes here must be what the CPU device computes, but for rounding.
//!
//! Never lets a card serve that is wrong for every job alike: that is what a compiler's fault looks like, and the gate, which compares the card with
//! itself, cannot see it.

use std::thread::ScopedJoinHandle;

use super::device::CudaDevice;
use super::{Precision, verdict::Agreement};
use crate::cpu::CpuDevice;
use crate::exercise::{Results, Sequences, Sizes, difference, exercise, names};
use crate::{AttentionShape, DeviceError};

/// Several tiles of rows and of keys, none of which is full.
const SEQUENCES: Sequences<'static> = Sequences { anchors: &[130, 17], before: &[2], after: &[] };

/// What rounding explains, as [`difference`] measures it, several times over. bf16 has eight bits: each of the few roundings on the way to a result is up
/// to 2^-9 (2e-3) off, and 9e-3 is the most that was found on cards for any operation of any shape; float32 sums of thousands are some units of 6e-8 off, 1e-5
/// at most where exponentials are made of them. What is wrong is further off: one row of the 147 is 8e-2, a tile of 16 of them 0.3, and a number of the size
/// of the others 0.2 or more.
pub(super) fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 2e-4,
        Precision::Bf16 => 3e-2,
    }
}

/// The widest stream of the check: what the CPU device has computed before the gate is through. No kernel goes about wider rows otherwise.
const WIDEST: usize = 2048;

/// The sizes of the check: a model's own heads, and with them its width, of so many of its key heads as are not too wide.
pub(super) fn sizes(attention: AttentionShape) -> Sizes {
    let AttentionShape { heads, kv_heads, head_dim, .. } = attention;
    let group = heads / kv_heads.max(1);
    let kv_heads = kv_heads.min((WIDEST / (group * head_dim).max(1)).max(1));
    Sizes {
        attention: AttentionShape { heads: group * kv_heads, kv_heads, head_dim, window: Some(50) },
        vocabulary: 1003,
        rank: 9,
        seed: 2,
    }
}

/// What the CPU device computes: for heads of each shape the results of each operation.
pub(super) type Expected = Vec<Vec<Results>>;

/// The thread on which it does.
pub(super) type Twin<'scope> = ScopedJoinHandle<'scope, Result<Expected, DeviceError>>;

/// Runs every operation with heads of these shapes on the CPU device.
///
/// # Errors
/// Too little memory.
pub(super) fn expected(heads: &[AttentionShape]) -> Result<Expected, DeviceError> {
    let mut twin = CpuDevice::new(std::thread::available_parallelism().map_or(1, usize::from))?;
    let mut all = |heads| (0..names().len()).map(|operation| exercise(&mut twin, operation, sizes(heads), SEQUENCES)).collect();
    heads.iter().map(|heads| all(*heads)).collect()
}

impl CudaDevice {
    /// Runs every operation with heads of these shapes beside what the CPU device computed: the largest difference of each. Products that are not
    /// planned go by the fixed-tile kernel, which the gate compares the planned ones with.
    ///
    /// # Errors
    /// `Failed` where one is further off than rounding explains, with the names of all that are; a failed device, or too little memory.
    pub(super) fn agreements(&mut self, heads: &[AttentionShape], expected: &Expected) -> Result<Vec<Agreement>, DeviceError> {
        self.plans_fixed_tiles = true;
        let found = self.compare(heads, expected);
        self.plans_fixed_tiles = false;
        let (found, most) = (found?, tolerance(self.precision));
        let wrong: Vec<String> = found.iter().filter(|agreement| agreement.difference() > most).map(ToString::to_string).collect();
        if wrong.is_empty() {
            return Ok(found);
        }
        let wrong = wrong.join("; ");
        Err(DeviceError::Failed(format!(
            "kernels on this card compute something else than the CPU does, {most:.1e} of difference being rounding: {wrong}. Another version of NVRTC or of the driver may do better"
        )))
    }

    fn compare(&mut self, heads: &[AttentionShape], expected: &Expected) -> Result<Vec<Agreement>, DeviceError> {
        let mut found: Vec<Agreement> = names().into_iter().map(Agreement::none).collect();
        for (heads, expected) in heads.iter().zip(expected) {
            for (operation, (agreement, expected)) in found.iter_mut().zip(expected).enumerate() {
                agreement.add(difference(&exercise(self, operation, sizes(*heads), SEQUENCES)?, expected));
            }
        }
        Ok(found)
    }

    /// Puts a kernel in the place of another that takes the same parameters, and writes no more: what is computed is wrong for everybody alike.
    #[cfg(feature = "broken-kernel")]
    #[doc(hidden)]
    pub fn misplace(&mut self, kernel: &'static str, by: &'static str) {
        self.kernels.misplace(kernel, by);
    }
}
