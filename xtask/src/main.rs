//! The project's own commands: `cargo xtask test`, `demo`, `audit`, `fuzz`, `guests` and `gpu-test`.
//!
//! A developer's tool: part of no product, and nothing depends on it.
#![expect(
    clippy::disallowed_methods,
    reason = "a developer's tool works on the repository's files and on the environment it was started in"
)]

mod audit;
mod chart;
mod demo;
mod fuzz;
mod gpu;
mod nvrtc;
mod service;
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
        /// Also the tests that need a real model (fetched and cached), and a short round of every fuzz target: half an hour more
        #[arg(long)]
        slow: bool,
    },
    /// Build the ready-made components to tenants/target/wasm32-wasip2/release, naming no folder of this machine
    Guests,
    /// Two tenants of a service train LoRA adapters on a real model, end to end, on a fresh machine
    Demo {
        /// A Hugging Face folder or .gguf file in place of SmolLM2-135M-Instruct
        #[arg(long, value_name = "PATH")]
        model: Option<PathBuf>,
    },
    /// Feed made-up bytes to everything that parses strangers' (cargo-fuzz, installed where it is missing)
    Fuzz {
        /// Seconds for each target
        #[arg(long, default_value_t = 30)]
        seconds: u64,
        /// One target of fuzz/fuzz_targets in place of all
        target: Option<String>,
    },
    /// Look for known weaknesses (cargo-audit) and check licences, bans and sources (cargo-deny) of all workspaces; both tools are installed where they are missing. `ADVISORY_DB` names a folder with a copy of the RustSec database, for machines without a network
    Audit,
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
        Command::Fuzz { seconds, target } => fuzz::run_fuzz(seconds, target.as_deref()),
        Command::Audit => audit::run_audit(),
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
