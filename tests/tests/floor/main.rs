//! The floor from outside: what a service keeps of a job is what a run would, whatever is killed on the way.
#![cfg(target_os = "linux")]
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

mod full;
mod kept;
mod kills;
mod quota;
mod server;
mod suspects;
mod turns;

use std::path::Path;

use nodus_tests::{assert_same, statement};
use serde_json::Value;

use server::{JOB as LONG, Scene, Server, kept};

const SWEEP: [&str; 8] = ["--sweep", "learning_rate=0.01,0.003", "--set", "dropout=0.1", "--set", "epochs=2", "--held-out-count", "6"];

#[test]
fn a_service_keeps_what_a_run_does_and_guests_and_engines_have_processes_of_their_own() {
    let scene = Scene::new();
    scene.run("run", &SWEEP);
    let server = Server::start(&scene);
    let ids = server.submit(&SWEEP);
    for (id, member) in ids.iter().zip(["learning_rate=0.01", "learning_rate=0.003"]) {
        let job = server.ended(id);
        assert_eq!(
            (job["state"].as_str(), job["attempts"].as_u64(), job["name"].as_str()),
            (Some("succeeded"), Some(1), Some(member)),
            "{job}"
        );
        let fetched = server.fetch(id, member);
        assert_same(&kept(&scene.host.path("run").join(member)), &kept(&fetched), member);
        assert_eq!(statement(&std::fs::read(fetched.join("receipt.json")).unwrap())["predicate"]["lane"], "fused");
        scene.host.ok(["audit", "verify", fetched.to_str().unwrap()]);
    }
    assert_eq!(server.processes("engine").len(), 1, "one engine for one model");
    assert_eq!(server.processes("guest").len(), 1, "one process for both members");
    let solo = server.submit(&[&SWEEP[2..], &["--set", "learning_rate=0.01", "--lane", "solo"]].concat());
    let job = server.ended(&solo[0]);
    assert_eq!(job["state"], "succeeded", "{job}");
    assert_same(&kept(&scene.host.path("run/learning_rate=0.01")), &kept(&server.fetch(&solo[0], "solo")), "solo");
}

/// Every step of the results was told once, and nothing else, however often the job was run.
fn assert_told_once(server: &Server<'_>, id: &str, dir: &Path) {
    let told = server.ok(&["metrics", id, "--json"]);
    let events = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let told: Vec<Value> = events.filter(|event| event["kind"] == "step").map(|event| event["body"]["loss_bits"].clone()).collect();
    let lines = std::fs::read_to_string(dir.join("losses.jsonl")).unwrap();
    let kept: Vec<Value> = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss_bits"].clone()).collect();
    assert_eq!(told, kept);
}

#[test]
fn what_is_killed_is_run_again_to_the_same_bytes_and_told_once() {
    let scene = Scene::new();
    scene.run("run", &LONG);
    let expected = kept(&scene.host.path("run"));
    let server = Server::start(&scene);
    let id = &server.submit(&LONG)[0];
    server.steps(id, 40);
    server.kill_one("guest");
    server.wait(id, |job| job["attempts"] == 2);
    server.steps(id, 60);
    server.kill_one("engine");
    server.wait(id, |job| job["attempts"] == 3);
    server.steps(id, 80);
    server.kill();
    let server = Server::start(&scene);
    let job = server.ended(id);
    assert_eq!((job["state"].as_str(), job["attempts"].as_u64()), (Some("succeeded"), Some(4)), "{job}");
    let fetched = server.fetch(id, "fetched");
    assert_same(&expected, &kept(&fetched), "after three kills");
    assert_told_once(&server, id, &fetched);
}

#[test]
fn a_stop_is_kept_through_a_kill_and_the_receipt_replays() {
    let scene = Scene::new();
    let server = Server::start(&scene);
    let id = &server.submit(&[&LONG[2..], &["--set", "steps=100000"]].concat())[0];
    server.steps(id, 30);
    server.ok(&["cancel", id]);
    server.kill_one("engine");
    let job = server.ended(id);
    assert_eq!(job["state"], "stopped", "{job}");
    let fetched = server.fetch(id, "fetched");
    let replayed = scene.host.ok(["audit", "replay", fetched.to_str().unwrap()]);
    assert!(replayed.contains("bit-identical"), "{replayed}");
}

#[test]
fn a_job_whose_process_dies_again_and_again_ends_and_harms_no_other() {
    let scene = Scene::new();
    let server = Server::start(&scene);
    let id = &server.submit(&[&LONG[2..], &["--set", "steps=100000"]].concat())[0];
    let step = |job: &Value| job["last_step"]["step"].as_u64().unwrap_or(0);
    let mut before = 0;
    for attempt in 1..=5 {
        // One that dies before it has the job would be the host's fault.
        let job = server.wait(id, |job| job["attempts"] == attempt && job["state"] == "running" && step(job) > before);
        before = step(&job);
        server.kill_one("guest");
    }
    let job = server.ended(id);
    assert_eq!(job["state"], "failed", "{job}");
    assert!(job["message"].as_str().unwrap().contains("SIGKILL"), "{job}");
    let next = &server.submit(&SWEEP[2..])[0];
    assert_eq!(server.ended(next)["state"], "succeeded");
}

/// What one engine keeps beyond its plan is given back before the other begins.
#[test]
fn engines_beside_each_other_share_memory_that_is_just_enough() {
    let scene = Scene::new();
    scene.run("run", &LONG);
    let server = Server::start_with(&scene, &["--device", "cpu", "--memory", "360MiB", "--trunk-cache", "0"]);
    let first = server.submit(&LONG).remove(0);
    server.steps(&first, 5);
    let second = server.submit(&[&LONG[..], &["--lane", "mps"]].concat()).remove(0);
    server.steps(&second, 5);
    assert_eq!((server.processes("engine").len(), server.job(&first)["state"].as_str()), (2, Some("running")));
    for id in [&first, &second] {
        assert_eq!(server.ended(id)["state"], "succeeded");
        assert_same(&kept(&scene.host.path("run")), &kept(&server.fetch(id, id)), "beside another engine");
    }
}

#[test]
fn jobs_are_placed_across_devices_to_the_same_bytes() {
    let scene = Scene::new();
    scene.run("run", &LONG);
    // Each has room for an engine and one job.
    let server = Server::start_with(&scene, &["--device", "cpu", "--device", "cpu", "--memory", "180MiB", "--trunk-cache", "0"]);
    let ids = [&server.submit(&LONG)[0], &server.submit(&LONG)[0]].map(Clone::clone);
    ids.iter().for_each(|id| server.steps(id, 5));
    assert_eq!(server.processes("engine").len(), 2, "an engine on each device");
    for id in &ids {
        assert_eq!(server.ended(id)["state"], "succeeded");
        assert_same(&kept(&scene.host.path("run")), &kept(&server.fetch(id, id)), "on one of two devices");
    }
}
