//! PEFT adapter folders: `adapter_config.json`, `adapter_model.safetensors`, `README.md`.
//!
//! Never folds a scale into a weight (loading twice changes nothing), and never loads an adapter that would leave part of the
//! base model unadapted without a word.

mod config;
mod pattern;
mod read;
mod write;

use nodus_protocol::{Digest, Module};
use sha2::{Digest as _, Sha256};

pub use read::{base, read};
pub use write::write;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// A file of an adapter: its name in the folder, its bytes.
pub type AdapterFile = (String, Vec<u8>);

/// SHA-256 over an adapter's files in the order of their names: for each its name, a zero byte, its length in bytes (64 bits,
/// little-endian) and its bytes.
#[must_use]
pub fn digest(files: &[AdapterFile]) -> Digest {
    let mut files: Vec<_> = files.iter().collect();
    files.sort();
    let mut hash = Sha256::new();
    for (name, bytes) in files {
        hash.update(name.as_bytes());
        hash.update([0]);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    Digest::from_bytes(hash.finalize().into())
}

/// The path of a module in transformers, which PEFT's patterns are held against.
pub(crate) fn path(layer: usize, module: Module) -> String {
    format!("model.layers.{layer}.{}", module.path())
}

/// The key of a tensor in the file; `part` is `A` or `B`.
fn key(layer: usize, module: Module, part: char) -> String {
    format!("base_model.model.{}.lora_{part}.weight", path(layer, module))
}
