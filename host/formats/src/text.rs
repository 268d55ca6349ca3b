//! A model's tokenizer and chat template, as its folder describes them.
//!
//! Adds no token that neither the text nor the tokenizer's own settings ask for; in particular never an end token.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use cap_std::fs::Dir;
use nodus_protocol::Digest;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokenizers::{ModelWrapper, Tokenizer};

use crate::chat::ChatTemplate;
use crate::error::{FormatError, Place, clip};
use crate::files::{CONFIG_BYTES_MAX, TOKENIZER_BYTES_MAX, read_optional};
use crate::growth::Growth;
use crate::json::{Object, parse};

const TOKENIZER: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";
const SPECIAL_MAP: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";
const TEMPLATE_JSON: &str = "chat_template.json";
/// The files beside the tokenizer's.
const OTHERS: [&str; 4] = [SETTINGS, SPECIAL_MAP, TEMPLATE, TEMPLATE_JSON];
const SPECIAL: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// Why a text could not be tokenised, or a conversation not be rendered. Fit for a guest.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TextError {
    /// The model came without a chat template.
    #[error("the model came without a chat template, expected one for conversations")]
    NoTemplate,
    /// The template cannot be compiled, refused the messages, or did too much.
    #[error("the model's chat template failed: {0}")]
    Template(String),
    /// No such token.
    #[error("{0} is not a token, expected one of the model's vocabulary")]
    UnknownToken(u32),
    /// A text that could become too long.
    #[error("a text of {bytes} bytes, expected at most {allowed} for this model's tokenizer")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The longest that is taken.
        allowed: u64,
    },
    /// The tokenizer failed.
    #[error("the model's tokenizer failed: {0}")]
    Tokenizer(String),
}

/// A tokenizer and, where the model has one, a chat template.
pub struct TextModel {
    tokenizer: Tokenizer,
    growth: Growth,
    document_prefix: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    chat: Option<Result<ChatTemplate, String>>,
    digest: Digest,
}

/// Tokens with the byte range of the text that each stands for.
pub(crate) struct Spans {
    pub(crate) tokens: Vec<u32>,
    pub(crate) offsets: Vec<(usize, usize)>,
}

/// The files of a model folder that say something about text, by name; without `tokenizer.json` there are none. To be read where the folder
/// is, and parsed where a stranger's file harms nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextFiles(BTreeMap<String, ByteBuf>);

impl TextFiles {
    /// Reads them: `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja` or `chat_template.json`.
    ///
    /// # Errors
    /// A file that is unreadable or too long, named.
    pub fn read(dir: &Dir) -> Result<Self, FormatError> {
        let mut files = BTreeMap::new();
        for (name, bytes_max) in [(TOKENIZER, TOKENIZER_BYTES_MAX)].into_iter().chain(OTHERS.map(|name| (name, CONFIG_BYTES_MAX))) {
            if let Some(bytes) = read_optional(dir, name, bytes_max)? {
                files.insert(name.to_owned(), ByteBuf::from(bytes));
            }
            if files.is_empty() {
                break;
            }
        }
        Ok(Self(files))
    }

    /// Whether there is no tokenizer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(|bytes| bytes.as_slice())
    }

    fn object(&self, name: &str) -> Result<serde_json::Map<String, Value>, FormatError> {
        self.get(name).map_or_else(|| Ok(serde_json::Map::new()), |bytes| parse(name, bytes))
    }
}

impl TextModel {
    /// [`Self::from_files`] of a model folder.
    ///
    /// # Errors
    /// A file that is unreadable or malformed, named.
    pub fn open(dir: &Dir) -> Result<Option<Self>, FormatError> {
        Self::from_files(&TextFiles::read(dir)?)
    }

