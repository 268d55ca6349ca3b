//! How much longer a tokenizer's own rules can make a text, read off its description before the library runs any of them.
//!
//! Never too small for a rule that is known; a few rules that double a text are enough to fill any memory.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper};

/// Most that the rules together may lengthen a text. What models of the field have is below 300.
const FACTOR_MAX: u64 = 1024;
/// Most bytes that a text may become. The library keeps 16 bytes of bookkeeping for each.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// How many times longer a text can become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    encode: u64,
    decode: u64,
}

/// The parts of `tokenizer.json` that lengthen texts.
#[derive(Deserialize)]
struct Rules {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    decoder: Option<DecoderWrapper>,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Added {
    content: String,
}

impl Growth {
    /// Reads the description.
    ///
    /// # Errors
    /// What is wrong with it, and what would be right.
    pub(crate) fn of(tokenizer_json: &[u8]) -> Result<Self, String> {
        let rules: Rules = serde_json::from_slice(tokenizer_json).map_err(|error| error.to_string())?;
        // The library reads several forms; it writes one.
        let factor = |rule: Result<Value, serde_json::Error>| rule.map(|rule| factor(&rule)).map_err(|error| error.to_string());
        let encode = factor(serde_json::to_value(&rules.normalizer))?.saturating_mul(factor(serde_json::to_value(&rules.pre_tokenizer))?);
        let growth = Self { encode, decode: factor(serde_json::to_value(&rules.decoder))? };
        let most = growth.encode.max(growth.decode);
        if most > FACTOR_MAX {
            return Err(format!("its rules can make a text {most} times longer, expected at most {FACTOR_MAX} times"));
        }
        let added = rules.added_tokens.iter().map(|token| token.content.len() as u64).sum();
        growth.encode(added).map(|()| growth).map_err(|most| format!("its added tokens have {added} bytes, expected at most {most}"))
    }

    /// Whether a text of so many bytes may be encoded; else how many are allowed.
    pub(crate) fn encode(self, bytes: u64) -> Result<(), u64> {
        within(bytes, self.encode)
    }

    /// Whether tokens of so many bytes may be decoded; else how many are allowed.
    pub(crate) fn decode(self, bytes: u64) -> Result<(), u64> {
        within(bytes, self.decode)
    }
}

fn within(bytes: u64, factor: u64) -> Result<(), u64> {
    let allowed = TEXT_BYTES_MAX / factor.max(1);
    if bytes <= allowed { Ok(()) } else { Err(allowed) }
}

/// How many times longer a rule can make a text, in bytes of UTF-8, rounded up.
fn factor(rule: &Value) -> u64 {
    let text = |key: &str| rule.get(key).and_then(Value::as_str).unwrap_or_default().len() as u64;
    match rule.get("type").and_then(Value::as_str).unwrap_or_default() {
        "Sequence" => ["normalizers", "pretokenizers", "decoders"]
            .into_iter()
            .filter_map(|key| rule.get(key).and_then(Value::as_array))
            .flatten()
            .fold(1, |product: u64, rule| product.saturating_mul(factor(rule))),
        "Replace" => match rule.pointer("/pattern/String").and_then(Value::as_str) {
            Some(pattern) if !pattern.is_empty() => text("content").div_ceil(pattern.len() as u64).max(1),
            // It may match the empty text, before every byte.
            _ => text("content") + 1,
        },
        // In front of every piece, which has a byte at least.
        "Prepend" => text("prepend") + 1,
        // The largest expansions of Unicode's normal forms: 3 for C and D (U+0390), 11 for KC and KD (U+FDFA).
        "NFC" | "NFD" => 3,
        "NFKC" | "NFKD" => 11,
        "Lowercase" => 2,
        // Spaces around a character of three bytes, its decomposition, lower case.
        "BertNormalizer" => 18,
        // Two bytes for each, and a space in front of each piece.
        "ByteLevel" => 4,
        "Metaspace" => 2 * text("replacement").max(1),
        "Precompiled" => longest_entry(rule.get("precompiled_charsmap").and_then(Value::as_str).unwrap_or_default()),
        "WordPiece" | "BPEDecoder" | "CTC" => 2,
        _ => 1,
    }
}

/// The longest text of a SentencePiece character map, whose texts end with a zero byte.
fn longest_entry(base64: &str) -> u64 {
    let Ok(map) = STANDARD.decode(base64) else { return 1 };
    let trie = map.first_chunk().map_or(0, |size| u32::from_le_bytes(*size) as usize);
    let texts = map.get(trie.saturating_add(4)..).unwrap_or_default();
    texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0).max(1) as u64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Growth;

    fn growth(normalizer: &Value, pre_tokenizer: &Value, decoder: &Value) -> Result<Growth, String> {
        let file = json!({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": {}, "added_tokens": []});
        Growth::of(file.to_string().as_bytes())
    }

    fn replace(pattern: &str, content: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    #[test]
    fn rules_multiply_and_those_of_the_field_pass() {
        let none = Value::Null;
        let llama = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]});
        assert_eq!(growth(&llama, &none, &none).unwrap(), Growth { encode: 12, decode: 1 });
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        assert_eq!(growth(&json!({"type": "NFC"}), &bytes, &bytes).unwrap(), Growth { encode: 12, decode: 4 });
        assert_eq!(growth(&none, &none, &none).unwrap().encode(64 << 20), Ok(()));
        assert_eq!(growth(&llama, &none, &none).unwrap().encode(6 << 20), Err((64 << 20) / 12));
    }

    #[test]
    fn rules_that_fill_a_memory_are_refused() {
        let none = Value::Null;
        let doublings = vec![replace("a", "aa"); 24];
        let normalizer = json!({"type": "Sequence", "normalizers": doublings});
        assert!(growth(&normalizer, &none, &none).unwrap_err().contains("16777216 times longer"));
        let decoder = json!({"type": "Sequence", "decoders": doublings});
        assert!(growth(&none, &none, &decoder).unwrap_err().contains("expected at most 1024"));
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": false});
        let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": vec![byte_level; 24]});
        assert!(growth(&none, &pre_tokenizer, &none).is_err());
        let regex = json!({"type": "Replace", "pattern": {"Regex": "x?"}, "content": "y".repeat(2000)});
        assert!(growth(&regex, &none, &none).is_err());
    }
}
