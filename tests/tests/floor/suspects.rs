//! Jobs that were at work in engines that died: who ends engines is found out, who does not goes on among the others.

use std::time::Duration;

use nodus_tests::assert_same;

use crate::server::{JOB, Scene, Server, kept};

/// Seconds between two snapshots.
const EVERY: &str = "0.5";

/// A job of this seed ends its engine's process at its step 6: a fault that development builds have planted.
const FAULTY: &str = "4195811333";

#[test]
fn a_job_that_ends_engines_is_found_out_and_the_others_go_on() {
    let scene = Scene::new();
    let server = Server::start_keeping(&scene, EVERY);
    let honest = &server.submit(&JOB)[0];
    server.steps(honest, 10);
    let faulty = &server.submit(&["--set", "steps=100", "--seed", FAULTY])[0];
    let job = server.ended(faulty);
    assert_eq!((job["state"].as_str(), job["attempts"].as_u64()), (Some("failed"), Some(3)), "{job}");
    assert!(job["message"].as_str().unwrap().starts_with("quarantined: "), "{job}");
    let ended = server.ended(honest);
    assert_eq!(ended["state"], "succeeded", "{ended}");
    scene.run("run", &JOB);
    assert_same(&kept(&scene.host.path("run")), &kept(&server.fetch(honest, "fetched")), "beside a job that ends engines");
    let ledger = scene.host.ok(["audit", "ledger"]);
    assert!(ledger.contains("quarantined"), "{ledger}");
}

#[test]
fn a_job_that_is_suspected_is_tried_alone_and_goes_back_among_the_others() {
    let scene = Scene::new();
    // Long steps: wherever its engine is killed, it is at work.
    let heavy = [&JOB[2..], &["--set", "steps=1000", "--set", "batch_size=8"]].concat();
    scene.run("run", &heavy);
    let server = Server::start_keeping(&scene, "1");
    let id = &server.submit(&heavy)[0];
    let mut before = 0;
    for attempt in 2..6 {
        // It is where it was, and was there not for long.
        server.steps(id, before + 1);
        if scene.log().contains("lane=Solo") {
            break;
        }
        before = server.job(id)["last_step"]["step"].as_u64().unwrap();
        server.kill_one("engine");
        server.wait(id, |job| job["attempts"] == attempt);
    }
    let job = server.ended(id);
    assert_eq!(job["state"], "succeeded", "{job}");
    let log = scene.log();
    assert!(log.contains("lane=Solo") && log.contains("a suspected job did no harm alone"), "{log}");
    assert!(job["placed"].as_str().unwrap().ends_with("fused"), "{job}");
    assert_same(&kept(&scene.host.path("run")), &kept(&server.fetch(id, "fetched")), "suspected, and tried alone");
}

/// A job that worked on for a while after its engine died is not suspected any more: however often that happens, it never runs alone.
#[test]
fn a_suspicion_fades_while_a_job_works_among_the_others() {
    let scene = Scene::new();
    let server = Server::start_keeping(&scene, "0.3");
    // Long steps: wherever its engine is killed, it is at work.
    let heavy = [&JOB[2..], &["--set", "steps=100000", "--set", "batch_size=8"]].concat();
    let id = &server.submit(&heavy)[0];
    let mut before = 0;
    for attempt in 2..5 {
        // Beyond where it was, and then for much longer than two snapshots are apart.
        server.steps(id, before + 5);
        std::thread::sleep(Duration::from_millis(1500));
        before = server.job(id)["last_step"]["step"].as_u64().unwrap() + 20;
        server.kill_one("engine");
        server.wait(id, |job| job["attempts"] == attempt);
    }
    server.steps(id, before + 5);
    let job = server.job(id);
    assert!(job["placed"].as_str().unwrap().ends_with("fused"), "{job}");
    assert!(!scene.log().contains("lane=Solo"), "{}", scene.log());
    server.ok(&["cancel", id]);
    assert_eq!(server.ended(id)["state"], "stopped");
}
