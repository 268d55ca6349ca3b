//! What the host keeps of the driver beside launches: points in the stream, and memory that the card copies by itself.
//!
//! Never reads memory that a copy is still writing: its callers wait first.
#![expect(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{Gpu, failed};
use crate::DeviceError;

/// A point in the stream.
#[derive(Debug)]
pub(crate) struct Event {
    gpu: Arc<Gpu>,
    event: sys::CUevent,
}

// SAFETY: as `Gpu`.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(|e| failed("an event", e))?;
        Ok(Self { gpu: Arc::clone(gpu), event })
    }

    /// Marks the present end of the stream.
    pub(crate) fn record(&self) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        // SAFETY: both live.
        unsafe { result::event::record(self.event, self.gpu.stream) }.map_err(|e| failed("an event", e))
    }

    /// Waits until the stream has passed it.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }.map_err(|e| failed("work on the card", e))
    }

    /// Milliseconds from `earlier` to this; both have been waited for.
    pub(crate) fn since(&self, earlier: &Self) -> Result<f32, DeviceError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live; writes one number that outlives the call.
        unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.event, self.event) }
            .result()
            .map_err(|e| failed("an event", e))?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // SAFETY: made once, in `new`.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

/// Host memory that the card copies from and to by itself.
#[derive(Debug)]
pub(crate) struct Pinned {
    gpu: Arc<Gpu>,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, DeviceError> {
        gpu.bind()?;
        // SAFETY: zeroed below before anybody reads it.
        let memory: *mut u8 = unsafe { result::malloc_host(bytes, 0) }.map_err(|e| failed("pinned memory", e))?.cast();
        // SAFETY: `bytes` bytes were just allocated there.
        unsafe { memory.write_bytes(0, bytes) };
        Ok(Self { gpu: Arc::clone(gpu), memory, bytes })
    }

    /// Its bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length and initialised in `new`; borrowed with this value. Copies by the card are ordered against the
        // host by `Staging`.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.gpu.synchronize();
        // SAFETY: allocated once, in `new`; no copy is pending.
        let _ = unsafe { result::free_host(self.memory.cast()) };
    }
}
