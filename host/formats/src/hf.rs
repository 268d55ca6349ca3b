//! A Hugging Face model folder to a model: configuration, mapped weights, tokenizer.
//!
//! Never copies a weight, and hands out a model only when every tensor that its architecture needs is there, in its right shape.

use std::collections::{BTreeMap, BTreeSet};

use cap_std::fs::Dir;
use nodus_kernels::{DType, HostTensor};
use nodus_protocol::{Architecture, Digest, ModelConfig, Module};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::config;
use crate::error::{FormatError, Place, clip};
use crate::files::{CONFIG_BYTES_MAX, TOKENIZER_BYTES_MAX, map_optional, read, read_optional};
use crate::json::{Object, parse};
use crate::safetensors::TensorFile;
use crate::text::TextModel;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A model folder, opened.
pub struct Model {
    /// Architecture and sizes.
    pub config: ModelConfig,
    /// The tensors that the architecture needs, and no others, under their names in transformers.
    pub tensors: BTreeMap<String, HostTensor>,
    /// Tokenizer and chat template, where the folder has a `tokenizer.json`.
    pub text: Option<TextModel>,
    /// SHA-256 over `nodus model 1`, the configuration as JSON, each needed tensor in the order of names (name, type, shape,
    /// bytes as stored) and the tokenizer's digest where there is one; every part after its length (64 bits, little-endian).
    pub digest: Digest,
}

/// Opens a model folder. The weights stay mapped for as long as the model lives.
///
/// The end token is the one that the tokenizer's settings name, else the first of `config.json`, else of
/// `generation_config.json`; the beginning token likewise.
///
/// # Errors
/// What is missing, malformed or not supported, with file, tensor or key, and what was expected.
pub fn open(dir: &Dir) -> Result<Model, FormatError> {
    let mut config = config::parse(&read(dir, config::FILE, CONFIG_BYTES_MAX, "a model's configuration")?)?;
    let text = TextModel::open(dir)?;
    special_tokens(dir, &mut config, text.as_ref())?;
    let tensors = tensors(dir, &config)?;
    let digest = digest(&config, &tensors, text.as_ref())?;
    Ok(Model { config, tensors, text, digest })
}

