//! GGUF imports against what ggml's and transformers' own readers make of the same files.

use cap_std::fs::Dir;
use nodus_formats::gguf::{ImportReport, TokenizerChoice, import};
use nodus_formats::{FormatError, hf};
use nodus_protocol::{Digest, RopeScaling};
use proptest::prelude::*;
use serde_json::Value;

use crate::support::{fixtures, temp};

fn import_from(dir: &Dir, file: &str, out: &Dir, choice: TokenizerChoice) -> Result<ImportReport, FormatError> {
    import(&dir.open(file).unwrap().into_std(), file, out, choice, &mut |_, _| ())
}

fn import_bytes(bytes: &[u8]) -> Result<ImportReport, String> {
    let dir = temp();
    dir.write("x.gguf", bytes).unwrap();
    import_from(&dir, "x.gguf", &dir, TokenizerChoice::Import).map_err(|e| e.to_string())
}

#[test]
fn tensors_and_tokens_equal_those_of_ggml_and_transformers() {
    for (name, prefix) in [("tiny-llama", 0), ("tiny-llama3", 1), ("tiny-spm", 1), ("tiny-qwen2", 0), ("tiny-qwen3", 0)] {
        let out = temp();
        let mut heard = Vec::new();
        let file = fixtures().open(format!("{name}.gguf")).unwrap().into_std();
        let report = import(&file, name, &out, TokenizerChoice::Import, &mut |done, total| heard.push((done, total))).unwrap();
        let expected: Value = serde_json::from_slice(&fixtures().read(format!("{name}.json")).unwrap()).unwrap();
        let model = hf::open(&out).unwrap();
        assert_eq!(model.config, report.config);
        let tensors = expected["tensors"].as_object().unwrap();
        assert_eq!(model.tensors.len(), tensors.len(), "{name}");
        for (tensor, digest) in tensors {
            assert_eq!(Digest::of(model.tensors[tensor].bytes()).hex(), digest.as_str().unwrap(), "{name}: {tensor}");
        }
        assert_eq!(heard.len(), tensors.len());
        assert_eq!(heard.last(), Some(&(4 * report.parameters, 4 * report.parameters)));
        let text = model.text.unwrap();
        for pair in expected["texts"].as_array().unwrap() {
            let tokens: Vec<u32> = serde_json::from_value(pair[1].clone()).unwrap();
            assert_eq!(text.encode(pair[0].as_str().unwrap()).unwrap(), tokens, "{name}: {}", pair[0]);
        }
        assert_eq!(text.document_prefix().len(), prefix, "{name}");
        assert_eq!(text.has_chat_template(), name != "tiny-spm");
        assert!(text.eos().is_some());
    }
}

#[test]
fn metadata_becomes_the_configuration() {
    let config = |name: &str| {
        let out = temp();
        import_from(&fixtures(), &format!("{name}.gguf"), &out, TokenizerChoice::Import).unwrap().config
    };
    let llama = config("tiny-llama");
    assert!(llama.tie_word_embeddings && llama.rope_scaling.is_none());
    assert_eq!((llama.rms_norm_eps, llama.rope_theta, llama.max_position_embeddings), (1e-5, 10_000.0, 64));
    let expected =
        RopeScaling::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192 };
    assert_eq!(config("tiny-llama3").rope_scaling, Some(expected));
    let qwen2 = config("tiny-qwen2");
    assert!(qwen2.qkv_bias);
    assert!(matches!(qwen2.rope_scaling, Some(RopeScaling::Yarn { factor: 4.0, original_max_position_embeddings: 16, .. })));
    assert_eq!(config("tiny-qwen3").head_dim, 32);
}

/// Replaces bytes of a fixture; both texts must be of one length.
fn replaced(name: &str, from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = fixtures().read(name).unwrap();
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let refusal = |from: &[u8], to: &[u8]| import_bytes(&replaced("tiny-llama.gguf", from, to)).unwrap_err();
    let pre = refusal(b"smollm", b"smellm");
    assert!(pre.contains("`tokenizer.ggml.pre`: the pre-tokenizer `smellm` is not supported, expected one of default, gpt-2"), "{pre}");
    assert!(pre.contains("without its tokenizer"));
    assert!(refusal(b"GGUF\x03", b"GGUF\x01").contains("GGUF version 1 is not supported"));
    assert!(refusal(b"GGUF", b"GGML").contains("no GGUF magic number"));
    assert!(refusal(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight").contains("tensor `blk.0.attn_q.weight`: absent"));
    assert!(refusal(b"blk.0.attn_v.weight", b"blk.0.attn_k.weight").contains("`blk.0.attn_k.weight`: a second one of this name"));
    let extra = import_bytes(&replaced("tiny-llama3.gguf", b"rope_freqs.weight", b"rope_extra.weight")).unwrap_err();
    assert!(extra.contains("tensor `rope_extra.weight`: a tensor that would go unused is not supported"), "{extra}");
    // The type of blk.0.attn_v.weight is Q5_K, 13: its number follows two 64-bit dimensions.
    let mut bytes = fixtures().read("tiny-llama.gguf").unwrap();
    let at = bytes.windows(19).position(|w| w == b"blk.0.attn_v.weight").unwrap() + 19 + 4 + 16;
    bytes[at] = 10;
    assert!(import_bytes(&bytes).unwrap_err().contains("tensor `blk.0.attn_v.weight`: type Q2_K is not supported, expected one of F32"));
}

#[test]
fn a_file_can_be_imported_without_its_tokenizer() {
    let (dir, out) = (temp(), temp());
    dir.write("x.gguf", replaced("tiny-llama.gguf", b"smollm", b"smellm")).unwrap();
    let report = import_from(&dir, "x.gguf", &out, TokenizerChoice::LeaveOut).unwrap();
    assert!(!report.tokenizer);
    assert!(hf::open(&out).unwrap().text.is_none());
}

#[test]
fn lengths_are_held_against_the_file() {
    let whole = fixtures().read("tiny-qwen3.gguf").unwrap();
    assert!(import_bytes(&whole[..whole.len() - 1000]).unwrap_err().contains("a whole file; it was cut off"));
    assert!(import_bytes(&whole[..100]).unwrap_err().contains("the file was cut off, or is none"));
    // Number of tensors, number of metadata pairs, and the length of the first key.
    for at in [8, 16, 24] {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        assert!(import_bytes(&bytes).is_err());
    }
    // The number of tokens.
    let key = b"tokenizer.ggml.tokens";
    let at = whole.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 8;
    let mut bytes = whole.clone();
    bytes[at..at + 8].copy_from_slice(&(1_u64 << 40).to_le_bytes());
    assert!(import_bytes(&bytes).unwrap_err().contains("`tokenizer.ggml.tokens`: a list of 1099511627776 items"));
    // The offset of the second tensor moved onto the first.
    let name = b"blk.0.attn_q.weight";
    let at = whole.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 16 + 4;
    let mut bytes = whole;
    bytes[at..at + 8].copy_from_slice(&0_u64.to_le_bytes());
    assert!(import_bytes(&bytes).unwrap_err().contains("inside the tensor before it"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a file says, an import answers.
    #[test]
    fn hostile_bytes_are_answered(changes in proptest::collection::vec((0_usize..8000, any::<u8>()), 1..8), cut in proptest::option::of(0_usize..34_000)) {
        let mut bytes = fixtures().read("tiny-qwen3.gguf").unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        let _ = import_bytes(&bytes);
    }
}
