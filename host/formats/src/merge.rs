//! An adapter folded into its model: one safetensors file that needs no PEFT.
//!
//! Never holds more than a row of it, and is for use elsewhere alone: a merged weight is rounded to the type that its model is stored in, so
//! it gives other bits than model and adapter side by side.

use std::collections::BTreeMap;
use std::io::{self, Write};

use half::{bf16, f16};
use nodus_kernels::{DType, HostTensor};
use nodus_protocol::{AdapterWeights, ModuleWeights};

use crate::error::FormatError;
use crate::peft::path;
use crate::safetensors::{header, widened};

/// The file's name in a model folder.
pub const FILE: &str = "model.safetensors";

/// A model with an adapter folded in, as a file that is to be written.
pub struct Merged<'a> {
    header: Vec<u8>,
    /// In the file's order.
    tensors: Vec<(&'a HostTensor, Option<Change<'a>>)>,
}

/// What is added to a weight: s B A.
struct Change<'a> {
    module: &'a ModuleWeights,
    scale: f32,
}

impl<'a> Merged<'a> {
    /// Of a model's tensors by their names in transformers, and an adapter that was read for it.
    ///
    /// # Errors
    /// The model lacks a tensor that the adapter changes, or its names are more than a file can hold.
    pub fn new(tensors: &'a BTreeMap<String, HostTensor>, adapter: &'a AdapterWeights) -> Result<Self, FormatError> {
        let mut changes = BTreeMap::new();
        for module in &adapter.modules {
            let name = format!("{}.weight", path(module.layer, module.module));
            let scale = adapter.config.scale_of(module.layer, module.module);
            let (rows, columns) = (module.b.len() / module.rank.max(1), module.a.len() / module.rank.max(1));
            if tensors.get(&name).is_none_or(|tensor| tensor.shape() != [rows, columns]) {
                let expected = format!("a tensor `{name}` of shape [{rows}, {columns}], which the adapter changes");
                return Err(FormatError::Missing { file: FILE.into(), expected });
            }
            changes.insert(name, Change { module, scale });
        }
        let infos: Vec<_> = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dtype(), tensor.shape().to_vec())).collect();
        let header = header(FILE, &infos)?;
        let tensors = tensors.iter().map(|(name, tensor)| (tensor, changes.remove(name))).collect();
        Ok(Self { header, tensors })
    }

    /// Length of the file, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().fold(self.header.len() as u64, |sum, (tensor, _)| sum + tensor.bytes().len() as u64)
    }

    /// Writes the file.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&self.header)?;
        for (tensor, change) in &self.tensors {
            match change {
                None => out.write_all(tensor.bytes())?,
                Some(change) => write_changed(tensor, change, out)?,
            }
        }
        Ok(())
    }
}

/// Row by row: W + s B A in float32, the ranks added in their order, rounded once.
fn write_changed(tensor: &HostTensor, Change { module, scale }: &Change<'_>, out: &mut dyn Write) -> io::Result<()> {
    let columns = module.a.len() / module.rank.max(1);
    let stored = tensor.bytes().chunks_exact(columns * tensor.dtype().bytes());
    let mut rounded = Vec::new();
    for (stored, b) in stored.zip(module.b.chunks_exact(module.rank)) {
        let mut row = widened(stored, tensor.dtype());
        for (b, a) in b.iter().zip(module.a.chunks_exact(columns)) {
            let factor = scale * b;
            row.iter_mut().zip(a).for_each(|(sum, a)| *sum += factor * a);
        }
        rounded.clear();
        for value in row {
            match tensor.dtype() {
                DType::F32 => rounded.extend(value.to_le_bytes()),
                DType::F16 => rounded.extend(f16::from_f32(value).to_le_bytes()),
                DType::BF16 => rounded.extend(bf16::from_f32(value).to_le_bytes()),
            }
        }
        out.write_all(&rounded)?;
    }
    Ok(())
}
