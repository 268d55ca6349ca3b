//! The training engine: trunks, adapters, optimiser steps, and passes fused over many jobs.
//!
//! Knows slots and numbers; never a tenant's name, wasm, a file or a socket. Results of a command depend on nothing but the commands of
//! the same adapter before it: solo is a pass with one member.

mod adapter;
mod cache;
mod counters;
mod engine;
mod error;
pub mod form;
mod jobs;
mod pass;
pub mod plan;
mod pool;
mod residue;
mod rope;
mod rows;
mod snapshot;
mod thread;
mod training;
mod trunk;

pub use cache::CacheCounts;
pub use counters::Counts;
pub use engine::{Engine, Options};
pub use error::TrunkError;
pub use jobs::{AdapterBytes, JobBytes};
pub use thread::EngineHandle;
