//! nodus-host: models, data, runs and receipts; what the binary's `main` calls.
//!
//! Holds no ambient authority of its own: `main` hands it in.

pub mod app;
mod audit;
mod bench;
mod books;
pub mod cli;
pub mod client;
pub mod cuda;
mod doctor;
mod engine;
pub mod error;
mod floor;
mod guest;
mod import;
mod journal;
pub mod limits;
mod machine;
pub mod manifest;
pub mod name;
pub mod paths;
mod process;
pub mod random;
pub mod receipt;
pub mod run;
pub mod serve;
pub mod settings;
pub mod store;
pub mod sweep;
pub mod telemetry;
mod tenants;
pub mod text;

#[cfg(fuzzing)]
pub use guest::fuzzing;
