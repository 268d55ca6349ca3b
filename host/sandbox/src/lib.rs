//! Runs one guest component in wasmtime under limits; turns its WIT calls into engine commands.
//!
//! Knows no kernel, no file and no network: what a guest can reach comes through [`services`], and the engine through a client.

mod adapters;
mod anatomy;
mod bindings;
mod charge;
mod clock;
mod component;
mod failure;
pub mod limits;
mod log;
mod memory;
mod meter;
mod precompiled;
mod random;
mod refusal;
mod run;
mod sandbox;
pub mod services;
mod state;
mod stdio;
mod stopping;
mod ticker;
mod wit;

pub use component::ValidComponent;
pub use failure::Failure;
pub use limits::{EVALUATION_ROW_ALIGN, EVALUATION_ROWS_MAX, Limits};
pub use precompiled::{Precompiled, SealKey};
pub use refusal::ComponentRefusal;
pub use run::{JobEnd, JobSpec, Outcome, StopFlag, Usage};
pub use sandbox::{Sandbox, SandboxError, SandboxOptions};
