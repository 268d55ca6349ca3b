//! The engine in a process of its own: what a fault of the device or the driver ends is that process, and no other.
//!
//! Knows slots and numbers as the engine does; no tenant, no component.

mod desk;
#[cfg(debug_assertions)]
mod planted;
mod process;
mod words;

pub(crate) use desk::serve;
pub(crate) use process::{MpsTerms, Process, Setup, Watch};
