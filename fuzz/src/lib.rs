//! What the targets share: a folder to put bytes in, and a model for them to be measured against.
//!
//! Holds no check: what must hold is written in the targets.

use std::sync::OnceLock;

use cap_tempfile::{TempDir, ambient_authority, tempdir};
use nodus_protocol::{Architecture, ModelConfig};

/// A folder for this process, emptied by whoever fills it.
///
/// # Panics
/// The system gives none.
pub fn folder() -> &'static TempDir {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempdir(ambient_authority()).expect("a folder for temporary files"))
}

/// The smallest model with everything in it: one layer, 8 wide.
pub fn model() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 8,
        intermediate_size: 16,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 4,
        vocab_size: 300,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        sliding_window: None,
        qkv_bias: false,
        tie_word_embeddings: true,
        eos_token_id: Some(2),
        bos_token_id: None,
    }
}

/// `config.json` of [`model`].
pub const CONFIG: &str = r#"{"model_type":"llama","hidden_size":8,"intermediate_size":16,"num_hidden_layers":1,"num_attention_heads":2,
"num_key_value_heads":1,"head_dim":4,"vocab_size":300,"max_position_embeddings":128,"rms_norm_eps":1e-5,"rope_theta":10000.0,
"hidden_act":"silu","tie_word_embeddings":true,"eos_token_id":2}"#;

/// A tokenizer of 256 tokens, one a byte, then `<s>` and `</s>`.
pub fn tokenizer() -> String {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..256_u32 {
        let shown = if printable(byte) { byte } else { next };
        next += u32::from(!printable(byte));
        vocabulary.insert(char::from_u32(shown).map(String::from).unwrap_or_default(), byte.into());
    }
    let added = |id: u32, content: &str| serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    let bytes = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [added(256, "<s>"), added(257, "</s>")], "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": vocabulary, "merges": []},
    })
    .to_string()
}
