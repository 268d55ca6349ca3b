//! `cargo xtask demo`: a LoRA adapter on a real model, from nothing but a Rust toolchain and Python's pip.
//!
//! Goes the way a user goes, through the command line; works in a throw-away data folder under `target/demo`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::chart::chart;
use crate::smollm2;
use crate::steps::{add_wasm_target, build_tenants, cargo, guest, root, run, step, target};

/// A rank-8 adapter on q and v; 60 steps of 2 sequences fit the five minutes on two cores.
const PARAMETERS: [&str; 11] = [
    "rank=8",
    "alpha=16",
    "targets=[\"q_proj\",\"v_proj\"]",
    "learning_rate=0.001",
    "schedule=linear",
    "warmup_steps=5",
    "batch_size=2",
    "max_length=96",
    "steps=60",
    "evaluate_every=20",
    "max_grad_norm=1.0",
];

/// Runs the demo on SmolLM2-135M-Instruct, or on another model.
pub(crate) fn run_demo(model: Option<&Path>) -> anyhow::Result<()> {
    step("guests", || {
        add_wasm_target()?;
        build_tenants()
    })?;
    step("host", || run(&mut cargo(&["build", "--release", "--package", "nodus-host"])))?;
    let model = match model {
        Some(path) => path.to_owned(),
        None => smollm2::gguf()?,
    };
    let demo = target().join("demo");
    let (data, out) = (demo.join("data"), demo.join("out"));
    for stale in [&data, &out] {
        if stale.exists() {
            std::fs::remove_dir_all(stale).with_context(|| format!("removing {}", stale.display()))?;
        }
    }
    let host = Host { binary: target().join("release/nodus-host"), data };
    let start = Instant::now();
    step("import the model", || host.run(&["model", "import", &text(&model)?, "--name", "model"]))?;
    step("put the data", || host.run(&["data", "put", &text(&root().join("examples/data/jargon.jsonl"))?, "--name", "jargon"]))?;
    step("train", || {
        let (sft, out) = (text(&guest("sft"))?, text(&out)?);
        let mut args = vec!["run", &sft, "--model", "model", "--data", "jargon", "--held-out-count", "16", "--seed", "1", "--out", &out];
        args.extend(PARAMETERS.iter().flat_map(|setting| ["--set", setting]));
        host.run(&args)
    })?;
    report(&out, start.elapsed())
}

/// The binary and its throw-away data folder.
struct Host {
    binary: PathBuf,
    data: PathBuf,
}

impl Host {
    fn run(&self, args: &[&str]) -> anyhow::Result<()> {
        run(Command::new(&self.binary).args(args).env("NODUS_DATA_DIR", &self.data))
    }
}

#[derive(Deserialize)]
struct Line {
    step: u64,
    loss: f64,
}

#[expect(clippy::print_stdout, reason = "the demo's result")]
fn report(out: &Path, took: Duration) -> anyhow::Result<()> {
    let losses: Vec<Line> = lines(&out.join("losses.jsonl"))?;
    let held_out: Vec<Line> = lines(&out.join("held_out.jsonl"))?;
    let values: Vec<f64> = losses.iter().map(|line| line.loss).collect();
    println!("\nTraining loss over {} steps\n{}", losses.len(), chart(&values, 60, 8));
    if let [before, .., after] = held_out.as_slice() {
        println!("Held-out loss before: {:.4}", before.loss);
        println!("Held-out loss after step {}: {:.4}", after.step, after.loss);
    }
    println!("The adapter (a PEFT folder): {}", out.join("adapter").display());
    println!("The receipt: {}", out.join("receipt.json").display());
    println!("All of it took {:.0} s after the build.", took.as_secs_f64());
    Ok(())
}

fn lines<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    let file = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    file.lines().map(|line| serde_json::from_str(line).with_context(|| format!("reading {}", path.display()))).collect()
}

fn text(path: &Path) -> anyhow::Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}
