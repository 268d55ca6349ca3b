//! Marks in the stream of a pass: what the card itself says of how long it took.
//!
//! Never decides anything: only figures depend on it.

use std::sync::Arc;

use super::device::CudaDevice;
use super::driver::Gpu;
use super::host_side::Event;
use crate::DeviceError;

/// The points of a pass.
#[derive(Debug)]
pub(super) struct Marks {
    begin: Event,
    middle: Event,
    end: Event,
    has_middle: bool,
    has_end: bool,
}

impl Marks {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self, DeviceError> {
        Ok(Self { begin: Event::new(gpu)?, middle: Event::new(gpu)?, end: Event::new(gpu)?, has_middle: false, has_end: false })
    }

    /// A pass begins.
    pub(super) fn begin(&mut self) -> Result<(), DeviceError> {
        (self.has_middle, self.has_end) = (false, false);
        self.begin.record()
    }

    /// Everything of the pass is launched.
    pub(super) fn end(&mut self) -> Result<(), DeviceError> {
        self.has_end = true;
        self.end.record()
    }
}

impl CudaDevice {
    /// Marks the middle of the pass, once: what is recorded so far is launched before it.
    pub(super) fn mark(&mut self) -> Result<(), DeviceError> {
        if self.marks.has_middle {
            return Ok(());
        }
        self.flush()?;
        self.marks.has_middle = true;
        self.marks.middle.record()
    }

    /// Nanoseconds of the last pass up to its middle, none where that was not marked, and from there on; waits for its end.
    pub(super) fn pass_ns(&mut self) -> Result<(u64, u64), DeviceError> {
        let Marks { begin, middle, end, has_middle, has_end } = &self.marks;
        if !has_end {
            return Ok((0, 0));
        }
        end.wait()?;
        let ns = |milliseconds: f32| (f64::from(milliseconds) * 1e6) as u64;
        if !has_middle {
            return Ok((0, ns(end.since(begin)?)));
        }
        Ok((ns(middle.since(begin)?), ns(end.since(middle)?)))
    }
}
