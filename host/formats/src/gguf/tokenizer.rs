//! GGUF's tokenizer to `tokenizer.json` and `tokenizer_config.json`.
//!
//! Byte-level BPE by the pre-tokenizer that the file names, and SentencePiece-like BPE. A pre-tokenizer that is not known here
//! is refused by name: a near miss would tokenise almost right, and nobody would notice.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value, json};

use super::reader::{Gguf, Value as Meta};
use crate::error::{FormatError, Place, clip};
use crate::text::TextModel;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const HINT: &str = "; the model can be imported without its tokenizer";

const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// The two files' contents.
pub(super) struct Files {
    pub(super) tokenizer: Vec<u8>,
    pub(super) settings: Vec<u8>,
}

/// Makes both files, and has the tokenizers library load the result before anybody relies on it.
pub(super) fn files(gguf: &Gguf<'_>, vocabulary_max: usize) -> Result<Files, FormatError> {
    let model = gguf.text(MODEL)?.ok_or_else(|| gguf.wrong(MODEL, &format!("`gpt2` or `llama`{HINT}")))?;
    let vocabulary = Vocabulary::read(gguf, vocabulary_max)?;
    let (json, bos_by_default) = match model {
        "gpt2" => byte_level(gguf, &vocabulary)?,
        "llama" => (sentence_piece(gguf, &vocabulary)?, true),
        other => return Err(gguf.unsupported(MODEL, &format!("the tokenizer `{other}`"), &format!("`gpt2` or `llama`{HINT}"))),
    };
    let special = special(gguf, &vocabulary)?;
    let add_bos = gguf.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(bos_by_default) && special.contains_key("bos_token");
    let template = gguf.text("tokenizer.chat_template")?;
    let tokenizer = to_bytes(gguf, &json)?;
    TextModel::from_parts(&tokenizer, Some(add_bos), special.clone(), template.map(str::to_owned)).map_err(|e| {
        FormatError::invalid(
            gguf.file,
            Place::key(TOKENS),
            format!("no usable tokenizer ({e})"),
            format!("tokens and merges that fit{HINT}"),
        )
    })?;
    let mut settings = Map::new();
    settings.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    settings.extend(special.into_iter().map(|(name, text)| (name, Value::from(text))));
    settings.insert("add_bos_token".into(), json!(add_bos));
    settings.insert("clean_up_tokenization_spaces".into(), json!(false));
    if let Some(template) = template {
        settings.insert("chat_template".into(), json!(template));
    }
    Ok(Files { tokenizer, settings: to_bytes(gguf, &Value::Object(settings))? })
}

fn to_bytes(gguf: &Gguf<'_>, json: &Value) -> Result<Vec<u8>, FormatError> {
    serde_json::to_vec(json).map_err(|e| FormatError::invalid(gguf.file, Place::key(TOKENS), e, "what JSON can hold"))
}

/// Tokens in the order of their ids, with their types.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    ids: HashMap<&'a str, usize>,
    types: Vec<u64>,
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &Gguf<'a>, tokens_max: usize) -> Result<Self, FormatError> {
        let invalid = |key: &str, found: String, expected: &str| FormatError::invalid(gguf.file, Place::key(key), found, expected);
        let tokens = texts(gguf, TOKENS)?;
        if tokens.len() > tokens_max {
            return Err(invalid(TOKENS, format!("{} tokens", tokens.len()), &format!("at most the {tokens_max} rows of the embedding")));
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if let Some(first) = ids.insert(*token, id) {
                return Err(invalid(TOKENS, format!("`{}` both as token {first} and {id}", clip(token)), "each token once"));
            }
        }
        let types: Option<Vec<u64>> = match gguf.list(TYPES)? {
            None => Some(vec![1; tokens.len()]),
            Some(list) => list.iter().map(|v| if let Meta::Uint(n) = v { Some(*n) } else { None }).collect(),
        };
        match types {
            Some(types) if types.len() == tokens.len() => Ok(Self { tokens, ids, types }),
            _ => Err(invalid(TYPES, "another list".into(), "one whole number for each token")),
        }
    }

    fn json(&self) -> Value {
        Value::Object(self.tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect())
    }

    /// Tokens that are found in a text before anything else is done to it.
    fn added(&self) -> Value {
        let kinds = |kind: u64| matches!(kind, UNKNOWN | CONTROL | USER_DEFINED);
        let added = self.tokens.iter().zip(&self.types).enumerate().filter(|(_, (_, kind))| kinds(**kind));
        Value::Array(
            added
                .map(|(id, (token, kind))| {
                    json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                        "special": *kind != USER_DEFINED})
                })
                .collect(),
        )
    }
}

