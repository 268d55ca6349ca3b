//! GGUF files (versions 2 and 3) to Hugging Face folders.
//!
//! The layout is that of <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Never trusts a count or an offset that
//! the file states before it is held against the file's size.

mod config;
mod dequantise;
mod import;
mod reader;
mod tokenizer;

pub use import::{ImportReport, TokenizerChoice, import};
