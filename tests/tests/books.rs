//! The service's books through a crash at the worst moment: one receipt, one line, and a check that finds what is taken out.
#![cfg(target_os = "linux")]
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::time::{Duration, Instant};

use nodus_tests::{Host, Server, guest};
use serde_json::Value;

/// The ledger's entries of one kind that are of this job.
fn entries(host: &Host, kind: &str, job: &str) -> Vec<Value> {
    let told = host.ok(["audit", "ledger", "--json", "--kind", kind]);
    told.lines().map(|line| serde_json::from_str(line).unwrap()).filter(|entry: &Value| entry["job"] == job).collect()
}

#[test]
fn a_crash_between_a_receipt_and_the_state_leaves_one_receipt() {
    let host = Host::with_llama();
    let token = host.tenant("acme", &[]);
    let (sft, data) = (guest("sft"), host.path("tokens.jsonl"));
    let server = Server::start(&host, &["--device", "cpu"]);
    // Whatever ends a job well is refused, as by a disk, until the service is killed: the ledger has the receipt, the state does not.
    let database = rusqlite::Connection::open(host.path("data/service/state.db")).unwrap();
    database.busy_timeout(Duration::from_secs(10)).unwrap();
    database
        .execute_batch(
            "CREATE TRIGGER refuse BEFORE UPDATE OF state ON jobs WHEN NEW.state = 'succeeded' BEGIN SELECT RAISE(ABORT, 'refused'); END",
        )
        .unwrap();
    let job =
        server.submit(&token, &[sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--held-out-count", "6"]);
    let job = job[0].as_str();
    let began = Instant::now();
    let first = loop {
        if let Some(entry) = entries(&host, "receipt", job).pop() {
            break entry;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{}", server.job(&token, job));
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(server.job(&token, job)["state"], "running");
    drop(server);
    database.execute_batch("DROP TRIGGER refuse").unwrap();
    host.ok(["state", "fsck", "--deep"]);

    let server = Server::start(&host, &["--device", "cpu"]);
    let ended = server.ended(&token, job);
    assert_eq!((ended["state"].as_str(), ended["attempts"].as_u64()), (Some("succeeded"), Some(2)), "{ended}");
    assert_eq!(entries(&host, "receipt", job), [first]);
    let out = host.path("out");
    server.ok(&token, &["fetch", job, "--out", out.to_str().unwrap()]);
    host.ok(["audit", "verify", out.to_str().unwrap()]);
    assert_eq!(server.end(), Some(0));
    assert_eq!(std::fs::read_dir(host.path("data/sealed")).unwrap().count(), 0, "the receipt is the state's to keep now");
    host.ok(["state", "fsck", "--deep"]);

    // What is taken out of the ledger's end is missed.
    let ledger = std::fs::read_to_string(host.path("data/ledger.jsonl")).unwrap();
    let before = ledger.lines().position(|line| line.contains("\"receipt\"")).unwrap();
    let cut: String = ledger.lines().take(before).map(|line| format!("{line}\n")).collect();
    std::fs::write(host.path("data/ledger.jsonl"), cut).unwrap();
    let found = host.refused(2, ["state", "fsck"]);
    assert!(found.contains(&format!("job {job}: the ledger does not have its receipt")), "{found}");
    // And an artifact that is another's.
    std::fs::write(host.path("data/ledger.jsonl"), ledger).unwrap();
    let swap = "UPDATE artifacts SET digest = (SELECT digest FROM artifacts WHERE path = 'log.txt') WHERE path LIKE 'adapter/%.json'";
    assert_eq!(database.execute(swap, []).unwrap(), 1);
    let found = host.refused(2, ["state", "fsck"]);
    assert!(found.contains("`adapter/adapter_config.json` is sha256:"), "{found}");
}
