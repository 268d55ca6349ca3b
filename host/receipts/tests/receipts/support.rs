//! A folder, a key, and a small run with everything that a receipt speaks of.
//!
//! Never the host's own code: statements are written out here, so that a change of form shows.

use cap_std::fs::Dir;
use cap_tempfile::TempDir;
use nodus_protocol::Digest;
use nodus_receipts::ledger::{BytesEvent, Event};
use nodus_receipts::{HostKey, KnownKeys, Ledger, SealedReceipt};
use serde_json::{Value, json};

pub(crate) const WEIGHTS: &str = "adapter/adapter_model.safetensors";
pub(crate) const LEDGER: &str = "ledger.jsonl";

pub(crate) fn folder() -> TempDir {
    cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap()
}

pub(crate) fn clone(dir: &Dir) -> Dir {
    dir.try_clone().unwrap()
}

pub(crate) fn key(n: u8) -> HostKey {
    HostKey::from_secret(&[n; 32])
}

pub(crate) fn known(keys: &[&HostKey]) -> KnownKeys {
    keys.iter().map(|key| key.public()).collect()
}

pub(crate) fn bytes_event(tenant: &str, job: &str, event: BytesEvent, bytes: u64) -> Event {
    Event::AdapterBytes { job: job.into(), tenant: tenant.into(), adapter: 0, event, bytes }
}

fn sha256(digest: Digest) -> Value {
    json!({"sha256": digest.hex()})
}

const FILES: [(&str, &str); 2] = [(WEIGHTS, "weights"), ("adapter/adapter_config.json", "{\"r\": 8}")];

/// Writes a run's files.
pub(crate) fn write_run(run: &Dir) {
    run.create_dir("adapter").unwrap();
    for (name, bytes) in FILES {
        run.write(name, bytes).unwrap();
    }
    let losses = "{\"step\":1,\"loss\":5.7515,\"loss_bits\":\"0x40b80c4a\",\"grad_norm\":0.5,\"learning_rate\":0.001,\"tokens\":4}\n\
                  {\"step\":2,\"loss\":5.5,\"loss_bits\":\"0x40b00000\",\"grad_norm\":0.5,\"learning_rate\":0.001,\"tokens\":4}\n";
    run.write("losses.jsonl", losses).unwrap();
    let held_out = "{\"step\":0,\"loss\":5.7515,\"loss_bits\":\"0x40b80c4a\",\"tokens\":4,\"sequences\":2}\n\
                    {\"step\":2,\"loss\":5.5,\"loss_bits\":\"0x40b00000\",\"tokens\":4,\"sequences\":2,\"adapter\":1}\n";
    run.write("held_out.jsonl", held_out).unwrap();
}

/// The statement of that run.
pub(crate) fn statement(previous: Option<Digest>) -> Value {
    let subject: Vec<Value> =
        FILES.iter().map(|(name, bytes)| json!({"name": name, "digest": sha256(Digest::of(bytes.as_bytes()))})).collect();
    json!({
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subject,
        "predicateType": "https://nodus.dev/receipt/v1",
        "predicate": {
            "lane": "fused",
            "steps": 2,
            "losses": sha256(Digest::of(b"0x40b80c4a\n0x40b00000\n")),
            "held_out_losses": [
                {"adapter": 0, "step": 0, "loss_bits": "0x40b80c4a"},
                {"adapter": 1, "step": 2, "loss_bits": "0x40b00000"},
            ],
            "artifacts": [{"name": "adapter", "digest": sha256(Digest::of(b"artifact")), "adapter": 0, "step": 2, "bytes": 15}],
            "adapter_bytes": 15,
            "previous_receipt": previous.map(sha256),
        },
    })
}

pub(crate) fn seal(ledger: &mut Ledger, job: &str) -> SealedReceipt {
    ledger.seal(7, job, "acme", |previous| serde_json::to_vec(&statement(previous))).unwrap()
}
