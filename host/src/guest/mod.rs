//! Processes for strangers' code: one that runs a tenant's components, one that compiles a component.
//!
//! Never trusts what comes out of one: whatever such a process says, it harms its own tenant's jobs at most.

mod bounds;
mod broker;
mod compile;
mod desk;
#[cfg(fuzzing)]
pub mod fuzzing;
mod lockdown;
pub(crate) mod probe;
mod process;
mod remote;
mod runs;
mod shelf;
mod size;
#[cfg(target_os = "linux")]
mod syscalls;
mod words;
mod workshop;

pub(crate) use compile::serve as serve_compile;
pub(crate) use desk::serve as serve_guests;
pub(crate) use process::{Order, Process};
pub(crate) use size::{Need, OS_SANDBOX, Size, Terms};
pub(crate) use workshop::Workshop;
