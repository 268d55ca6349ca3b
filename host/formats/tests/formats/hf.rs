//! Hugging Face folders: the golden models, and what must be refused.

use nodus_formats::hf;
use nodus_kernels::DType;
use nodus_protocol::Architecture;
use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};

use crate::support::{byte_tokenizer, copy, edit, golden, open_error, with_tokenizer};

#[test]
fn every_golden_model_opens_with_its_tensors() {
    for (name, architecture, tensors, head_dim) in [
        ("llama", Architecture::Llama, 4 * 9 + 3, 16),
        ("mistral", Architecture::Mistral, 4 * 9 + 3, 16),
        ("qwen2", Architecture::Qwen2, 4 * 12 + 2, 16),
        ("qwen3", Architecture::Qwen3, 4 * 11 + 2, 32),
    ] {
        let model = hf::open(&golden(&format!("models/{name}"))).unwrap();
        assert_eq!(model.config.architecture, architecture);
        assert_eq!((model.tensors.len(), model.config.head_dim), (tensors, head_dim), "{name}");
        assert_eq!(model.config.sliding_window, (name == "mistral").then_some(12));
        assert_eq!(model.config.tie_word_embeddings, name.starts_with("qwen"));
        assert_eq!((model.config.bos_token_id, model.config.eos_token_id), (Some(1), Some(2)));
        let q = &model.tensors["model.layers.3.self_attn.q_proj.weight"];
        assert_eq!((q.shape(), q.dtype()), (&[4 * head_dim, 64][..], DType::F32));
        assert!(model.text.is_none());
        assert_eq!(model.digest, hf::open(&golden(&format!("models/{name}"))).unwrap().digest);
    }
}

#[test]
fn the_digest_is_of_what_counts() {
    let dir = copy("models/llama");
    let digest = || hf::open(&dir).unwrap().digest;
    let first = digest();
    edit(&dir, "config.json", "\"initializer_range\": 0.08", "\"initializer_range\": 0.5");
    assert_eq!(digest(), first, "what has no influence");
    edit(&dir, "config.json", "\"rope_theta\": 10000.0", "\"rope_theta\": 10001.0");
    let theta = digest();
    assert_ne!(theta, first, "a setting");
    let mut weights = dir.read("model.safetensors").unwrap();
    *weights.last_mut().unwrap() ^= 1;
    dir.write("model.safetensors", weights).unwrap();
    let weight = digest();
    assert_ne!(weight, theta, "a weight");
    dir.write("tokenizer.json", byte_tokenizer("null")).unwrap();
    assert_ne!(digest(), weight, "the tokenizer");
}

