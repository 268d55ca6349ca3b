//! Every body that the service takes, damaged: cut off, flipped, repeated, swapped. Never the service's own fault, and it goes on.
//!
//! Which there are is asked of the OpenAPI document: a route that is added without an example here fails the test.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;

use nodus_tests::{Host, Server, guest, text};
use serde_json::{Value, json};

/// Damaged bodies of each route: of those that cost a process each, a tenth. `cargo xtask test --slow` tries more.
const ROUNDS: u64 = if cfg!(feature = "slow") { 4000 } else { 150 };

/// A small generator of numbers (xorshift), so that a failure can be repeated.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    fn damaged(&mut self, whole: &[u8]) -> Vec<u8> {
        let mut body = whole.to_vec();
        for _ in 0..=self.below(3) {
            let place = self.below(body.len());
            match self.below(5) {
                0 => body.truncate(place),
                1 if !body.is_empty() => body[place] ^= 1 << self.below(8),
                2 => body.insert(place.min(body.len()), self.below(256) as u8),
                3 => {
                    let (from, to) = (place.min(body.len()), self.below(body.len() + 1));
                    let piece = body[from.min(to)..from.max(to)].to_vec();
                    body.splice(from..from, piece);
                }
                _ => {
                    let other = self.below(body.len());
                    if !body.is_empty() {
                        body.swap(place, other);
                    }
                }
            }
        }
        body
    }
}

/// A sound body of every route that takes one.
fn examples(job: &str) -> BTreeMap<(&'static str, String), (&'static str, Vec<u8>)> {
    let submission = json!({
        "component": "sft", "model": "llama", "data": "rows", "held_out": {"fraction": 0.5}, "parameters": {"rank": 2, "x": [1, {"y": null}]},
        "sweep": [{"key": "learning_rate", "values": [0.001, "a"]}], "seed": 7, "limits": {"wall-ms": 9}, "lane": "solo", "priority": "high"
    });
    let rows = "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"assistant\", \"content\": \"y\"}]}\n".repeat(3);
    let json = "application/json";
    BTreeMap::from([
        (("POST", "/v1/components".to_owned()), ("application/wasm", std::fs::read(guest("sft")).unwrap())),
        (("PUT", "/v1/data/fuzzed".to_owned()), ("application/jsonl", rows.into_bytes())),
        (("POST", "/v1/jobs".to_owned()), (json, submission.to_string().into_bytes())),
        (("POST", format!("/v1/jobs/{job}/cancel")), (json, b"{\"how\": \"stop\"}".to_vec())),
    ])
}

#[test]
fn no_damaged_body_is_the_services_fault() {
    let host = Host::with_llama();
    let unbounded = ["requests-per-second=none", "queued-jobs=none"];
    let (token, sft) = (host.tenant("a", &unbounded), format!("sft={}", guest("sft").display()));
    let server = Server::start(&host, &["--component", &sft, "--hold"]);
    let data = host.path("tokens.jsonl");
    let job = server.submit(&token, &["sft", "--model", "llama", "--data", data.to_str().unwrap()]).remove(0);
    let examples = examples(&job);

    let (_, _, document) = server.request(None, "GET", "/openapi.json", &[], b"");
    let document: Value = serde_json::from_slice(&document).unwrap();
    let operations = document["paths"].as_object().unwrap().iter().flat_map(|(path, item)| {
        let taking = item.as_object().unwrap().iter().filter(|(_, operation)| operation["requestBody"].is_object());
        taking.map(|(method, _)| (method.to_uppercase(), path.replace("{id}", &job).replace("{name}", "fuzzed"))).collect::<Vec<_>>()
    });
    let documented: Vec<(String, String)> = operations.collect();
    let known: Vec<(String, String)> = examples.keys().map(|(method, path)| ((*method).to_owned(), path.clone())).collect();
    assert_eq!(documented.iter().collect::<std::collections::BTreeSet<_>>(), known.iter().collect());

    for ((method, path), (kind, whole)) in &examples {
        let rounds = if path == "/v1/components" { ROUNDS / 10 } else { ROUNDS };
        for round in 0..rounds {
            let body = Numbers(round + 1).damaged(whole);
            let (status, _, answer) = server.request(Some(&token), method, path, &[("content-type", kind)], &body);
            assert!((200..500).contains(&status), "{method} {path}, round {round}: {status} {}", text(&answer));
        }
    }
    assert_eq!(server.job(&token, &job)["id"], *job);
    assert_eq!(server.end(), Some(0));
    host.ok(["state", "fsck", "--deep"]);
}
