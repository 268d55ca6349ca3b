//! The project's own commands: `cargo xtask test` and `cargo xtask demo`.
//!
//! A developer's tool: part of no product, and nothing depends on it.
#![expect(
    clippy::disallowed_methods,
    reason = "a developer's tool works on the repository's files and on the environment it was started in"
)]

mod chart;
mod demo;
mod smollm2;
mod steps;
mod test;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's own commands
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run all checks: format, clippy, unit, integration and doc tests, licences
    Test {
        /// Also the tests that need a real model (fetched and cached) and minutes
        #[arg(long)]
        slow: bool,
    },
    /// Train a LoRA adapter on a real model, end to end, on a fresh machine
    Demo {
        /// A Hugging Face folder or .gguf file in place of SmolLM2-135M-Instruct
        #[arg(long, value_name = "PATH")]
        model: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Test { slow } => test::run_all(slow),
        Command::Demo { model } => demo::run_demo(model.as_deref()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
