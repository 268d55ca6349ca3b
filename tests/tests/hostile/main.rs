//! Hostile guests, each a real component: exactly the refusal or failure that is documented, one line in the ledger, nothing left behind,
//! and a neighbour whose every byte is as alone.
//!
//! The numbers are those of `tests/hostile/README.md`, which says where the attacks are that are not written as text.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

#[cfg(target_os = "linux")]
mod baseline;
#[cfg(target_os = "linux")]
mod disk;
mod guests;
mod running;
#[cfg(target_os = "linux")]
mod service;
mod uploads;

use nodus_tests::{Host, golden, guest, token_lines};
use serde_json::Value;

/// Of a receipt, what depends on company and time.
const COMPANY: [&str; 4] = ["times", "previous_receipt", "lane", "co_resident_jobs"];

/// A data folder with the tiny Llama as `llama` and the reference tokens as `tokens`.
fn prepared() -> Host {
    let host = Host::new();
    let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    std::fs::write(host.path("tokens"), lines).unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host.ok(["data", "put", host.path("tokens").to_str().unwrap(), "--name", "tokens"]);
    host
}

/// A job of a manifest, of a component beside it.
fn job(host: &Host, name: &str, component: &str) -> String {
    let component = host.path(component);
    format!("[[jobs]]\nname = {name:?}\ncomponent = {component:?}\nmodel = \"llama\"\ndata = \"tokens\"\nheld_out_count = 6\n")
}

/// A job of `sft`.
fn sft(host: &Host, name: &str, epochs: u32) -> String {
    let component = guest("sft");
    job(host, name, component.to_str().unwrap()) + &format!("params = {{ epochs = {epochs}, dropout = 0.1, learning_rate = 0.01 }}\n")
}

/// The ledger's entries of one kind, in order.
fn entries(host: &Host, kind: &str) -> Vec<Value> {
    let told = host.ok(["audit", "ledger", "--json", "--kind", kind]);
    let lines: Vec<Value> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // The last line sums up.
    lines[..lines.len() - 1].to_vec()
}

/// Jobs that left a line in the ledger by failing: each one's number in its run, and the code.
fn failures(host: &Host) -> Vec<(usize, String)> {
    let number = |entry: &Value| entry["job"].as_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
    entries(host, "job_failed").iter().map(|entry| (number(entry), entry["code"].as_str().unwrap().to_owned())).collect()
}

/// Every job has given back what its adapters had on the device.
fn assert_device_is_empty(host: &Host) {
    let mut held = std::collections::BTreeMap::<String, i64>::new();
    for entry in entries(host, "adapter_bytes") {
        let bytes = entry["bytes"].as_i64().unwrap();
        let sum = held.entry(entry["job"].as_str().unwrap().to_owned()).or_default();
        *sum += match entry["event"].as_str().unwrap() {
            "allocated" => bytes,
            "zeroed" => -bytes,
            _ => 0,
        };
    }
    assert!(!held.is_empty() && held.values().all(|bytes| *bytes == 0), "{held:?}");
}
