//! The CPU device keeps sequences apart, by the same check as the card's gate.

use nodus_kernels::AttentionShape;
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::exercise::{Sizes, independence, names};

#[test]
fn neighbours_of_nan_change_no_bit_on_the_cpu() {
    let attention = AttentionShape { heads: 4, kv_heads: 2, head_dim: 24, window: Some(50) };
    let found = independence(&mut CpuDevice::new(2).unwrap(), Sizes { attention, vocabulary: 203, rank: 5, seed: 3 }).unwrap();
    assert_eq!(found.len(), names().len());
    for operation in found {
        assert!(operation.cases > 0 && operation.unequal == 0, "{operation:?}");
    }
}
