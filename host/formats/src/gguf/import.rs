//! A GGUF file into a Hugging Face folder: `config.json`, `model.safetensors` (float32), `tokenizer.json`, `tokenizer_config.json`.
//!
//! Never holds more of the weights than one row; the caller throws the folder away when the import fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};

use cap_std::fs::Dir;
use nodus_kernels::DType;
use nodus_protocol::{ModelConfig, Module};

use super::dequantise::dequantise;
use super::reader::{Gguf, Tensor};
use super::{config, tokenizer};
use crate::error::{FormatError, Place};
use crate::files::{map, write};
use crate::{config as hf_config, hf, safetensors};

const WEIGHTS: &str = "model.safetensors";

/// Whether the file's tokenizer is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// Import it; a file without one that is understood is refused.
    Import,
    /// Leave it out. The model then works with data that is already tokenised.
    LeaveOut,
}

/// What an import did.
#[derive(Clone, Debug, PartialEq)]
pub struct ImportReport {
    /// What the model is.
    pub config: ModelConfig,
    /// Number of weights.
    pub parameters: u64,
    /// How many of the tensors were stored in which ggml type, for example `Q4_1`.
    pub kinds: BTreeMap<String, usize>,
    /// Whether a tokenizer was written.
    pub tokenizer: bool,
}

/// Imports an open GGUF file, called `name` in messages, into the folder `out`. `progress` hears how many bytes of float32
/// weights are written, and of how many.
///
/// Quantised tensors are widened to float32 exactly as ggml does. The rows of q and k, which llama.cpp permutes for the
/// architecture `llama` (Mistral included) and for no other, are put back.
///
/// # Errors
/// What is malformed or not supported, with key or tensor, and what was expected.
pub fn import(
    file: &File,
    name: &str,
    out: &Dir,
    choice: TokenizerChoice,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<ImportReport, FormatError> {
    let mapped = map(file, name)?;
    let gguf = Gguf::parse(name, mapped.bytes())?;
    let architecture = config::architecture(&gguf)?;
    let json = config::config(&gguf, architecture)?;
    let json = serde_json::to_vec_pretty(&json).map_err(|e| FormatError::invalid(name, Place::File, e, "what JSON can hold"))?;
    let model = hf_config::parse(&json)?;
    let plan = plan(&gguf, &model, architecture == "llama")?;
    let files = match choice {
        TokenizerChoice::Import => Some(tokenizer::files(&gguf, model.vocab_size)?),
        TokenizerChoice::LeaveOut => None,
    };
    write(out, "config.json", &json)?;
    if let Some(files) = &files {
        write(out, "tokenizer.json", &files.tokenizer)?;
        write(out, "tokenizer_config.json", &files.settings)?;
    }
    write_weights(out, &plan, progress)?;
    let mut kinds = BTreeMap::new();
    for item in &plan {
        *kinds.entry(format!("{:?}", item.tensor.kind)).or_insert(0) += 1;
    }
    let parameters = plan.iter().map(|item| elements(&item.shape)).sum();
    Ok(ImportReport { config: model, parameters, kinds, tokenizer: files.is_some() })
}

/// One tensor to write.
struct Item<'a> {
    name: String,
    shape: Vec<usize>,
    tensor: &'a Tensor<'a>,
    /// Width of a head, where the rows are permuted head by head.
    permuted: Option<usize>,
}

/// Every tensor that the model needs, by name, and no tensor of the file left over.
fn plan<'a>(gguf: &'a Gguf<'a>, model: &ModelConfig, permuted: bool) -> Result<Vec<Item<'a>>, FormatError> {
    let mut left: BTreeSet<&str> = gguf.tensors.keys().copied().filter(|name| *name != "rope_freqs.weight").collect();
    let mut plan = Vec::new();
    for (name, shape) in hf::needed(model) {
        let source = gguf_name(&name);
        let invalid =
            |found: String| FormatError::invalid(gguf.file, Place::tensor(&source), found, format!("a tensor of shape {shape:?}"));
        let tensor = gguf.tensors.get(source.as_str()).ok_or_else(|| invalid("absent".into()))?;
        if tensor.shape != shape {
            return Err(invalid(format!("shape {:?}", tensor.shape)));
        }
        left.remove(source.as_str());
        let rotary = name.ends_with("self_attn.q_proj.weight") || name.ends_with("self_attn.k_proj.weight");
        plan.push(Item { permuted: (permuted && rotary).then_some(model.head_dim), name, shape, tensor });
    }
    if let Some(name) = left.first() {
        let expected = format!("only the tensors of a {} model", model.architecture.name());
        return Err(FormatError::unsupported(gguf.file, Place::tensor(*name), "a tensor that would go unused", expected));
    }
    plan.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(plan)
}

