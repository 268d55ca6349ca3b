//! Graphs of launches: captured from the stream with the order that the launches need among themselves and no other, then launched as one.
//!
//! Never knows what a launch does: who must wait for whom is handed over.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{Gpu, failed};
use crate::DeviceError;

/// A launch inside a capture.
pub(crate) type Node = sys::CUgraphNode;

/// A graph that can be launched.
#[derive(Debug)]
pub(crate) struct Graph {
    gpu: Arc<Gpu>,
    graph: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, callable from any thread, one at a time: the value is behind the device's unique reference.
unsafe impl Send for Graph {}

/// The stream while it captures. Dropped before its end, it ends the capture and forgets it.
#[derive(Debug)]
pub(crate) struct Capture<'g> {
    gpu: &'g Arc<Gpu>,
    ended: bool,
}

impl<'g> Capture<'g> {
    pub(crate) fn begin(gpu: &'g Arc<Gpu>) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, and captures nothing: every capture ends in `end` or in `drop`.
        unsafe { result::stream::begin_capture(gpu.stream(), mode) }.map_err(|e| failed("recording a graph", e))?;
        Ok(Self { gpu, ended: false })
    }

    /// Lets the next launch wait for these, which are of this capture, and for nothing else.
    pub(crate) fn after(&mut self, nodes: &mut [Node]) -> Result<(), DeviceError> {
        let set = sys::CUstreamUpdateCaptureDependencies_flags_enum::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
        // SAFETY: the stream captures; the nodes are of its graph, as many as said, without data on their edges.
        unsafe { sys::cuStreamUpdateCaptureDependencies_v2(self.gpu.stream(), nodes.as_mut_ptr(), ptr::null(), nodes.len(), set) }
            .result()
            .map_err(|e| failed("recording a graph", e))
    }

    /// What a later launch must wait for to come after the last one.
    pub(crate) fn last(&self) -> Result<Vec<Node>, DeviceError> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut nodes, mut edges, mut count): (*const Node, *const sys::CUgraphEdgeData, usize) = (ptr::null(), ptr::null(), 0);
        // SAFETY: writes to values that outlive the call; what is not asked for may be null.
        unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                self.gpu.stream(),
                &raw mut status,
                ptr::null_mut(),
                ptr::null_mut(),
                &raw mut nodes,
                &raw mut edges,
                &raw mut count,
            )
        }
        .result()
        .map_err(|e| failed("recording a graph", e))?;
        if nodes.is_null() || count == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the driver's list, of this length, valid until the stream is next used.
        Ok(unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec())
    }

    /// Ends the capture.
    pub(crate) fn end(mut self) -> Result<Graph, DeviceError> {
        self.ended = true;
        // SAFETY: the stream captures.
        let graph = unsafe { result::stream::end_capture(self.gpu.stream()) }.map_err(|e| failed("recording a graph", e))?;
        // SAFETY: the graph was just made.
        let made = unsafe { result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)) };
        // SAFETY: made above, and what was instantiated does not need it any more.
        let _ = unsafe { result::graph::destroy(graph) };
        Ok(Graph { gpu: Arc::clone(self.gpu), graph: made.map_err(|e| failed("making a graph", e))? })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // SAFETY: the stream captures. What it ends is not kept.
            if let Ok(graph) = unsafe { result::stream::end_capture(self.gpu.stream()) } {
                // SAFETY: just made.
                let _ = unsafe { result::graph::destroy(graph) };
            }
        }
    }
}

impl Graph {
    /// Launches what was captured, in the stream's order.
    ///
    /// # Safety
    /// Every address in it is live still, and as large as when it was captured.
    pub(crate) unsafe fn launch(&self) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        // SAFETY: the graph lives; the rest is the caller's.
        unsafe { result::graph::launch(self.graph, self.gpu.stream()) }.map_err(|e| failed("launching a graph", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        // SAFETY: made once, in `end`. The driver keeps it until launches that are under way are done.
        let _ = unsafe { result::graph::exec_destroy(self.graph) };
    }
}
