//! What a guest process keeps for all its jobs: tokenizers, and the tokens of data sets while somebody has them open.
//!
//! Parses strangers' files, which is why it is here and not in the parent.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nodus_formats::{TextFiles, TextModel};
use nodus_protocol::Digest;
use nodus_sandbox::services::{Dataset, Refusal, Text, Trunk};

use super::words::RowsWords;
use crate::run::services::{HostText, ours, refusal};
use crate::run::tokens::{Part, Tokens};

/// All of it.
#[derive(Default)]
pub(super) struct Shelf {
    /// By the trunk's digest, which is over the tokenizer's too.
    texts: Mutex<BTreeMap<Digest, Arc<ShelfText>>>,
    rows: Mutex<BTreeMap<u64, Arc<ShelfRows>>>,
}

/// A tokenizer's files, parsed when first used.
pub(super) struct ShelfText {
    files: Arc<TextFiles>,
    model: OnceLock<Result<HostText, Refusal>>,
}

/// A part of a data set. Locked while it is read, so that it is read once.
pub(super) struct ShelfRows {
    part: Part,
    tokens: Tokens,
    pub(super) reading: tokio::sync::Mutex<()>,
}

impl Shelf {
    pub(super) fn text(&self, trunk: Digest) -> Option<Arc<ShelfText>> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner).get(&trunk).cloned()
    }

    pub(super) fn put_text(&self, trunk: Digest, files: Arc<TextFiles>) -> Arc<ShelfText> {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.entry(trunk).or_insert_with(|| Arc::new(ShelfText { files, model: OnceLock::new() })).clone()
    }

    pub(super) fn rows(&self, words: RowsWords) -> Arc<ShelfRows> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(ShelfRows { part: words.part, tokens: Tokens::default(), reading: tokio::sync::Mutex::default() });
        rows.entry(words.id).or_insert_with(new).clone()
    }
}

impl ShelfRows {
    /// What somebody has open.
    pub(super) fn peek(&self, trunk: &Trunk, max_length: usize) -> Option<Dataset> {
        self.tokens.peek((trunk.digest, max_length), self.part.digest)
    }

    /// The whole data set's bytes to the part's tokens. Takes CPU time in proportion.
    pub(super) fn tokenise(&self, whole: Vec<u8>, trunk: &Trunk, text: Option<&ShelfText>, max_length: usize) -> Result<Dataset, Refusal> {
        let text = text.map(ShelfText::model).transpose()?.map(|text| &*text.0);
        let read = || self.part.read(Cursor::new(whole), &trunk.config, text, max_length);
        self.tokens.get((trunk.digest, max_length), self.part.digest, read)
    }
}

impl ShelfText {
    fn model(&self) -> Result<&HostText, Refusal> {
        let parse = || match TextModel::from_files(&self.files).map_err(|error| refusal(&error))? {
            Some(model) => Ok(HostText(Arc::new(model))),
            None => Err(ours("opening a tokenizer", &"its files are not there")),
        };
        self.model.get_or_init(parse).as_ref().map_err(Clone::clone)
    }

    /// Off the list of threads that run guests: a tokenizer knows no yielding.
    fn aside<T>(&self, work: impl FnOnce(&HostText) -> Result<T, Refusal>) -> Result<T, Refusal> {
        tokio::task::block_in_place(|| work(self.model()?))
    }
}

impl Text for ShelfText {
    fn encode(&self, text: &str) -> Result<Vec<u32>, Refusal> {
        self.aside(|model| model.encode(text))
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, Refusal> {
        self.aside(|model| model.decode(tokens))
    }

    fn apply_chat_template(&self, messages: &[(String, String)], add_generation_prompt: bool) -> Result<String, Refusal> {
        self.aside(|model| model.apply_chat_template(messages, add_generation_prompt))
    }
}
