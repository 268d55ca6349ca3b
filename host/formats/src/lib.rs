//! Files of the field to values and back: Hugging Face folders, GGUF, tokenizers, JSON Lines, PEFT adapters.
//!
//! Never opens a file by an ambient path (everything takes a [`cap_std::fs::Dir`], an open file, a reader or bytes), never
//! trusts a length that a file states, and knows no engine, no sandbox and no job.

mod chat;
mod config;
pub mod data;
mod error;
mod files;
pub mod gguf;
mod growth;
pub mod hf;
mod json;
pub mod merge;
pub mod peft;
mod rope;
mod safetensors;
mod text;

pub use error::{FormatError, Place};
pub use files::{CONFIG_BYTES_MAX, TOKENIZER_BYTES_MAX};
pub use hf::Model;
pub use text::{TextError, TextFiles, TextModel};
