//! `cargo xtask fuzz`: libFuzzer on everything that parses strangers' bytes, from the small corpus in `fuzz/corpus`.
//!
//! Never adds to that corpus: what a round finds stays under `target/fuzz-corpus`, and what breaks something under `fuzz/artifacts`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::steps::{cargo, has_cargo_command, output, root, run, step, target};

/// Beyond it a target uses too much memory.
const MEMORY_MIB_MAX: u64 = 4096;
/// Beyond it one input takes too long.
const INPUT_SECONDS_MAX: u64 = 30;
/// Longest input: the smallest model of the tests fits, and larger ones would take the time of thousands of inputs.
const INPUT_BYTES_MAX: u64 = 40_000;

/// Runs targets for so many seconds each: all of them, or the one named.
pub(crate) fn run_fuzz(seconds: u64, only: Option<&str>) -> anyhow::Result<()> {
    let targets = targets()?;
    if let Some(only) = only {
        ensure!(targets.iter().any(|target| target == only), "there is no target `{only}`, expected one of {}", targets.join(", "));
    }
    if !has_cargo_command("fuzz") {
        step("install cargo-fuzz", || run(&mut cargo(&["install", "--locked", "cargo-fuzz"])))?;
    }
    let sanitizer = sanitizer()?;
    step("build the fuzz targets", || run(cargo_fuzz("build", sanitizer).args(only)))?;
    for name in targets.iter().filter(|target| only.is_none_or(|only| only == target.as_str())) {
        step(&format!("fuzz {name} for {seconds} s"), || round(name, seconds, sanitizer))?;
    }
    Ok(())
}

fn round(name: &str, seconds: u64, sanitizer: &str) -> anyhow::Result<()> {
    let found = target().join("fuzz-corpus").join(name);
    // libFuzzer leaves by `_exit`, and with it whatever a target put into the folder for temporary files.
    let temporary = target().join("fuzz-temporary");
    for folder in [&found, &temporary] {
        std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let mut command = cargo_fuzz("run", sanitizer);
    command.env("TMPDIR", &temporary);
    command.arg(name).arg(found).arg(root().join("fuzz/corpus").join(name));
    // The models of the formats' own tests.
    if name == "gguf" {
        command.arg(root().join("host/formats/tests/fixtures"));
    }
    command.arg("--").arg(format!("-max_total_time={seconds}")).arg(format!("-timeout={INPUT_SECONDS_MAX}"));
    command.arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}")).arg(format!("-max_len={INPUT_BYTES_MAX}"));
    let ended = run(command.args(["-print_final_stats=1", "-verbosity=0"]));
    std::fs::remove_dir_all(&temporary).with_context(|| format!("removing {}", temporary.display()))?;
    ended
}

/// cargo-fuzz on the toolchain that is here: its flags are unstable, and stay out of everything that is shipped.
fn cargo_fuzz(verb: &str, sanitizer: &str) -> Command {
    let mut command = cargo(&["fuzz", verb, "--sanitizer", sanitizer, "--fuzz-dir", "fuzz"]);
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}

/// The address sanitizer, where the toolchain came with its runtime.
fn sanitizer() -> anyhow::Result<&'static str> {
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]).current_dir(root()))?;
    let version = output(Command::new("rustc").arg("-vV").current_dir(root()))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc does not tell its host")?;
    let libraries = Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("lib");
    let names = std::fs::read_dir(&libraries).with_context(|| format!("reading {}", libraries.display()))?;
    let is_there = names.filter_map(Result::ok).any(|entry| entry.file_name().to_string_lossy().ends_with("_rt.asan.a"));
    Ok(if is_there { "address" } else { "none" })
}

fn targets() -> anyhow::Result<Vec<String>> {
    let entries = std::fs::read_dir(root().join("fuzz/fuzz_targets")).context("reading fuzz/fuzz_targets")?;
    let mut names: Vec<String> = entries.filter_map(|entry| Some(entry.ok()?.path().file_stem()?.to_string_lossy().into_owned())).collect();
    names.sort();
    Ok(names)
}
