//! Whole files in, values out, and back: models, GGUF imports, data sets and adapters.

#[cfg(test)]
mod data;
#[cfg(test)]
mod gguf;
#[cfg(test)]
mod hf;
#[cfg(test)]
mod merge;
#[cfg(test)]
mod peft;
#[cfg(test)]
mod support;