fn texts<'a>(gguf: &Gguf<'a>, key: &str) -> Result<Vec<&'a str>, FormatError> {
    let wrong = || gguf.wrong(key, &format!("a list of strings{HINT}"));
    let list = gguf.list(key)?.ok_or_else(wrong)?;
    list.iter().map(|v| if let Meta::Text(text) = v { Ok(*text) } else { Err(wrong()) }).collect()
}

fn special(gguf: &Gguf<'_>, vocabulary: &Vocabulary<'_>) -> Result<BTreeMap<String, String>, FormatError> {
    let mut special = BTreeMap::new();
    for (name, key) in [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")] {
        let key = format!("tokenizer.ggml.{key}_token_id");
        if let Some(id) = gguf.uint(&key)? {
            let token = usize::try_from(id).ok().and_then(|id| vocabulary.tokens.get(id));
            let token = token.ok_or_else(|| gguf.wrong(&key, &format!("below the {} tokens", vocabulary.tokens.len())))?;
            special.insert(name.to_owned(), (*token).to_owned());
        }
    }
    Ok(special)
}

fn tokenizer(vocabulary: &Vocabulary<'_>, parts: [Value; 3], merges: Vec<Value>, options: Value) -> Value {
    let [normalizer, pre_tokenizer, decoder] = parts;
    let mut model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false});
    if let (Some(model), Value::Object(options)) = (model.as_object_mut(), options) {
        model.extend(options);
        model.insert("vocab".into(), vocabulary.json());
        model.insert("merges".into(), Value::Array(merges));
    }
    // Whether a text begins with the beginning token is said in tokenizer_config.json.
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": vocabulary.added(), "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model})
}

fn byte_level(gguf: &Gguf<'_>, vocabulary: &Vocabulary<'_>) -> Result<(Value, bool), FormatError> {
    let name = gguf.text(PRE)?.ok_or_else(|| gguf.wrong(PRE, &format!("the name of a pre-tokenizer{HINT}")))?;
    let pre = Pre::of(name)
        .ok_or_else(|| gguf.unsupported(PRE, &format!("the pre-tokenizer `{name}`"), &format!("one of {}{HINT}", Pre::NAMES)))?;
    let merges = texts(gguf, MERGES)?;
    let merges = merges.into_iter().map(|merge| {
        let pair = merge.split_once(' ').filter(|(a, b)| !a.is_empty() && !b.is_empty() && !b.contains(' '));
        pair.map(|(a, b)| json!([a, b])).ok_or_else(|| {
            FormatError::invalid(
                gguf.file,
                Place::key(MERGES),
                format!("`{}`", clip(merge)),
                format!("two pieces and a space between{HINT}"),
            )
        })
    });
    let merges = merges.collect::<Result<Vec<_>, _>>()?;
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let parts = [pre.normalizer(), pre.json(), decoder];
    Ok((tokenizer(vocabulary, parts, merges, json!({"ignore_merges": pre.ignore_merges()})), pre == Pre::Llama3))
}

