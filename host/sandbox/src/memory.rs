//! What a job's WebAssembly may allocate: sums over all its memories and all its tables.
//!
//! wasmtime's own limiter counts each memory alone, which several memories would slip through.

use wasmtime::ResourceLimiter;

use crate::limits::Limits;

/// Counts a store's memories and tables. A growth that was granted is never given back, even if it fails later:
/// giving back on a failure would let a guest that fails on purpose grow beyond the limit.
#[derive(Debug)]
pub(crate) struct Memory {
    limits: Limits,
    bytes: u64,
    elements: u64,
    /// What the guest's memory would have been when it was last refused.
    refused: Option<u64>,
}

impl Memory {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, bytes: 0, elements: 0, refused: None }
    }

    /// Bytes of all memories. They never shrink.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the guest's memory would have been when it was last refused.
    pub(crate) fn refused(&self) -> Option<u64> {
        self.refused
    }
}

/// Whether a growth fits the type it belongs to; wasmtime refuses it afterwards in any case.
fn fits_type(desired: usize, maximum: Option<usize>) -> bool {
    maximum.is_none_or(|maximum| desired <= maximum)
}

impl ResourceLimiter for Memory {
    fn memory_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        if !fits_type(desired, maximum) {
            return Ok(false);
        }
        let needed = self.bytes.saturating_add(desired.saturating_sub(current) as u64);
        if needed > self.limits.guest_memory_bytes {
            self.refused = Some(needed);
            return Ok(false);
        }
        self.bytes = needed;
        Ok(true)
    }

    fn table_growing(&mut self, current: usize, desired: usize, maximum: Option<usize>) -> wasmtime::Result<bool> {
        if !fits_type(desired, maximum) {
            return Ok(false);
        }
        let needed = self.elements.saturating_add(desired.saturating_sub(current) as u64);
        if needed > self.limits.table_elements {
            return Ok(false);
        }
        self.elements = needed;
        Ok(true)
    }

    fn instances(&self) -> usize {
        usize::try_from(self.limits.instances).unwrap_or(usize::MAX)
    }

    fn tables(&self) -> usize {
        usize::try_from(self.limits.tables).unwrap_or(usize::MAX)
    }

    fn memories(&self) -> usize {
        usize::try_from(self.limits.memories).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memories_are_summed_and_a_growth_that_fails_is_not_given_back() {
        let mut memory = Memory::new(Limits { guest_memory_bytes: 100, table_elements: 10, ..Limits::DEFAULT });
        assert!(memory.memory_growing(0, 60, None).unwrap());
        assert!(memory.memory_growing(0, 40, None).unwrap());
        memory.memory_grow_failed(wasmtime::Error::msg("the system has none")).unwrap();
        assert!(!memory.memory_growing(40, 41, None).unwrap());
        assert_eq!((memory.bytes(), memory.refused()), (100, Some(101)));
        assert!(memory.table_growing(0, 6, None).unwrap());
        assert!(!memory.table_growing(0, 5, None).unwrap());
    }

    #[test]
    fn a_growth_beyond_the_memorys_own_maximum_is_not_charged() {
        let mut memory = Memory::new(Limits { guest_memory_bytes: 100, ..Limits::DEFAULT });
        assert!(!memory.memory_growing(0, 60, Some(50)).unwrap());
        assert_eq!((memory.bytes(), memory.refused()), (0, None));
    }
}