/// The name in GGUF of a tensor by its name in transformers.
fn gguf_name(name: &str) -> String {
    let whole = match name {
        "model.embed_tokens.weight" => "token_embd.weight",
        "model.norm.weight" => "output_norm.weight",
        "lm_head.weight" => "output.weight",
        _ => "",
    };
    if !whole.is_empty() {
        return whole.to_owned();
    }
    let (layer, part) = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).unwrap_or_default();
    let (path, kind) = part.rsplit_once('.').unwrap_or_default();
    let module = Module::ALL.into_iter().find(|m| m.path() == path);
    let part = match (module, path) {
        (Some(Module::QProj), _) => "attn_q",
        (Some(Module::KProj), _) => "attn_k",
        (Some(Module::VProj), _) => "attn_v",
        (Some(Module::OProj), _) => "attn_output",
        (Some(Module::GateProj), _) => "ffn_gate",
        (Some(Module::UpProj), _) => "ffn_up",
        (Some(Module::DownProj), _) => "ffn_down",
        (None, "input_layernorm") => "attn_norm",
        (None, "post_attention_layernorm") => "ffn_norm",
        (None, "self_attn.q_norm") => "attn_q_norm",
        (None, "self_attn.k_norm") => "attn_k_norm",
        (None, other) => other,
    };
    format!("blk.{layer}.{part}.{kind}")
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|d| *d as u64).product()
}

fn write_weights(out: &Dir, plan: &[Item<'_>], progress: &mut dyn FnMut(u64, u64)) -> Result<(), FormatError> {
    let failed = |source| FormatError::Write { file: WEIGHTS.into(), source };
    let total = plan.iter().map(|item| 4 * elements(&item.shape)).sum();
    let tensors: Vec<_> = plan.iter().map(|item| (item.name.clone(), DType::F32, item.shape.clone())).collect();
    let mut file = BufWriter::with_capacity(1 << 20, out.create(WEIGHTS).map_err(failed)?);
    file.write_all(&safetensors::header(WEIGHTS, &tensors)?).map_err(failed)?;
    let mut done = 0;
    let mut row = Vec::new();
    for item in plan {
        for bytes in rows(item) {
            row.clear();
            dequantise(item.tensor.kind, bytes, &mut row);
            file.write_all(bytemuck::cast_slice(&row)).map_err(failed)?;
        }
        done += 4 * elements(&item.shape);
        progress(done, total);
    }
    let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync_all().map_err(failed)
}

/// The rows of a tensor as transformers orders them. llama.cpp interleaves the halves of each head: its row 2i + j is row
/// j * head / 2 + i.
fn rows<'a>(item: &'a Item<'a>) -> impl Iterator<Item = &'a [u8]> {
    let (block, size) = item.tensor.kind.block();
    let bytes = item.tensor.row() / block * size;
    let count = item.tensor.data.len().checked_div(bytes).unwrap_or(0);
    (0..count).filter_map(move |row| {
        let source = match item.permuted {
            None => row,
            Some(head) => {
                let (start, at) = (row / head * head, row % head);
                start + 2 * (at % (head / 2)) + at / (head / 2)
            }
        };
        item.tensor.data.get(source * bytes..(source + 1) * bytes)
    })
}

const _: () = assert!(cfg!(target_endian = "little"), "rows are written in the machine's order, and safetensors is little-endian");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_llama_cpps() {
        for (hf, gguf) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.12.self_attn.o_proj.weight", "blk.12.attn_output.weight"),
            ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
            ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
            ("model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
        ] {
            assert_eq!(gguf_name(hf), gguf);
        }
    }
}
