//! Memory on the card: zero where somebody gets it, and no more of it than a bound says.

use nodus_kernels::cuda::Precision;
use nodus_kernels::{Device, DeviceError, Use};

use super::open;

/// Memory is zero when handed out, whatever was in it; and is counted.
#[test]
fn memory_is_zeroed_and_counted() {
    let Some(mut device) = open("memory_is_zeroed_and_counted", Precision::Bf16) else { return };
    let before = device.allocated_bytes();
    for (usage, len) in [(Use::State, 1), (Use::Activation, 100_000), (Use::State, 5_000_000)] {
        for _ in 0..3 {
            let mut buffer = device.alloc(usage, len).unwrap();
            assert!(device.allocated_bytes() > before);
            let mut data = vec![1.0; len];
            device.download(&buffer, 0, &mut data).unwrap();
            assert!(data.iter().all(|value| *value == 0.0), "{usage:?} {len}");
            device.fill_uniform(&mut buffer, 1, 8.0).unwrap();
            device.download(&buffer, 0, &mut data).unwrap();
            assert!(data.iter().any(|value| *value != 0.0));
        }
    }
    assert_eq!(device.allocated_bytes(), before);
    let free = device.free_bytes();
    let refused = device.alloc(Use::State, usize::MAX / 8).unwrap_err();
    assert!(matches!(refused, nodus_kernels::DeviceError::OutOfMemory { .. }), "{refused}");
    assert!(free > 0 && device.free_bytes() > free / 2, "a refusal costs nothing");
}

/// A bound is one on what is taken from the driver: growing in large pieces is within it. What a pass has dropped is not refused to it again, though its
/// places are not handed out twice; what that takes beyond the bound goes back when the bound is set again.
#[test]
fn buffers_take_no_more_than_they_may() {
    let Some(mut device) = open("buffers_take_no_more_than_they_may", Precision::Bf16) else { return };
    let (mebibyte, bound) = (1_u64 << 20, 100_u64 << 20);
    device.bound(bound).unwrap();
    for _ in 0..2 {
        device.begin_pass().unwrap();
        let mut held = Vec::new();
        let refused = loop {
            match device.alloc(Use::State, 30 << 18) {
                Ok(buffer) => held.push(buffer),
                Err(error) => break error,
            }
            assert!(device.held_bytes() <= bound, "{} MiB", device.held_bytes() / mebibyte);
            assert!(device.free_bytes() <= bound - held.len() as u64 * 30 * mebibyte);
        };
        assert!(matches!(refused, DeviceError::OutOfMemory { needed_bytes, free_bytes } if needed_bytes > free_bytes), "{refused}");
        assert_eq!(held.len(), 3, "a chunk of 64 MiB has two, and one has room of its own");
        held.clear();
        let again = device.alloc(Use::State, 30 << 18).unwrap();
        assert_eq!(device.held_bytes(), bound / 100 * 124, "places of its own");
        drop(again);
        device.end_pass().unwrap();
        assert_eq!(device.free_bytes(), bound, "all of it is there for the next");
        device.bound(bound).unwrap();
        assert!(device.held_bytes() <= bound);
    }
    // Outside a pass what is kept makes room.
    let buffer = device.alloc(Use::State, 90 << 18).unwrap();
    assert!(device.held_bytes() <= bound);
    drop(buffer);
    device.bound(10 << 20).unwrap();
    assert!(device.held_bytes() <= 10 << 20);
}

/// What a pass leaves is there in the next, and zero once it was forgotten.
#[test]
fn what_passes_leave_is_zeroed_when_it_is_forgotten() {
    let Some(mut device) = open("what_passes_leave_is_zeroed_when_it_is_forgotten", Precision::Bf16) else { return };
    let mut pass = |forget: bool| {
        if forget {
            device.forget_passes().unwrap();
        }
        device.begin_pass().unwrap();
        let mut buffer = device.alloc(Use::State, 100_000).unwrap();
        let mut found = vec![1.0; 100_000];
        device.download(&buffer, 0, &mut found).unwrap();
        device.fill_uniform(&mut buffer, 1, 8.0).unwrap();
        drop(buffer);
        device.end_pass().unwrap();
        found.iter().filter(|value| **value != 0.0).count()
    };
    assert_eq!(pass(false), 0, "never used");
    assert!(pass(false) > 90_000, "another place");
    assert_eq!(pass(true), 0);
}
