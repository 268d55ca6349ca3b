//! What jobs leave is held to their tenant's quota: what they tell while they run, and their results.

use nodus_tests::{guest, text};
use serde_json::Value;

use crate::server::{Scene, Server};

#[test]
fn a_job_that_leaves_more_than_there_is_room_for_fails_and_says_so() {
    let scene = Scene::new();
    let server = Server::start(&scene);
    let stored = || {
        let told: Value = serde_json::from_str(&server.ok(&["usage", "--json"])).unwrap();
        told["usage"]["stored_bytes"].as_u64().unwrap()
    };
    let bound = |bytes: u64| drop(scene.host.ok(["tenant", "quota", "acme", &format!("stored-bytes={bytes}")]));
    let first = &server.submit(&["--set", "steps=5"])[0];
    assert_eq!(server.ended(first)["state"], "succeeded");
    let failed = |id: &str| {
        let job = server.ended(id);
        assert_eq!(job["state"], "failed", "{job}");
        assert!(job["message"].as_str().unwrap().contains("quota `stored-bytes` is"), "{job}");
    };

    // Some hundred steps are told, and then there is no room for more.
    bound(stored() + (64 << 10));
    let long = &server.submit(&["--set", "steps=5000"])[0];
    failed(long);
    let full = stored();
    bound(full);
    let (sft, data) = (guest("sft"), scene.host.path("tokens.jsonl"));
    let refused = server.call(&["submit", sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap()]);
    assert!(text(&refused.stderr).contains("quota-exceeded"), "{}", text(&refused.stderr));
    server.ok(&["rm", long]);
    while stored() + 1024 > full {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }

    // There is room for what it tells, and none for its adapter.
    bound(stored() + (16 << 10));
    let short = &server.submit(&["--set", "steps=5", "--set", "rank=4"])[0];
    failed(short);
    bound(1 << 30);
    let again = &server.submit(&["--set", "steps=5", "--set", "rank=4"])[0];
    assert_eq!(server.ended(again)["state"], "succeeded");
    server.end();
    scene.host.ok(["state", "fsck", "--deep"]);
}
