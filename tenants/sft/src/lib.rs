//! Supervised fine-tuning of a LoRA adapter: the usual case, by parameters alone. `README.md` lists them.
//!
//! Never asks for anything that a tenant's own component could not: it is an example as much as a tool.

mod adapter;
mod evaluate;
mod forms;
mod params;
#[cfg(test)]
mod tests;
mod train;

nodus_guest::job!(train::train);