    /// What a model's files say about text. None where there is no `tokenizer.json`.
    ///
    /// # Errors
    /// A file that is malformed, named.
    pub fn from_files(files: &TextFiles) -> Result<Option<Self>, FormatError> {
        let Some(tokenizer) = files.get(TOKENIZER) else { return Ok(None) };
        let settings = files.object(SETTINGS)?;
        let settings = Object::new(SETTINGS, &settings);
        let map = files.object(SPECIAL_MAP)?;
        let tokens = special_tokens(settings, Object::new(SPECIAL_MAP, &map))?;
        let template = match files.get(TEMPLATE) {
            Some(bytes) => Some(
                String::from_utf8(bytes.to_vec())
                    .map_err(|_| FormatError::invalid(TEMPLATE, Place::File, "bytes that are not UTF-8", "a Jinja template"))?,
            ),
            None => {
                let file = files.object(TEMPLATE_JSON)?;
                match template_of(Object::new(TEMPLATE_JSON, &file))? {
                    None => template_of(settings)?,
                    some => some,
                }
            }
        };
        Self::from_parts(tokenizer, settings.bool("add_bos_token")?, tokens, template).map(Some)
    }

    /// Puts the parts together: the bytes of `tokenizer.json`, whether the settings say that texts begin with the beginning
    /// token (none: the tokenizer's post-processor decides), the special tokens by name, and the template.
    pub(crate) fn from_parts(
        tokenizer_json: &[u8],
        add_bos: Option<bool>,
        special: BTreeMap<String, String>,
        template: Option<String>,
    ) -> Result<Self, FormatError> {
        let invalid = |e: String| FormatError::invalid(TOKENIZER, Place::File, clip(&e), "a tokenizer of the tokenizers library");
        let growth = contain(|| Growth::of(tokenizer_json).map_err(Into::into)).map_err(invalid)?;
        let mut tokenizer = contain(|| Tokenizer::from_bytes(tokenizer_json)).map_err(invalid)?;
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && bpe.dropout.is_some_and(|dropout| dropout != 0.0)
        {
            // It would draw from the system's randomness: the same text would be other tokens each time.
            let place = Place::key("model.dropout");
            return Err(FormatError::unsupported(
                TOKENIZER,
                place,
                format!("dropout {}", bpe.dropout.unwrap_or_default()),
                "no dropout in the tokenizer",
            ));
        }
        tokenizer.with_padding(None);
        contain(|| tokenizer.with_truncation(None).map(|_| ())).map_err(invalid)?;
        let id = |name: &str| -> Result<Option<u32>, FormatError> {
            let Some(text) = special.get(name) else { return Ok(None) };
            tokenizer.token_to_id(text).map(Some).ok_or_else(|| {
                FormatError::invalid(SETTINGS, Place::key(name), format!("`{}`, no token of {TOKENIZER}", clip(text)), "one of its tokens")
            })
        };
        let (bos, eos) = (id("bos_token")?, id("eos_token")?);
        let document_prefix = match add_bos {
            Some(true) => bos.into_iter().collect(),
            Some(false) => Vec::new(),
            None => prefix_of(&tokenizer).map_err(invalid)?,
        };
        let digest = digest(tokenizer_json, &document_prefix, &special, template.as_deref());
        let chat = template.map(|source| ChatTemplate::new(&source, special));
        Ok(Self { tokenizer, growth, document_prefix, bos, eos, chat, digest })
    }

