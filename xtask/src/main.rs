//! The project's own commands: `cargo xtask test`, `cargo xtask demo` and `cargo xtask gpu-test`.
//!
//! A developer's tool: part of no product, and nothing depends on it.
#![expect(
    clippy::disallowed_methods,
    reason = "a developer's tool works on the repository's files and on the environment it was started in"
)]

mod chart;
mod demo;
mod gpu;
mod nvrtc;
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
    /// Build the ready-made components to tenants/target/wasm32-wasip2/release, naming no folder of this machine
    Guests,
    /// Train a LoRA adapter on a real model, end to end, on a fresh machine
    Demo {
        /// A Hugging Face folder or .gguf file in place of SmolLM2-135M-Instruct
        #[arg(long, value_name = "PATH")]
        model: Option<PathBuf>,
    },
    /// Build the tests that need an NVIDIA card into target/gpu-test, list what has to be carried to a machine without Rust, and run them where a card is here
    GpuTest {
        /// Cases of the search for a job that is not bit-equal to its solo run, in each precision
        #[arg(long, default_value_t = 24)]
        cases: u64,
        /// Seconds after which a search starts no more cases
        #[arg(long, default_value_t = 600)]
        seconds: u64,
        /// Seed of the search: slices with seeds at least as far apart as they have cases try different ones
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Test { slow } => test::run_all(slow),
        Command::Guests => steps::add_wasm_target().and_then(|()| steps::build_tenants()),
        Command::Demo { model } => demo::run_demo(model.as_deref()),
        Command::GpuTest { cases, seconds, seed } => {
            let numbers = [("--cases", cases), ("--seconds", seconds), ("--seed", seed)];
            gpu::run_gpu_tests(&numbers.map(|(name, number)| [name.to_owned(), number.to_string()]).concat())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
