//! The CUDA device: the operations of the engine on an NVIDIA card, each row's bits independent of the rows beside it.
//!
//! Never reads the environment or opens a file: folders of libraries, a cache of kernels and a plan are handed over. Never lets a library
//! choose an algorithm while a pass runs.

mod adamw;
mod agreement;
mod arena;
mod attention;
mod blas;
mod buckets;
mod compile;
mod contract;
mod device;
mod driver;
mod energy;
mod gate;
mod gate_up;
mod graph;
mod head;
mod host_side;
mod launching;
mod library;
mod linear;
mod lora;
mod lora_swiglu;
mod lora_tables;
mod marks;
mod memory;
mod plan;
mod programs;
mod record;
mod rows;
mod shared;
mod staging;
mod support;
mod tables;
mod tiles;
mod verdict;
mod weights;

pub use compile::Cache;
pub use device::{CudaBuffer, CudaDevice, CudaOptions, CudaWeight};
pub use launching::Launching;
pub use library::{Card, Found, Library, Probe, can_share, cards, free_bytes, probe};
pub use memory::refuses;
pub use plan::{Choice, GateUp, Key, Plan, PlanError, Product};
pub use programs::compile_everything;
pub use record::{Launches, Profile};
pub use shared::WeightSharing;
pub use staging::rows_max;
pub use verdict::{Agreement, GateReport, GateUpCheck, ProductCheck};

/// Rows of a tile; every sequence starts at a multiple of it.
pub const ROW_ALIGN: usize = 128;

/// The type of activations, their gradients and of weight matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// float32, without tensor-float shortcuts.
    F32,
    /// bfloat16, added up in float32. Norms, softmax, losses, adapters, their gradients and moments stay float32.
    Bf16,
}

impl Precision {
    /// Bytes of an activation.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}
