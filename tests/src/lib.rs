//! What the end-to-end tests share: where the binary, the guests and the golden files are, and how to run a job from outside.
//!
//! Never reaches into the host: everything goes through the command line and the files it leaves.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::missing_panics_doc,
    reason = "a panic is how a test fails"
)]

pub mod browser;
mod server;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use base64::Engine as _;
use serde::Deserialize;
use tempfile::TempDir;

pub use server::{Answer, Server, answer};

/// The root of the repository.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A file or folder of the reference runs.
#[must_use]
pub fn golden(path: &str) -> PathBuf {
    let path = root().join("tests/golden").join(path);
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// The binary under test, beside this test's own executable.
#[must_use]
pub fn host() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let path = exe.ancestors().nth(2).unwrap().join("nodus-host");
    assert!(path.exists(), "{} is missing: run `cargo build --package nodus-host` (`cargo xtask test` does)", path.display());
    path
}

/// A ready-made guest.
#[must_use]
pub fn guest(name: &str) -> PathBuf {
    let path = root().join("tenants/target/wasm32-wasip2/release").join(name).with_extension("wasm");
    assert!(
        path.exists(),
        "{} is missing: run `cargo build --release --target wasm32-wasip2` in tenants/ (`cargo xtask test` does)",
        path.display()
    );
    path
}

/// The guest that does as it is told, of the sandbox's own tests; built when first asked for.
#[must_use]
pub fn told_guest() -> PathBuf {
    let (root, cargo) = (root(), std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let target = host().parent().unwrap().join("told-guest");
    let mut build = Command::new(cargo);
    build.args(["build", "--quiet", "--release", "--target", "wasm32-wasip2"]);
    build.arg("--manifest-path").arg(root.join("host/sandbox/tests/guest/Cargo.toml")).arg("--target-dir").arg(&target);
    assert!(build.status().unwrap().success(), "the guest does not build; `rustup target add wasm32-wasip2` may be missing");
    target.join("wasm32-wasip2/release/sandbox_guest.wasm")
}

impl Host {
    /// An empty data folder with the tiny Llama as `llama`, and the reference tokens beside it as `tokens.jsonl`.
    #[must_use]
    pub fn with_llama() -> Self {
        let host = Self::new();
        let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
        std::fs::write(host.path("tokens.jsonl"), lines).unwrap();
        host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
        host
    }

    /// A new tenant; its token.
    #[must_use]
    pub fn tenant(&self, name: &str, quotas: &[&str]) -> String {
        let quotas = quotas.iter().flat_map(|quota| ["--quota", quota]);
        self.ok(["tenant", "add", name].into_iter().chain(quotas)).trim().to_owned()
    }
}

/// A throw-away data folder and the commands that work on it.
pub struct Host {
    /// Everything of one test: `data/` and whatever the test puts beside it.
    pub dir: TempDir,
}

impl Host {
    /// An empty data folder.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// A path in this test's folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the binary with these arguments.
    pub fn call<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Output {
        Command::new(host()).args(args).env("NODUS_DATA_DIR", self.path("data")).output().unwrap()
    }

    /// Runs it and expects success; answers standard output.
    pub fn ok<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> String {
        let output = self.call(args);
        assert!(output.status.success(), "exit {:?}\n{}\n{}", output.status.code(), text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs it and expects this exit code and a short refusal; answers standard error.
    pub fn refused<S: AsRef<std::ffi::OsStr>>(&self, code: i32, args: impl IntoIterator<Item = S>) -> String {
        let output = self.call(args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{error}");
        error
    }
}

/// Processes that a host has started for one of its verbs (`guest`, `compile`), as `/proc` tells.
#[must_use]
pub fn children(host: u32, verb: &str) -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_string_lossy().parse::<u32>().ok());
    let is_wanted = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        parent == Some(host) && line.split(|byte| *byte == 0).nth(1) == Some(verb.as_bytes())
    };
    pids.filter(is_wanted).collect()
}

/// Bytes as text.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A line of `losses.jsonl`.
#[derive(Debug, Deserialize)]
pub struct Step {
    /// The adapter's step count after the step.
    pub step: u64,
    /// Mean loss over the labelled tokens.
    pub loss: f64,
    /// Its float32, as hexadecimal.
    pub loss_bits: String,
    /// After normalisation, before clipping.
    pub grad_norm: f64,
    /// Of this step.
    pub learning_rate: f64,
    /// Labelled.
    pub tokens: u64,
}

/// Reads a file of one JSON value a line.
#[must_use]
pub fn json_lines<T: for<'a> Deserialize<'a>>(path: &Path) -> Vec<T> {
    let file = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    file.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{}: {e}: {line}", path.display()))).collect()
}

/// The statement in a receipt's envelope.
#[must_use]
pub fn statement(receipt: &[u8]) -> serde_json::Value {
    let envelope: serde_json::Value = serde_json::from_slice(receipt).expect("a receipt is JSON");
    let payload = base64::engine::general_purpose::STANDARD.decode(envelope["payload"].as_str().unwrap()).unwrap();
    serde_json::from_slice(&payload).unwrap()
}

/// Every file below a folder, by its relative name; of receipts the statement, without these fields of its predicate.
#[must_use]
pub fn contents(dir: &Path, without: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let mut bytes = std::fs::read(&path).unwrap();
            if path.ends_with("receipt.json") {
                let mut statement = statement(&bytes);
                for field in without {
                    statement["predicate"].as_object_mut().unwrap().remove(*field).unwrap_or_else(|| panic!("the receipt has no {field}"));
                }
                bytes = statement.to_string().into_bytes();
            }
            found.insert(path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned(), bytes);
        }
    }
    found
}

/// Asserts that two folders hold the same files with the same bytes.
pub fn assert_same(expected: &BTreeMap<String, Vec<u8>>, found: &BTreeMap<String, Vec<u8>>, what: &str) {
    assert_eq!(expected.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>(), "{what}");
    for (name, bytes) in expected {
        assert!(bytes == &found[name], "{what}: {name} differs:\n{}\n{}", text(bytes), text(&found[name]));
    }
}

/// The tokens of a reference run as JSON Lines of `tokens` and `weights`, padding left out.
///
/// `ids`, `labels`, `mask` are the names of int64 tensors of one shape [..., rows, length] in a safetensors file; -100 marks no label.
#[must_use]
pub fn token_lines(file: &Path, [ids, labels, mask]: [&str; 3]) -> String {
    let bytes = std::fs::read(file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let read = |name: &str| -> Vec<i64> {
        tensors.tensor(name).unwrap().data().chunks_exact(8).map(|word| i64::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let length = *tensors.tensor(ids).unwrap().shape().last().unwrap();
    let (ids, labels, mask) = (read(ids), read(labels), read(mask));
    let rows = ids.chunks(length).zip(labels.chunks(length)).zip(mask.chunks(length));
    rows.map(|((ids, labels), mask)| {
        let real = mask.iter().filter(|m| **m == 1).count();
        let weights: Vec<u8> = labels.iter().take(real).map(|label| u8::from(*label != -100)).collect();
        format!("{}\n", serde_json::json!({"tokens": ids.iter().take(real).collect::<Vec<_>>(), "weights": weights}))
    })
    .collect()
}

/// The float32 tensors of a safetensors file, by name.
#[must_use]
pub fn float_tensors(file: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let widen = |data: &[u8]| data.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect();
    tensors.tensors().into_iter().map(|(name, tensor)| (name, widen(tensor.data()))).collect()
}
