//! What is kept of a job serves it and no other: on its own device class alone, as long as it may go on, however often that is.

use std::time::Duration;

use nodus_tests::assert_same;

use crate::server::{JOB, Scene, Server, kept};

/// Seconds between two snapshots.
const EVERY: &str = "0.3";

#[test]
fn a_job_that_began_on_another_device_class_waits_for_it() {
    let scene = Scene::new();
    let server = Server::start_keeping(&scene, EVERY);
    let id = &server.submit(&JOB)[0];
    server.steps(id, 30);
    server.kill_all();
    let journal = scene.host.path("data/journals").join(id).join("replies");
    let whole = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, [&[7; 32], &whole[32..]].concat()).unwrap();
    let server = Server::start_keeping(&scene, EVERY);
    let job = server.wait(id, |job| job["reason"].as_str().is_some_and(|reason| reason.contains("of the class that it began on")));
    assert_eq!((job["state"].as_str(), job["attempts"].as_u64()), (Some("queued"), Some(1)), "{job}");
    // Nobody else waits for it.
    let other = &server.submit(&[&JOB[2..], &["--set", "steps=10"]].concat())[0];
    assert_eq!(server.ended(other)["state"], "succeeded");
    assert_eq!(server.job(id)["state"], "queued");
    server.end();
    std::fs::write(&journal, whole).unwrap();
    let server = Server::start_keeping(&scene, EVERY);
    assert_eq!(server.ended(id)["state"], "succeeded");
    assert_eq!(scene.went_on().len(), 1);
}

#[test]
fn restarts_and_making_room_are_no_failures() {
    let scene = Scene::new();
    let server = Server::start_keeping(&scene, EVERY);
    let id = &server.submit(&JOB)[0];
    server.steps(id, 30);
    server.kill();
    // As after many of them.
    let state = rusqlite::Connection::open(scene.host.path("data/service/state.db")).unwrap();
    assert_eq!(state.execute("UPDATE jobs SET attempts = 500", []).unwrap(), 1);
    drop(state);
    let server = Server::start_keeping(&scene, EVERY);
    server.wait(id, |job| job["attempts"] == 501 && job["state"] == "running");
    server.kill_one("guest");
    let job = server.ended(id);
    assert_eq!((job["state"].as_str(), job["attempts"].as_u64()), (Some("succeeded"), Some(502)), "{job}");
}

#[test]
fn failures_of_a_job_that_gets_on_between_them_do_not_add_up() {
    let scene = Scene::new();
    let long = [&JOB[2..], &["--set", "steps=2000"]].concat();
    let server = Server::start_keeping(&scene, EVERY);
    let id = &server.submit(&long)[0];
    let snapshots = || {
        let files = std::fs::read_dir(scene.host.path("data/journals").join(id)).into_iter().flatten();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        names.filter_map(|name| name.strip_prefix("snapshot-")?.parse::<u64>().ok()).max().unwrap_or(0)
    };
    for attempt in 2..8 {
        let before = snapshots();
        server.wait(id, |job| job["state"] == "running" && snapshots() > before);
        server.kill_one("guest");
        server.wait(id, |job| job["attempts"] == attempt);
    }
    let job = server.ended(id);
    assert_eq!(job["state"], "succeeded", "{job}");
}

#[test]
fn what_is_kept_of_a_disabled_tenants_job_is_there_when_it_goes_on() {
    let scene = Scene::new();
    scene.run("run", &JOB);
    let server = Server::start_keeping(&scene, EVERY);
    let id = &server.submit(&JOB)[0];
    server.steps(id, 30);
    server.kill_all();
    scene.host.ok(["tenant", "disable", "acme"]);
    // The first puts it back into the queue, the second finds it there, and sweeps.
    for _ in 0..2 {
        let server = Server::start_keeping(&scene, EVERY);
        std::thread::sleep(Duration::from_millis(500));
        server.end();
    }
    let server = Server::start_keeping(&scene, EVERY);
    scene.host.ok(["tenant", "enable", "acme"]);
    assert_eq!(server.ended(id)["state"], "succeeded");
    assert_eq!(scene.went_on().len(), 1, "it began anew");
    assert_same(&kept(&scene.host.path("run")), &kept(&server.fetch(id, "fetched")), "after its tenant was disabled");
}

