//! `cargo xtask gpu-test`: the tests that need a card, built into a folder that can be carried to a machine without Rust; run where a card
//! is here.
//!
//! Never puts wasmtime into what is carried, and never says that a test ran that did not.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::steps::{cargo, output, root, run, step, target};

/// What is carried besides the executables: how they are run.
const SCRIPT: &str = include_str!("gpu-test.sh");
/// An executable's name there, the package it is of, its features and its test target.
const EXECUTABLES: [(&str, &str, &str, &str); 5] = [
    ("kernels", "nodus-kernels", "", "cuda"),
    ("kernels-broken", "nodus-kernels", "broken-kernel", "cuda"),
    ("kernels-gate-up", "nodus-kernels", "broken-gate-up", "cuda"),
    ("engine", "nodus-engine", "", "engine"),
    ("engine-broken", "nodus-engine", "broken-kernel", "engine"),
];
/// Where Linux has the driver.
const DRIVER: &str = "/proc/driver/nvidia/version";

/// A line of cargo's messages.
#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// Builds the folder, lists it, and runs it where there is a card, with these options of the script.
pub(crate) fn run_gpu_tests(options: &[String]) -> anyhow::Result<()> {
    let folder = target().join("gpu-test");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    step("executables", || {
        EXECUTABLES.iter().try_for_each(|(name, package, features, test)| build(&folder.join(name), package, features, test))
    })?;
    copy_tree(&root().join("tests/golden"), &folder.join("golden"))?;
    let script = folder.join("run.sh");
    std::fs::write(&script, SCRIPT).with_context(|| format!("writing {}", script.display()))?;
    list(&folder)?;
    if Path::new(DRIVER).exists() {
        return step("tests on the card", || run(Command::new("sh").arg(&script).args(options)));
    }
    eprintln!("There is no NVIDIA driver here: nothing was run. Carry the folder to a machine with a card, the driver, NVRTC and cuBLASLt");
    eprintln!("(`pip install nvidia-cuda-nvrtc nvidia-cublas`), and there: sh run.sh {}", options.join(" "));
    Ok(())
}

/// Builds one test executable without symbols.
fn build(to: &Path, package: &str, features: &str, test: &str) -> anyhow::Result<()> {
    let args = ["test", "--no-run", "--message-format", "json", "--package", package, "--features", features, "--test", test];
    let messages = output(&mut cargo(&args))?;
    let executable = messages.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok()).find_map(|message| {
        let target = message.target?;
        (target.name == test && target.kind == ["test"]).then_some(message.executable).flatten()
    });
    let executable = executable.with_context(|| format!("cargo names no executable of {package}'s test {test}"))?;
    std::fs::copy(&executable, to).with_context(|| format!("copying {}", executable.display()))?;
    // Symbols help nobody there; where there is no `strip` the file is just larger.
    let stripped = Command::new("strip").arg(to).stderr(Stdio::null()).status();
    if !stripped.is_ok_and(|status| status.success()) {
        eprintln!("    {} keeps its symbols: there is no `strip`", to.display());
    }
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    for entry in std::fs::read_dir(from).with_context(|| format!("listing {}", from.display()))? {
        let path = entry?.path();
        let place = to.join(path.file_name().context("an entry of a folder has a name")?);
        if path.is_dir() {
            copy_tree(&path, &place)?;
        } else {
            std::fs::copy(&path, &place).with_context(|| format!("copying {}", path.display()))?;
        }
    }
    Ok(())
}

/// What has to be carried, with sizes.
#[expect(clippy::print_stdout, reason = "the command's result")]
#[expect(clippy::cast_precision_loss, reason = "sizes for people")]
fn list(folder: &Path) -> anyhow::Result<()> {
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    entries.sort();
    let mut total = 0;
    for path in entries {
        let bytes = size(&path)?;
        total += bytes;
        println!("{:>8.1} MB  {}", megabytes(bytes), path.file_name().unwrap_or_default().to_string_lossy());
    }
    println!("{:>8.1} MB  in {}", megabytes(total), folder.display());
    ensure!(total > 0, "nothing was built");
    Ok(())
}

fn size(path: &Path) -> anyhow::Result<u64> {
    if !path.is_dir() {
        return Ok(path.metadata()?.len());
    }
    let mut bytes = 0;
    for entry in std::fs::read_dir(path)? {
        bytes += size(&entry?.path())?;
    }
    Ok(bytes)
}
