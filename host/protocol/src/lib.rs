//! The words of the host: what a guest's calls become, and what the engine answers.
//!
//! Plain serialisable values and the client that carries them. Knows no wasm, no kernel, no file and no tenant's name; every
//! other crate of the host may know it.

mod adapter;
mod batch;
mod client;
mod command;
mod digest;
mod error;
pub mod frame;
mod model;
mod optimiser;
mod state;
pub mod wire;

pub use adapter::{AdapterWeights, LayerSelection, LoraConfig, ModuleOverride, ModuleWeights};
pub use batch::{Batch, Sequence};
pub use client::{Answer, Client, Inbox, Pending, Request, channel};
pub use command::{AdapterSlot, Command, JobSlot, LossSums, Reply, SequenceLoss, StepReport, TrunkSlot};
pub use digest::{Digest, DigestParseError};
pub use error::{EngineError, ErrorKind};
pub use model::{Architecture, ModelConfig, Module, RopeScaling};
pub use optimiser::{AdamW, Normalisation};
pub use state::{AdapterState, JobState};