/// Whether the ledger has exactly so many lines of a job that ended without a receipt, and agrees with the state.
fn assert_one_failure(scene: &Scene, id: &str) {
    let ledger = std::fs::read_to_string(scene.host.path("data/ledger.jsonl")).unwrap();
    assert_eq!(ledger.lines().filter(|line| line.contains(id) && line.contains("job_failed")).count(), 1, "{ledger}");
    scene.host.ok(["state", "fsck"]);
}

/// Killed between the ledger's line and the job's end, or before both: the line is there once.
#[test]
fn a_job_that_was_being_cut_off_when_the_service_was_killed_has_one_line() {
    let scene = Scene::new();
    let server = Server::start(&scene);
    let id = &server.submit(&[&JOB[2..], &["--set", "steps=100000"]].concat())[0];
    server.steps(id, 5);
    server.kill_all();
    let change = |set: &str| {
        let state = rusqlite::Connection::open(scene.host.path("data/service/state.db")).unwrap();
        assert_eq!(state.execute(&format!("UPDATE jobs SET {set}"), []).unwrap(), 1);
    };
    change("stop = 'cancel'");
    for _ in 0..2 {
        let server = Server::start(&scene);
        let job = server.ended(id);
        assert_eq!((job["state"].as_str(), job["attempts"].as_u64()), (Some("cancelled"), Some(1)), "{job}");
        assert_one_failure(&scene, id);
        server.kill_all();
        change("state = 'running', ended_ms = NULL");
    }
}

/// Killed between the same two: the ledger has the last word, also where nothing would be in the job's way any more.
#[test]
fn a_job_that_has_failed_in_the_ledger_is_not_run_again() {
    let scene = Scene::new();
    let bound = |bytes: &str| drop(scene.host.ok(["tenant", "quota", "acme", &format!("stored-bytes={bytes}")]));
    let server = Server::start(&scene);
    server.ended(&server.submit(&["--set", "steps=1"])[0]);
    let told: serde_json::Value = serde_json::from_str(&server.ok(&["usage", "--json"])).unwrap();
    // There is room for what it tells, and none for its adapter.
    bound(&(told["usage"]["stored_bytes"].as_u64().unwrap() + (16 << 10)).to_string());
    let id = &server.submit(&["--set", "steps=5", "--set", "rank=4"])[0];
    assert_eq!(server.ended(id)["state"], "failed");
    server.kill_all();
    bound("none");
    let state = rusqlite::Connection::open(scene.host.path("data/service/state.db")).unwrap();
    let undo = "UPDATE jobs SET state = 'running', ended_ms = NULL, message = NULL WHERE state = 'failed'";
    assert_eq!(state.execute(undo, []).unwrap(), 1);
    drop(state);
    let server = Server::start(&scene);
    let job = server.ended(id);
    assert_eq!((job["state"].as_str(), job["attempts"].as_u64()), (Some("failed"), Some(1)), "{job}");
    assert!(job["message"].as_str().unwrap().contains("`stored-bytes`"), "{job}");
    assert_one_failure(&scene, id);
}

/// How far it gets in its time is no matter of what it computes: run again, it is no other job for having told less.
#[test]
fn a_job_that_is_run_again_and_out_of_time_has_failed() {
    for is_kept in [false, true] {
        let scene = Scene::new();
        let start = || if is_kept { Server::start_keeping(&scene, EVERY) } else { Server::start(&scene) };
        let server = start();
        let id = &server.submit(&[&JOB[..], &["--limit", "wall-ms=599999"]].concat())[0];
        server.steps(id, 30);
        server.kill_all();
        let state = rusqlite::Connection::open(scene.host.path("data/service/state.db")).unwrap();
        // As long as it was: what is stored is counted.
        let shorten = |table| format!("UPDATE {table} SET spec = replace(spec, '599999', '    20') WHERE spec LIKE '%599999%'");
        assert_eq!(state.execute(&shorten("common_specs"), []).unwrap() + state.execute(&shorten("specs"), []).unwrap(), 1);
        drop(state);
        let server = start();
        let job = server.ended(id);
        assert_eq!((job["state"].as_str(), job["attempts"].as_u64()), (Some("failed"), Some(2)), "{job}");
        assert!(job["message"].as_str().unwrap().contains("20 ms"), "{job}");
        assert_one_failure(&scene, id);
    }
}
