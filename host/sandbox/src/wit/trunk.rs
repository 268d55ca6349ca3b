//! `nodus:gpu/trunk`: frozen models and their tokenizers. Holds no weights.

use std::sync::Arc;

use wasmtime::component::Resource;

use super::Fault;
use super::handles::TrunkHandle;
use crate::bindings::nodus::gpu::trunk::{Host, HostTrunk, Message, TrunkInfo};
use crate::services::{Refusal, Text, Trunk};
use crate::state::State;
use nodus_protocol::Module;

impl Host for State {}

impl HostTrunk for State {
    async fn open(&mut self, name: String) -> Result<Resource<TrunkHandle>, Fault> {
        let trunk = self.services.open_trunk(&name).await?;
        self.meter.answered();
        self.push(TrunkHandle(trunk))
    }

    fn info(&mut self, trunk: Resource<TrunkHandle>) -> wasmtime::Result<TrunkInfo> {
        let Trunk { config, digest, .. } = &self.table.get(&trunk)?.0;
        let u32 = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        Ok(TrunkInfo {
            architecture: config.architecture.name().to_owned(),
            layers: u32(config.num_hidden_layers),
            hidden_size: u32(config.hidden_size),
            vocabulary_size: u32(config.vocab_size),
            context_length: u32(config.max_position_embeddings),
            eos_token: config.eos_token_id,
            target_modules: Module::ALL.iter().map(ToString::to_string).collect(),
            digest: digest.to_string(),
        })
    }

    fn encode(&mut self, trunk: Resource<TrunkHandle>, text: String) -> Result<Vec<u32>, Fault> {
        Ok(self.text(&trunk, text.len())?.encode(&text)?)
    }

    fn decode(&mut self, trunk: Resource<TrunkHandle>, tokens: Vec<u32>) -> Result<String, Fault> {
        Ok(self.text(&trunk, size_of_val(tokens.as_slice()))?.decode(&tokens)?)
    }

    fn apply_chat_template(
        &mut self,
        trunk: Resource<TrunkHandle>,
        messages: Vec<Message>,
        add_generation_prompt: bool,
    ) -> Result<String, Fault> {
        let bytes = messages.iter().map(|message| size_of::<Message>() + message.role.len() + message.content.len()).sum();
        let text = self.text(&trunk, bytes)?;
        let messages: Vec<_> = messages.into_iter().map(|message| (message.role, message.content)).collect();
        Ok(text.apply_chat_template(&messages, add_generation_prompt)?)
    }

    fn drop(&mut self, trunk: Resource<TrunkHandle>) -> wasmtime::Result<()> {
        self.table.delete(trunk)?;
        Ok(())
    }
}

impl State {
    /// The trunk's tokenizer, for a text of so many bytes.
    fn text(&self, trunk: &Resource<TrunkHandle>, bytes: usize) -> Result<Arc<dyn Text>, Fault> {
        if bytes as u64 > self.limits.text_bytes {
            return Err(Fault::quota("text-bytes", bytes as u64, self.limits.text_bytes));
        }
        let text = self.table.get(trunk)?.0.text.clone();
        text.ok_or_else(|| Refusal::Unsupported("this model came without a tokenizer".into()).into())
    }
}
