//! Runs one guest component in wasmtime under limits; turns its WIT calls into engine commands.

pub mod services;
