//! Memory of the CPU device: counted, bounded, zeroed at birth and at death.
//!
//! Never gives memory back to the allocator with what a tenant wrote still in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::DeviceError;

/// How many bytes live and how many may.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    used: Arc<AtomicU64>,
    limit: u64,
}

impl Budget {
    pub(super) fn new(limit: u64) -> Self {
        Self { used: Arc::default(), limit }
    }

    /// From now on so many may.
    pub(super) fn bound(&mut self, limit: u64) {
        self.limit = limit;
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(super) fn free(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }

    /// A zeroed buffer of `len` elements, counted until it is dropped.
    pub(super) fn alloc(&self, len: usize) -> Result<CpuBuffer, DeviceError> {
        let needed_bytes = (len as u64).saturating_mul(size_of::<f32>() as u64);
        let out_of_memory = |_| DeviceError::OutOfMemory { needed_bytes, free_bytes: self.free() };
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| used.checked_add(needed_bytes).filter(|used| *used <= self.limit))
            .map_err(out_of_memory)?;
        let mut buffer = CpuBuffer { data: Vec::new(), counted_bytes: needed_bytes, used: self.used.clone() };
        buffer.data.try_reserve_exact(len).map_err(|_| out_of_memory(0))?;
        buffer.data.resize(len, 0.0);
        Ok(buffer)
    }
}

/// A float32 array of the CPU device.
#[derive(Debug)]
pub struct CpuBuffer {
    pub(super) data: Vec<f32>,
    counted_bytes: u64,
    used: Arc<AtomicU64>,
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        wipe(&mut self.data);
        self.used.fetch_sub(self.counted_bytes, Ordering::Relaxed);
    }
}

/// Overwrites with zeros, also where nothing reads them any more.
pub(super) fn wipe(data: &mut [f32]) {
    data.fill(0.0);
    // Without a reader the compiler may leave out stores to memory that is about to be freed.
    std::hint::black_box(&mut *data);
    #[cfg(test)]
    tests::WIPED.set(tests::WIPED.get() + data.len());
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::{Budget, wipe};
    use crate::DeviceError;

    thread_local! {
        /// Elements wiped on this thread.
        pub(super) static WIPED: Cell<usize> = const { Cell::new(0) };
    }

    #[test]
    fn wiping_zeroes() {
        let mut data = [1.0, f32::NAN, -0.0];
        wipe(&mut data);
        assert_eq!(data.map(f32::to_bits), [0; 3]);
    }

    #[test]
    fn a_buffer_is_zeroed_at_birth_and_wiped_at_death() {
        let budget = Budget::new(u64::MAX);
        let buffer = budget.alloc(1000).unwrap();
        assert!(buffer.data.len() == 1000 && buffer.data.iter().all(|x| x.to_bits() == 0));
        let before = WIPED.get();
        drop(buffer);
        assert_eq!(WIPED.get() - before, 1000);
    }

    #[test]
    fn bytes_are_counted_and_bounded() {
        let budget = Budget::new(100);
        let buffer = budget.alloc(20).unwrap();
        assert_eq!((budget.used(), budget.free()), (80, 20));
        let refusal = budget.alloc(6).unwrap_err();
        assert!(matches!(refusal, DeviceError::OutOfMemory { needed_bytes: 24, free_bytes: 20 }));
        assert!(matches!(budget.alloc(usize::MAX), Err(DeviceError::OutOfMemory { .. })));
        drop(buffer);
        assert_eq!((budget.used(), budget.free()), (0, 100));
        let (mut budget, buffer) = (budget.clone(), budget.alloc(20).unwrap());
        budget.bound(40);
        assert_eq!((budget.used(), budget.free()), (80, 0), "what lives stays");
        assert!(budget.alloc(1).is_err());
        drop(buffer);
        assert!(budget.alloc(10).is_ok());
        assert!(matches!(Budget::new(u64::MAX).alloc(usize::MAX / 4), Err(DeviceError::OutOfMemory { .. })));
    }
}