/// How a text is cut before its pieces are merged. The patterns are those of llama.cpp (`llama-vocab.cpp`), which are those of
/// the models' own `tokenizer.json` files.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pre {
    Default,
    Gpt2,
    SmolLm,
    Llama3,
    Qwen2,
    Tekken,
}

impl Pre {
    const NAMES: &str = "default, gpt-2, smollm, llama-bpe, qwen2, tekken";

    fn of(name: &str) -> Option<Self> {
        Some(match name {
            "default" => Self::Default,
            "gpt-2" | "phi-2" => Self::Gpt2,
            "smollm" | "starcoder" | "refact" => Self::SmolLm,
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" => Self::Llama3,
            "qwen2" | "deepseek-r1-qwen" => Self::Qwen2,
            "tekken" => Self::Tekken,
            _ => return None,
        })
    }

    fn ignore_merges(self) -> bool {
        matches!(self, Self::Llama3 | Self::Tekken)
    }

    fn normalizer(self) -> Value {
        if self == Self::Qwen2 { json!({"type": "NFC"}) } else { Value::Null }
    }

    fn json(self) -> Value {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        let parts = match self {
            Self::Gpt2 => return bytes(true),
            Self::SmolLm => vec![json!({"type": "Digits", "individual_digits": true}), bytes(true)],
            Self::Llama3 => vec![split(&LLAMA3.replace("{digits}", r"\p{N}{1,3}")), bytes(false)],
            Self::Qwen2 => vec![split(&LLAMA3.replace("{digits}", r"\p{N}")), bytes(false)],
            Self::Tekken => vec![split(TEKKEN), bytes(false)],
            Self::Default => DEFAULT.iter().map(|regex| split(regex)).chain([bytes(false)]).collect(),
        };
        json!({"type": "Sequence", "pretokenizers": parts})
    }
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEFAULT: [&str; 4] =
    [r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)", r"\p{N}+", r"[0-9][0-9][0-9]"];

/// SentencePiece's BPE has scores in place of merges: the two pieces of a token are merged the sooner the higher its score
/// (transformers' `convert_slow_tokenizer.py` makes the merges in the same way).
fn sentence_piece(gguf: &Gguf<'_>, vocabulary: &Vocabulary<'_>) -> Result<Value, FormatError> {
    let wrong = || gguf.wrong(SCORES, &format!("one number for each token{HINT}"));
    let scores = gguf.list(SCORES)?.ok_or_else(wrong)?;
    let scores = scores.iter().map(|v| if let Meta::Float(x) = v { Ok(*x) } else { Err(wrong()) }).collect::<Result<Vec<_>, _>>()?;
    if scores.len() != vocabulary.tokens.len() {
        return Err(wrong());
    }
    let mut merges = Vec::new();
    for ((token, kind), score) in vocabulary.tokens.iter().zip(&vocabulary.types).zip(scores) {
        if *kind != 1 {
            continue;
        }
        let mut pairs: Vec<(usize, usize, &str, &str)> = Vec::new();
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(l), Some(r)) = (vocabulary.ids.get(left), vocabulary.ids.get(right)) {
                pairs.push((*l, *r, left, right));
            }
        }
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|(_, _, left, right)| (score, left, right)));
    }
    let lengths = |(_, l, r): &(f64, &str, &str)| (l.chars().count(), r.chars().count());
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| lengths(b).cmp(&lengths(a))));
    let merges = merges.into_iter().map(|(_, left, right)| json!([left, right])).collect();
    let unknown = vocabulary.types.iter().position(|kind| *kind == UNKNOWN).and_then(|id| vocabulary.tokens.get(id));
    let options = json!({"unk_token": unknown, "fuse_unk": true, "byte_fallback": true});
    let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let prefix = gguf.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers = vec![space];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "\u{2581}"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let parts = [json!({"type": "Sequence", "normalizers": normalizers}), Value::Null, json!({"type": "Sequence", "decoders": decoders})];
    Ok(tokenizer(vocabulary, parts, merges, options))
}
