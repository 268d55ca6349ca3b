//! The frozen base model.
//!
//! Never holds a weight: the host does, for everybody who names it.

use crate::Result;
use crate::bindings::trunk::{self, Message, TrunkInfo};

/// A frozen base model, held by the host.
#[derive(Debug)]
pub struct Trunk {
    handle: trunk::Trunk,
    info: TrunkInfo,
}

impl Trunk {
    /// Opens a trunk by the job's name for it; [`Job::trunk`](crate::Job::trunk) opens the usual one. May block while it is loaded.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn open(name: &str) -> Result<Self> {
        let handle = trunk::Trunk::open(name)?;
        let info = handle.info();
        Ok(Self { handle, info })
    }

    /// Architecture, sizes, module names and digest.
    #[must_use]
    pub fn info(&self) -> &TrunkInfo {
        &self.info
    }

    /// Tokens of a text, without any special token that the text does not spell out.
    ///
    /// # Errors
    /// `Unsupported` without a tokenizer; `QuotaExceeded` for `text-bytes`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.handle.encode(text)?)
    }

    /// Text of tokens, special tokens included.
    ///
    /// # Errors
    /// `Unsupported` without a tokenizer; `InvalidArgument` for a token outside the vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        Ok(self.handle.decode(tokens)?)
    }

    /// A conversation by the model's chat template; with `add_generation_prompt` the text ends where the answer would begin.
    ///
    /// # Errors
    /// `Unsupported` without a template; `InvalidArgument` where the template refuses the messages.
    pub fn apply_chat_template(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        Ok(self.handle.apply_chat_template(messages, add_generation_prompt)?)
    }

    pub(crate) fn handle(&self) -> &trunk::Trunk {
        &self.handle
    }
}

impl Message {
    /// One turn of a conversation: the role is `system`, `user`, `assistant` or what else the template knows.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}