    /// Tokens of a text, without any special token that the text does not spell out.
    ///
    /// # Errors
    /// A text that is too long; when the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.refuse_long(text)?;
        contain(|| self.tokenizer.encode_fast(text, false)).map(|e| e.get_ids().to_vec()).map_err(tokenizer_failed)
    }

    /// Tokens of a text that begins a sequence: [`Self::encode`], with what the tokenizer itself puts at a beginning in front,
    /// unless the text spells it out.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_document(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let tokens = self.encode(text)?;
        if tokens.starts_with(&self.document_prefix) {
            return Ok(tokens);
        }
        let mut all = self.document_prefix.clone();
        all.extend(tokens);
        Ok(all)
    }

    /// Tokens with their places in the text.
    pub(crate) fn encode_spans(&self, text: &str) -> Result<Spans, TextError> {
        self.refuse_long(text)?;
        let encoding = contain(|| self.tokenizer.encode(text, false)).map_err(tokenizer_failed)?;
        Ok(Spans { tokens: encoding.get_ids().to_vec(), offsets: encoding.get_offsets().to_vec() })
    }

    fn refuse_long(&self, text: &str) -> Result<(), TextError> {
        let bytes = text.len() as u64;
        self.growth.encode(bytes).map_err(|allowed| TextError::TooLong { bytes, allowed })
    }

    /// Text of tokens, special tokens included.
    ///
    /// # Errors
    /// A token outside the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TextError> {
        let mut bytes = 0;
        for id in tokens {
            bytes += self.tokenizer.id_to_token(*id).ok_or(TextError::UnknownToken(*id))?.len() as u64;
        }
        self.growth.decode(bytes).map_err(|allowed| TextError::TooLong { bytes, allowed })?;
        contain(|| self.tokenizer.decode(tokens, false)).map_err(tokenizer_failed)
    }

    /// Renders a conversation of (role, content) by the model's chat template; with `add_generation_prompt` the text ends where
    /// the assistant's answer would begin.
    ///
    /// # Errors
    /// No template, or a template that refuses the messages.
    pub fn apply_chat_template(&self, messages: &[(String, String)], add_generation_prompt: bool) -> Result<String, TextError> {
        match &self.chat {
            None => Err(TextError::NoTemplate),
            Some(Err(why)) => Err(TextError::Template(why.clone())),
            Some(Ok(template)) => template.render(messages, add_generation_prompt).map_err(TextError::Template),
        }
    }

    /// What the tokenizer puts in front of a text that begins a sequence; empty for many models.
    #[must_use]
    pub fn document_prefix(&self) -> &[u32] {
        &self.document_prefix
    }

    /// The beginning token that the settings name. Whether texts begin with it: [`Self::document_prefix`].
    #[must_use]
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end token that the settings name.
    #[must_use]
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether the model has a chat template.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.chat.is_some()
    }

    /// SHA-256 over everything that decides which tokens a text becomes: tokenizer, beginning tokens, special tokens, template.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

/// The tokenizers library panics on some malformed files; a stranger's file must not end the host.
fn contain<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the tokenizers library gave up on it".into()),
    }
}

fn tokenizer_failed(why: String) -> TextError {
    TextError::Tokenizer(clip(&why))
}

/// What the post-processor puts in front of a text.
fn prefix_of(tokenizer: &Tokenizer) -> Result<Vec<u32>, String> {
    let plain = contain(|| tokenizer.encode("a", false))?;
    let whole = contain(|| tokenizer.encode("a", true))?;
    let (plain, whole) = (plain.get_ids(), whole.get_ids());
    let start = (0..whole.len()).find(|i| whole.get(*i..).is_some_and(|rest| rest.starts_with(plain)));
    Ok(whole.iter().take(start.unwrap_or(0)).copied().collect())
}

/// Special tokens by name; each is a string, or an object with its `content`.
fn special_tokens(settings: Object<'_>, map: Object<'_>) -> Result<BTreeMap<String, String>, FormatError> {
    let mut tokens = BTreeMap::new();
    for name in SPECIAL {
        let (object, value) = match settings.get(name) {
            Some(value) => (settings, value),
            None if settings.has(name) => continue,
            None => match map.get(name) {
                Some(value) => (map, value),
                None => continue,
            },
        };
        let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        let text = text.ok_or_else(|| object.wrong(name, value, "a string or an object with `content`"))?;
        tokens.insert(name.to_owned(), text.to_owned());
    }
    Ok(tokens)
}

/// `chat_template`: a string, or a list of named ones, of which `default` counts.
fn template_of(object: Object<'_>) -> Result<Option<String>, FormatError> {
    const EXPECTED: &str = "a string, or a list of objects with `name` and `template`";
    match object.get("chat_template") {
        None => Ok(None),
        Some(Value::String(source)) => Ok(Some(source.clone())),
        Some(Value::Array(list)) => {
            let default = list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            Ok(default.and_then(|t| t.get("template")).and_then(Value::as_str).map(str::to_owned))
        }
        Some(other) => Err(object.wrong("chat_template", other, EXPECTED)),
    }
}

fn digest(tokenizer: &[u8], prefix: &[u32], special: &BTreeMap<String, String>, template: Option<&str>) -> Digest {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(b"nodus text 1");
    part(tokenizer);
    for token in prefix {
        part(&token.to_le_bytes());
    }
    for (name, text) in special {
        part(name.as_bytes());
        part(text.as_bytes());
    }
    part(template.unwrap_or_default().as_bytes());
    Digest::from_bytes(hash.finalize().into())
}
