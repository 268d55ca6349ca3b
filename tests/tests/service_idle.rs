//! What a service keeps of tenants that have nothing to do.
#![cfg(target_os = "linux")]

use std::time::{Duration, Instant};

use nodus_tests::{Host, Server, children, guest};

#[test]
fn the_process_of_a_tenants_guests_ends_when_it_has_been_idle_and_the_engine_goes_on() {
    let own = Host::with_llama();
    let (busy, idle) = (own.tenant("busy", &[]), own.tenant("idle", &[]));
    let (sft, data) = (guest("sft"), own.path("tokens.jsonl"));
    let server = Server::start(&own, &["--device", "cpu", "--idle", "1"]);
    let submit = |token: &str, steps: &str| {
        let fixed = [sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--set", steps];
        server.submit(token, &fixed).remove(0)
    };
    let long = submit(&busy, "steps=1000000");
    server.steps(&busy, &long, 5);
    let short = submit(&idle, "steps=3");
    assert_eq!(server.ended(&idle, &short)["state"], "succeeded");
    let began = Instant::now();
    while children(server.pid(), "guest").len() > 1 {
        assert!(began.elapsed() < Duration::from_secs(60), "an idle process stays");
        std::thread::sleep(Duration::from_millis(20));
    }
    // The next job of the tenant has another.
    let again = submit(&idle, "steps=3");
    assert_eq!(server.ended(&idle, &again)["state"], "succeeded");
    assert_eq!((server.job(&busy, &long)["state"].as_str(), server.job(&busy, &long)["attempts"].as_u64()), (Some("running"), Some(1)));
    assert_eq!(children(server.pid(), "engine").len(), 1);
}