/// Writes tensors of the golden Llama into several files, as `pick` says, with an index.
fn shard(dir: &cap_std::fs::Dir, dtype: Dtype, pick: impl Fn(&str) -> usize) {
    let bytes = dir.read("model.safetensors").unwrap();
    dir.remove_file("model.safetensors").unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut shards = [Vec::new(), Vec::new()];
    let mut index = serde_json::Map::new();
    for (name, view) in all.iter() {
        let halves = view.data().as_chunks::<4>().0.iter().map(|b| half::bf16::from_f32(f32::from_le_bytes(*b)));
        let data: Vec<u8> = match dtype {
            Dtype::BF16 => halves.flat_map(half::bf16::to_le_bytes).collect(),
            _ => view.data().to_vec(),
        };
        let shard = pick(name);
        index.insert(name.to_owned(), format!("model-{shard}.safetensors").into());
        shards[shard].push((name.to_owned(), view.shape().to_vec(), data));
    }
    for (i, tensors) in shards.iter().enumerate() {
        let views = tensors.iter().map(|(name, shape, data)| (name, TensorView::new(dtype, shape.clone(), data).unwrap()));
        dir.write(format!("model-{i}.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }
    let json = serde_json::json!({"metadata": {}, "weight_map": index});
    dir.write("model.safetensors.index.json", json.to_string()).unwrap();
}

#[test]
fn shards_and_half_precision_open() {
    let dir = copy("models/llama");
    let whole = hf::open(&dir).unwrap();
    shard(&dir, Dtype::F32, |name| usize::from(name.contains("layers.2")));
    let sharded = hf::open(&dir).unwrap();
    assert_eq!(sharded.digest, whole.digest);

    let dir = copy("models/llama");
    shard(&dir, Dtype::BF16, |name| usize::from(name.contains("norm")));
    let halves = hf::open(&dir).unwrap();
    assert!(halves.tensors.values().all(|t| t.dtype() == DType::BF16));
    assert_eq!(halves.tensors.len(), whole.tensors.len());
}

#[test]
fn broken_shards_are_refused_by_name() {
    let dir = copy("models/llama");
    shard(&dir, Dtype::F32, |name| usize::from(name.contains("layers.2")));
    let shard_0 = dir.read("model-0.safetensors").unwrap();
    dir.write("model-1.safetensors", &shard_0).unwrap();
    assert!(open_error(&dir).contains("a tensor that model-0.safetensors holds too"), "{}", open_error(&dir));
    dir.remove_file("model-1.safetensors").unwrap();
    assert_eq!(open_error(&dir), "model-1.safetensors is missing, expected a shard that model.safetensors.index.json lists");
    edit(&dir, "model.safetensors.index.json", "model-1.safetensors", "../model-1.safetensors");
    assert!(open_error(&dir).contains("the name of a .safetensors file beside the index"));
    dir.write("model.safetensors.index.json", r#"{"weight_map": {}}"#).unwrap();
    let error = open_error(&dir);
    assert!(
        error.starts_with("model.safetensors.index.json, tensor `model.embed_tokens.weight`: absent, expected a tensor of shape [256, 64]")
    );
    dir.remove_file("model.safetensors.index.json").unwrap();
    assert!(open_error(&dir).starts_with("model.safetensors is missing"));
}

#[test]
fn missing_tensor_wrong_shape_truncated_file_and_other_types_name_file_and_tensor() {
    let dir = copy("models/llama");
    edit(&dir, "config.json", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 5");
    assert_eq!(
        open_error(&dir),
        "model.safetensors, tensor `model.layers.4.input_layernorm.weight`: absent, expected a tensor of shape [64], which this architecture needs"
    );
    edit(&dir, "config.json", "\"num_hidden_layers\": 5", "\"num_hidden_layers\": 4");
    edit(&dir, "config.json", "\"intermediate_size\": 176", "\"intermediate_size\": 177");
    assert_eq!(open_error(&dir), "model.safetensors, tensor `model.layers.0.mlp.gate_proj.weight`: shape [176, 64], expected [177, 64]");
    edit(&dir, "config.json", "\"intermediate_size\": 177", "\"intermediate_size\": 176");

    let whole = dir.read("model.safetensors").unwrap();
    dir.write("model.safetensors", &whole[..whole.len() - 10]).unwrap();
    let error = open_error(&dir);
    assert!(error.contains("ends 10 bytes before the tensor does, expected a whole file; it was cut off"), "{error}");
    for (length, expected) in [(0, "an empty file"), (5, "which end inside the header"), (100, "which end inside the header")] {
        dir.write("model.safetensors", &whole[..length]).unwrap();
        assert!(open_error(&dir).contains(expected), "{length}: {}", open_error(&dir));
    }
    let longer = [&whole[..], b"more"].concat();
    dir.write("model.safetensors", longer).unwrap();
    assert!(open_error(&dir).contains("4 bytes after the last tensor"));
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    dir.write("model.safetensors", huge).unwrap();
    assert!(open_error(&dir).contains("a header of more than 100 MB"));
    let norm = whole.windows(17).position(|w| w == b"model.norm.weight").unwrap();
    let at = norm + whole[norm..].windows(3).position(|w| w == b"F32").unwrap();
    let mut typed = whole.clone();
    typed[at..at + 3].copy_from_slice(b"I32");
    dir.write("model.safetensors", typed).unwrap();
    assert_eq!(open_error(&dir), "model.safetensors, tensor `model.norm.weight`: type I32 is not supported, expected F32, F16 or BF16");
}

#[test]
fn a_tied_head_needs_no_tensor_and_an_untied_one_does() {
    let dir = copy("models/llama");
    edit(&dir, "config.json", "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    assert!(!hf::open(&dir).unwrap().tensors.contains_key("lm_head.weight"));
    let dir = copy("models/qwen2");
    edit(&dir, "config.json", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    assert!(open_error(&dir).contains("`lm_head.weight`: absent"));
}

#[test]
fn the_end_token_is_the_tokenizers_then_the_configurations() {
    let (dir, model) = with_tokenizer(r#"{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#);
    assert_eq!((model.config.bos_token_id, model.config.eos_token_id), (Some(1), Some(2)));
    edit(&dir, "config.json", "\"eos_token_id\": 2", "\"eos_token_id\": [7, 8]");
    assert_eq!(hf::open(&dir).unwrap().config.eos_token_id, Some(2));
    dir.remove_file("tokenizer.json").unwrap();
    assert_eq!(hf::open(&dir).unwrap().config.eos_token_id, Some(7));
    edit(&dir, "config.json", "\"eos_token_id\": [7, 8]", "\"eos_token_id\": null");
    assert_eq!(hf::open(&dir).unwrap().config.eos_token_id, None);
    dir.write("generation_config.json", r#"{"eos_token_id": [9]}"#).unwrap();
    assert_eq!(hf::open(&dir).unwrap().config.eos_token_id, Some(9));
    dir.write("generation_config.json", r#"{"eos_token_id": 999}"#).unwrap();
    assert!(open_error(&dir).contains("below the vocabulary of 256"));
}

#[test]
fn a_text_begins_with_what_the_tokenizer_says_and_never_ends_with_more() {
    let template = r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}},
        {"SpecialToken":{"id":"</s>","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],
        "special_tokens":{"<s>":{"id":"<s>","ids":[1],"tokens":["<s>"]},"</s>":{"id":"</s>","ids":[2],"tokens":["</s>"]}}}"#;
    let dir = copy("models/llama");
    dir.write("tokenizer.json", byte_tokenizer(template)).unwrap();
    let text = |settings: &str| {
        dir.write("tokenizer_config.json", settings).unwrap();
        hf::open(&dir).unwrap().text.unwrap()
    };
    let with = text(r#"{"bos_token": "<s>", "eos_token": "</s>"}"#);
    assert_eq!(with.encode("ab").unwrap(), [97, 98], "plain encoding adds nothing");
    assert_eq!(with.encode_document("ab").unwrap(), [1, 97, 98], "the post-processor's beginning, not its end");
    assert_eq!(with.encode_document("<s>ab").unwrap(), [1, 97, 98], "not twice");
    assert_eq!(with.encode("a</s>b").unwrap(), [97, 2, 98], "what the text spells out");
    assert_eq!(text(r#"{"bos_token": "<s>", "add_bos_token": false}"#).encode_document("ab").unwrap(), [97, 98]);
    assert_eq!(text("{}").encode("abcdefgh").unwrap().len(), 8, "the file's truncation is off");
    dir.write("tokenizer.json", byte_tokenizer("null")).unwrap();
    assert_eq!(text(r#"{"bos_token": "<s>", "add_bos_token": true}"#).encode_document("ab").unwrap(), [1, 97, 98]);
    assert_eq!(text(r#"{"bos_token": "<s>"}"#).encode_document("ab").unwrap(), [97, 98]);

    let text = text("{}");
    assert_eq!(text.decode(&[1, 104, 195, 169, 2]).unwrap(), "<s>hé</s>");
    assert_eq!(text.decode(&[256]).unwrap_err().to_string(), "256 is not a token, expected one of the model's vocabulary");
    assert!(text.apply_chat_template(&[], true).unwrap_err().to_string().contains("without a chat template"));
}

#[test]
fn chat_templates_are_found_in_all_three_places() {
    let (dir, model) = with_tokenizer(
        r#"{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "A{{ eos_token }}"}], "eos_token": "</s>"}"#,
    );
    assert_eq!(model.text.unwrap().apply_chat_template(&[], false).unwrap(), "A</s>");
    let render = || hf::open(&dir).unwrap().text.unwrap().apply_chat_template(&[], false).unwrap();
    dir.write("chat_template.json", r#"{"chat_template": "B"}"#).unwrap();
    assert_eq!(render(), "B");
    dir.write("chat_template.jinja", "C").unwrap();
    assert_eq!(render(), "C");
    dir.write("chat_template.jinja", "{% bad").unwrap();
    let error = hf::open(&dir).unwrap().text.unwrap().apply_chat_template(&[], false).unwrap_err().to_string();
    assert!(error.starts_with("the model's chat template failed"), "{error}");
}

#[test]
fn malformed_tokenizers_are_refused_by_name() {
    let dir = copy("models/llama");
    for bad in ["", "{}", "[]", r#"{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}"#] {
        dir.write("tokenizer.json", bad).unwrap();
        assert!(open_error(&dir).starts_with("tokenizer.json: "), "{bad}: {}", open_error(&dir));
    }
    let drops = byte_tokenizer("null").replace(r#""dropout":null"#, r#""dropout":0.1"#);
    dir.write("tokenizer.json", drops).unwrap();
    assert_eq!(open_error(&dir), "tokenizer.json, `model.dropout`: dropout 0.1 is not supported, expected no dropout in the tokenizer");
    dir.write("tokenizer.json", byte_tokenizer("null")).unwrap();
    dir.write("tokenizer_config.json", r#"{"eos_token": "<nope>"}"#).unwrap();
    assert_eq!(open_error(&dir), "tokenizer_config.json, `eos_token`: `<nope>`, no token of tokenizer.json, expected one of its tokens");
    dir.write("tokenizer_config.json", r#"{"eos_token": 3}"#).unwrap();
    assert!(open_error(&dir).contains("a string or an object with `content`"));
}

#[test]
fn a_tokenizer_whose_rules_fill_a_memory_is_refused_and_so_is_a_text_that_would() {
    let dir = copy("models/llama");
    let rules = |count: usize| {
        let rule = r#"{"type":"Replace","pattern":{"String":"a"},"content":"aa"}"#;
        let normalizer = format!(r#""normalizer":{{"type":"Sequence","normalizers":[{}]}}"#, vec![rule; count].join(","));
        byte_tokenizer("null").replace(r#""normalizer":null"#, &normalizer)
    };
    dir.write("tokenizer.json", rules(24)).unwrap();
    assert!(open_error(&dir).contains("times longer, expected at most 1024 times"), "{}", open_error(&dir));
    dir.write("tokenizer.json", rules(6)).unwrap();
    let text = hf::open(&dir).unwrap().text.unwrap();
    assert_eq!(text.encode("ab").unwrap().len(), 65);
    let error = text.encode(&"a".repeat(1 << 20)).unwrap_err().to_string();
    assert!(error.starts_with("a text of 1048576 bytes, expected at most "), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever bytes a folder holds, opening it answers.
    #[test]
    fn hostile_bytes_are_answered(at in 0_usize..2000, byte: u8, length in 0_usize..2000) {
        let dir = copy("models/llama");
        let mut weights = dir.read("model.safetensors").unwrap();
        weights[at] = byte;
        dir.write("model.safetensors", &weights).unwrap();
        let _ = hf::open(&dir);
        dir.write("model.safetensors", &weights[..length]).unwrap();
        prop_assert!(hf::open(&dir).is_err());
        let mut config = dir.read("config.json").unwrap();
        let at = at % config.len();
        config[at] = byte;
        dir.write("config.json", &config).unwrap();
        let _ = hf::open(&dir);
    }
}
