//! Starts other programs, and says what is being done and how long it took.
//!
//! Never hides a program's output.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// Where the workspace's build outputs are.
pub(crate) fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Runs one step; a line before it and one after it with its time.
pub(crate) fn step(name: &str, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    eprintln!("==> {name}");
    let start = Instant::now();
    work().with_context(|| format!("{name} failed"))?;
    eprintln!("    {name}: {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// The cargo that runs this.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// The same in the guests' workspace, with its own target folder: two builds in one would wait for each other.
pub(crate) fn cargo_tenants(args: &[&str]) -> Command {
    let mut command = cargo(args);
    let tenants = root().join("tenants");
    command.env("CARGO_TARGET_DIR", tenants.join("target")).current_dir(tenants);
    command
}

/// Runs a program to its end; its output goes where ours goes.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("starting {}", shown(command)))?;
    ensure!(status.success(), "{} ended with {status}", shown(command));
    Ok(())
}

/// Runs a program to its end; what it writes to standard output.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("starting {}", shown(command)))?;
    if !output.status.success() {
        bail!("{} ended with {}", shown(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a cargo subcommand is installed.
pub(crate) fn has_cargo_command(name: &str) -> bool {
    cargo(&[name, "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn shown(command: &Command) -> String {
    let parts = std::iter::once(command.get_program()).chain(command.get_args()).map(OsStr::to_string_lossy);
    parts.collect::<Vec<_>>().join(" ")
}

/// Adds the target that guests are built for, where rustup does not have it yet.
pub(crate) fn add_wasm_target() -> anyhow::Result<()> {
    const TARGET: &str = "wasm32-wasip2";
    let installed = output(Command::new("rustup").args(["target", "list", "--installed"]).current_dir(root()))?;
    if installed.lines().any(|line| line.trim() == TARGET) {
        return Ok(());
    }
    run(Command::new("rustup").args(["target", "add", TARGET]).current_dir(root()))
}

/// Builds every ready-made guest to `tenants/target/wasm32-wasip2/release/*.wasm`. What a panic says of its place names no folder of this
/// machine, so that a component's bytes, and with them its digest, do not depend on where Cargo keeps its packages.
pub(crate) fn build_tenants() -> anyhow::Result<()> {
    let flags: Vec<String> = remaps()?.iter().map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display())).collect();
    let flags = format!("target.wasm32-wasip2.rustflags={flags:?}");
    run(&mut cargo_tenants(&["build", "--release", "--target", "wasm32-wasip2", "--config", &flags]))
}

/// Folders of this machine, and what they are called in a component. Where several fit, rustc takes the last.
fn remaps() -> anyhow::Result<[(PathBuf, String); 3]> {
    let rustc = |args: &[&str]| output(Command::new("rustc").args(args).current_dir(root()));
    let version = rustc(&["-vV"])?;
    let commit = version.lines().find_map(|line| line.strip_prefix("commit-hash: ")).context("rustc does not tell its commit")?;
    let library = PathBuf::from(rustc(&["--print", "sysroot"])?.trim()).join("lib/rustlib/src/rust");
    let cargo_home = match (std::env::var_os("CARGO_HOME"), std::env::var_os("HOME")) {
        (Some(home), _) => PathBuf::from(home),
        (None, Some(home)) => PathBuf::from(home).join(".cargo"),
        (None, None) => bail!("neither CARGO_HOME nor HOME is set"),
    };
    Ok([(cargo_home, "/cargo".to_owned()), (library, format!("/rustc/{commit}")), (root(), "/nodus".to_owned())])
}

/// A ready-made guest, built.
pub(crate) fn guest(name: &str) -> PathBuf {
    root().join("tenants/target/wasm32-wasip2/release").join(name).with_extension("wasm")
}
