//! `cargo xtask test`: every check, the tests last, so that the runner's own summary ends the output.
//!
//! Never skips a check without saying so.

use std::process::Command;

use crate::audit::check_licences;
use crate::fuzz;
use crate::nvrtc;
use crate::smollm2;
use crate::steps::{add_wasm_target, build_tenants, cargo, cargo_tenants, has_cargo_command, run, step};

/// Of each target.
const FUZZ_SECONDS: u64 = 30;

/// Runs all checks; with `slow` also the tests that need a real model, and a round of every fuzz target.
pub(crate) fn run_all(slow: bool) -> anyhow::Result<()> {
    step("format", || {
        run(&mut cargo(&["fmt", "--all", "--check"]))?;
        run(&mut cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]))?;
        run(&mut cargo_tenants(&["fmt", "--all", "--check"]))
    })?;
    step("guests", || {
        add_wasm_target()?;
        build_tenants()
    })?;
    step("clippy", || run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])))?;
    step("clippy of the guests", || run(&mut cargo_tenants(&["clippy", "--all-targets", "--", "-D", "warnings"])))?;
    licences()?;
    step("tests of the guests", || run(&mut cargo_tenants(&["test", "--quiet"])))?;
    step("doc tests", || run(&mut cargo(&["test", "--quiet", "--workspace", "--doc"])))?;
    for fault in ["broken-row-leak", "broken-reduction"] {
        // The search for a job that is not bit-equal to its solo run must find one in a build that has this fault.
        let search = ["test", "--quiet", "--package", "nodus-engine", "--features", fault, "--test", "engine", "exactness"];
        step(&format!("a build with {fault} is noticed"), || run(&mut cargo(&search)))?;
    }
    // The end-to-end tests start the binary, which a test build of another package does not make. Built with the tests, so that what they
    // have in common has one set of features and is built once.
    step("binary", || run(&mut cargo(&["build", "--workspace", "--bins", "--tests"])))?;
    let nvrtc = nvrtc::fetched()?;
    let model = if slow { Some(smollm2::gguf()?) } else { None };
    if slow {
        fuzz::run_fuzz(FUZZ_SECONDS, None)?;
    }
    // A test that passes is not heard, so it is said here.
    if Command::new("chromedriver").arg("--version").output().is_err() {
        eprintln!(
            "==> the live page in a browser: skipped, chromium and chromedriver are not installed (Debian: chromium, chromium-driver)"
        );
    }
    step("tests", || {
        let runner: &[&str] = if has_cargo_command("nextest") { &["nextest", "run"] } else { &["test", "--all-targets"] };
        let mut command = cargo(runner);
        command.arg("--workspace");
        if let Some(nvrtc) = &nvrtc {
            command.env("NODUS_CUDA_LIBRARIES", &nvrtc.libraries).env("NODUS_CUDA_CACHE", &nvrtc.kernels);
        }
        if let Some(model) = &model {
            command.args(["--features", "nodus-tests/slow,nodus-engine/slow"]).env("NODUS_SMOLLM2", model);
        }
        run(&mut command)
    })
}

fn licences() -> anyhow::Result<()> {
    if has_cargo_command("deny") {
        return check_licences();
    }
    eprintln!("==> licences, bans, sources: skipped, cargo-deny is not installed (`cargo install cargo-deny`)");
    Ok(())
}
