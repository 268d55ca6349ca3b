//! `cargo xtask demo`: two tenants of one service on a real model, from nothing but a Rust toolchain and Python's pip.
//!
//! Goes the way users go, through the command line; works in a throw-away data folder under `target/demo`.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::chart::chart;
use crate::service::{Host, Service, Tenant};
use crate::smollm2;
use crate::steps::{add_wasm_target, build_tenants, cargo, guest, root, run, step, target};

/// Eight learning rates on the top layer: the frozen layers below are computed once for all of them.
const SWEEP: [&str; 9] = [
    "--sweep",
    "learning_rate=1e-4,2e-4,3e-4,5e-4,7e-4,1e-3,2e-3,3e-3",
    "--held-out-count",
    "16",
    "--set",
    "layers={\"last\": 1}",
    "--set",
    "steps=24",
    "--json",
];
/// An unrelated job on the same model: a rank-8 adapter on q and v of every layer.
const SINGLE: [&str; 16] = [
    "--set",
    "learning_rate=0.001",
    "--held-out-count",
    "16",
    "--seed",
    "1",
    "--set",
    "targets=[\"q_proj\",\"v_proj\"]",
    "--set",
    "steps=60",
    "--set",
    "evaluate_every=20",
    "--set",
    "schedule=linear",
    "--set",
    "warmup_steps=5",
];
/// What both have in common; these fit a few minutes on two cores.
const COMMON: [&str; 6] = ["--set", "batch_size=2", "--set", "max_length=96", "--set", "max_grad_norm=1.0"];

/// Runs the demo on SmolLM2-135M-Instruct, or on another model.
#[expect(clippy::print_stdout, reason = "the demo's result")]
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
    std::fs::create_dir_all(&out).with_context(|| format!("making {}", out.display()))?;
    let host = Host { binary: target().join("release/nodus-host"), data };
    let (start, jargon, sft) = (Instant::now(), text(&root().join("examples/data/jargon.jsonl"))?, text(&guest("sft"))?);
    step("import the model", || host.run(&["model", "import", &text(&model)?, "--name", "model"]))?;
    // For the audits at the end: the service keeps what tenants upload to itself.
    step("put the data", || host.run(&["data", "put", &jargon, "--name", "jargon"]))?;
    let (alice, bob) = (Tenant::add(&host, "alice")?, Tenant::add(&host, "bob")?);
    let service = Service::start(&host, &sft, &demo.join("serve.log"))?;
    println!("\nThe service listens on {}: open it in a browser and sign in with alice's token, {}", service.url, alice.token);

    let common = ["--model", "model", "--data", &jargon].into_iter().chain(COMMON);
    // Alice brings a component of her own; bob takes the ready-made one.
    let sweep = alice.submit(&service, &sft, common.clone().chain(SWEEP))?;
    let single = bob.submit(&service, "sft", common.chain(SINGLE).chain(["--json"]))?;
    let (first, only) = (sweep.jobs.first().context("a sweep without members")?, single.jobs.first().context("no job")?);
    step("alice watches her sweep of eight learning rates", || alice.run(&service, &["watch", &sweep.cohort]))?;
    step("bob watches his job", || bob.run(&service, &["watch", &only.id]))?;
    println!();
    alice.run(&service, &["jobs"])?;
    bob.run(&service, &["jobs"])?;
    let (hers, his) = (out.join("alice"), out.join("bob"));
    step("both fetch their adapters", || {
        std::fs::create_dir_all(&hers).with_context(|| format!("making {}", hers.display()))?;
        sweep.jobs.iter().try_for_each(|job| alice.run(&service, &["fetch", &job.id, "--out", &text(&hers.join(&job.id))?]))?;
        bob.run(&service, &["fetch", &only.id, "--out", &text(&his)?])
    })?;
    for (whose, folder) in [("alice's first member", hers.join(&first.id)), ("bob's job", his.clone())] {
        step(&format!("audit {whose}: verify, then replay alone"), || {
            host.run(&["audit", "verify", &text(&folder)?])?;
            host.run(&["audit", "replay", &text(&folder)?])
        })?;
    }
    report(&his, start.elapsed())?;
    println!("All adapters (PEFT folders) and receipts: {}", out.display());
    println!("The page was {}/; to have it again: NODUS_DATA_DIR={} {} serve", service.url, host.data.display(), host.binary.display());
    service.stop()
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
    println!("\nbob's training loss over {} steps\n{}", losses.len(), chart(&values, 60, 8));
    if let [before, .., after] = held_out.as_slice() {
        println!("Held-out loss before: {:.4}", before.loss);
        println!("Held-out loss after step {}: {:.4}", after.step, after.loss);
    }
    println!("All of it took {:.0} s after the build.", took.as_secs_f64());
    Ok(())
}

fn lines<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    let file = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    file.lines().map(|line| serde_json::from_str(line).with_context(|| format!("reading {}", path.display()))).collect()
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> anyhow::Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}