/// Every tensor that a model of this configuration has, with its shape, bottom up.
pub(crate) fn needed(config: &ModelConfig) -> impl Iterator<Item = (String, Vec<usize>)> + '_ {
    let (hidden, vocabulary) = (config.hidden_size, config.vocab_size);
    let head = (!config.tie_word_embeddings).then(|| ("lm_head.weight".to_owned(), vec![vocabulary, hidden]));
    std::iter::once(("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]))
        .chain((0..config.num_hidden_layers).flat_map(|layer| layer_tensors(config, layer)))
        .chain(std::iter::once(("model.norm.weight".to_owned(), vec![hidden])))
        .chain(head)
}

fn layer_tensors(config: &ModelConfig, layer: usize) -> Vec<(String, Vec<usize>)> {
    let name = |part: &str| format!("model.layers.{layer}.{part}");
    let mut list = vec![(name("input_layernorm.weight"), vec![config.hidden_size])];
    for module in Module::ALL {
        list.push((name(&format!("{}.weight", module.path())), vec![config.module_out(module), config.module_in(module)]));
        if config.qkv_bias && matches!(module, Module::QProj | Module::KProj | Module::VProj) {
            list.push((name(&format!("{}.bias", module.path())), vec![config.module_out(module)]));
        }
    }
    if config.architecture == Architecture::Qwen3 {
        list.push((name("self_attn.q_norm.weight"), vec![config.head_dim]));
        list.push((name("self_attn.k_norm.weight"), vec![config.head_dim]));
    }
    list.push((name("post_attention_layernorm.weight"), vec![config.hidden_size]));
    list
}

fn special_tokens(dir: &Dir, config: &mut ModelConfig, text: Option<&TextModel>) -> Result<(), FormatError> {
    const FILE: &str = "generation_config.json";
    let map = match read_optional(dir, FILE, CONFIG_BYTES_MAX)? {
        Some(bytes) => parse(FILE, &bytes)?,
        None => serde_json::Map::new(),
    };
    let generation = Object::new(FILE, &map);
    let pick = |key: &str, said: Option<u32>, configured: Option<u32>| -> Result<Option<u32>, FormatError> {
        let id = match said.or(configured) {
            None => config::token(generation, key)?,
            id => id,
        };
        match id {
            Some(id) if id as usize >= config.vocab_size => {
                let found = format!("{id} by the tokenizer or by {FILE}");
                Err(FormatError::invalid(config::FILE, Place::key(key), found, format!("below the vocabulary of {}", config.vocab_size)))
            }
            id => Ok(id),
        }
    };
    let eos = pick("eos_token_id", text.and_then(TextModel::eos), config.eos_token_id)?;
    let bos = pick("bos_token_id", text.and_then(TextModel::bos), config.bos_token_id)?;
    (config.eos_token_id, config.bos_token_id) = (eos, bos);
    Ok(())
}

fn tensors(dir: &Dir, config: &ModelConfig) -> Result<BTreeMap<String, HostTensor>, FormatError> {
    let shards = Shards::open(dir)?;
    let mut tensors = BTreeMap::new();
    for (name, shape) in needed(config) {
        let tensor = shards.file_of(&name, &shape)?.tensor(&name, &shape)?;
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// One weight file, or several and the index that says which tensor is where.
struct Shards {
    files: BTreeMap<String, TensorFile>,
    index: Option<BTreeMap<String, String>>,
}

impl Shards {
    fn open(dir: &Dir) -> Result<Self, FormatError> {
        if let Some(map) = map_optional(dir, SINGLE)? {
            let files = BTreeMap::from([(SINGLE.to_owned(), TensorFile::parse(SINGLE, map)?)]);
            return Ok(Self { files, index: None });
        }
        let Some(bytes) = read_optional(dir, INDEX, TOKENIZER_BYTES_MAX)? else {
            return Err(FormatError::Missing {
                file: SINGLE.into(),
                expected: format!("the weights there, or in shards that {INDEX} lists"),
            });
        };
        let index = weight_map(&bytes)?;
        let mut files = BTreeMap::new();
        for name in index.values().collect::<BTreeSet<_>>() {
            let missing = || FormatError::Missing { file: clip(name), expected: format!("a shard that {INDEX} lists") };
            let map = map_optional(dir, name)?.ok_or_else(missing)?;
            files.insert(name.clone(), TensorFile::parse(name, map)?);
        }
        Self::no_duplicates(&files)?;
        Ok(Self { files, index: Some(index) })
    }

    fn no_duplicates(files: &BTreeMap<String, TensorFile>) -> Result<(), FormatError> {
        let mut seen = BTreeMap::new();
        for file in files.values() {
            for tensor in file.names() {
                if let Some(other) = seen.insert(tensor.clone(), file.name()) {
                    let found = format!("a tensor that {} holds too", clip(other));
                    return Err(FormatError::invalid(file.name(), Place::tensor(tensor), found, "each tensor in one shard"));
                }
            }
        }
        Ok(())
    }

    fn file_of(&self, tensor: &str, shape: &[usize]) -> Result<&TensorFile, FormatError> {
        let expected = || format!("a tensor of shape {shape:?}, which this architecture needs");
        let absent = |file: &str| FormatError::invalid(file, Place::tensor(tensor), "absent", expected());
        match &self.index {
            None => self.files.get(SINGLE).filter(|f| f.contains(tensor)).ok_or_else(|| absent(SINGLE)),
            Some(index) => {
                let name = index.get(tensor).ok_or_else(|| absent(INDEX))?;
                self.files.get(name).filter(|f| f.contains(tensor)).ok_or_else(|| absent(name))
            }
        }
    }
}

fn weight_map(bytes: &[u8]) -> Result<BTreeMap<String, String>, FormatError> {
    let map = parse(INDEX, bytes)?;
    let index = Object::new(INDEX, &map);
    let object = index.required("weight_map", index.object("weight_map", "weight_map.")?, "an object from tensor to file")?;
    let mut weights = BTreeMap::new();
    for (tensor, file) in object.entries() {
        // A shard lies beside its index: a name with a folder in it is no shard's.
        let name = file.as_str().filter(|f| f.ends_with(".safetensors") && !f.contains(['/', '\\']));
        let name = name.ok_or_else(|| object.wrong(tensor, file, "the name of a .safetensors file beside the index"))?;
        weights.insert(tensor.clone(), name.to_owned());
    }
    Ok(weights)
}

fn digest(config: &ModelConfig, tensors: &BTreeMap<String, HostTensor>, text: Option<&TextModel>) -> Result<Digest, FormatError> {
    let json = serde_json::to_value(config).and_then(|v: Value| serde_json::to_vec(&v));
    let json = json.map_err(|e| FormatError::invalid(config::FILE, Place::File, e, "numbers that JSON can hold"))?;
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(b"nodus model 1");
    part(&json);
    for (name, tensor) in tensors {
        part(name.as_bytes());
        part(match tensor.dtype() {
            DType::F32 => b"F32",
            DType::F16 => b"F16",
            DType::BF16 => b"BF16",
        });
        part(&tensor.shape().iter().flat_map(|d| (*d as u64).to_le_bytes()).collect::<Vec<_>>());
        part(tensor.bytes());
    }
    if let Some(text) = text {
        part(text.digest().as_bytes());
    }
    Ok(Digest::from_bytes(hash.finalize().into()))
}
