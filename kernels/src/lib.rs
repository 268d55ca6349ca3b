//! Tensors, not tenants: the operations of the engine and the devices that run them.
//!
//! Knows no job, no tenant, no wasm, no tokio. It reads no file by name: mapped weights come from an open file.

mod device;
mod error;
mod layout;
mod operands;
mod random;
mod weights;

pub mod cpu;
pub mod cuda;
pub mod exercise;

pub use device::Device;
pub use error::DeviceError;
pub use layout::{Layout, Segment};
pub use operands::{AdamWItem, AttentionShape, Dropout, LoraGrads, LoraIn, LoraModule, LoraOut, LoraRows, LoraSite, SwigluGrads, Use};
pub use random::{philox, stream_key, uniform};
pub use weights::{DType, HostTensor, MapError, Mapped, Numbers, SharedPlace, SharedWeights, Source};
