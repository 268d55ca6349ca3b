//! 27 and 28: a device that is lost, and one that is full.

use std::process::Command;
use std::time::{Duration, Instant};

use nodus_tests::children;

use super::{Held, NEIGHBOUR, Scene};
use crate::entries;

/// Long enough to be met half-way.
const LONG: [&str; 6] = ["--set", "steps=400", "--set", "dropout=0.1", "--held-out-count", "6"];

/// A fatal fault ends the engine process, whoever caused it; what ends it here is a signal.
#[test]
fn n27_a_device_that_is_lost_takes_nobodys_result_along() {
    let scene = Scene::new(&[]);
    let alone = scene.alone("alone", &LONG);
    let server = scene.serve(&[]);
    scene.assert_as_alone(&server, &scene.b, &scene.sft(&server, &scene.b, &NEIGHBOUR)[0], &scene.alone("short", &NEIGHBOUR));
    let before = Held::by(&server).descriptors;

    let (attacker, neighbour) = (scene.sft(&server, &scene.a, &LONG).remove(0), scene.sft(&server, &scene.b, &LONG).remove(0));
    server.steps(&scene.a, &attacker, 20);
    server.steps(&scene.b, &neighbour, 20);
    server.kill_one("engine");
    for (token, id) in [(&scene.a, &attacker), (&scene.b, &neighbour)] {
        scene.assert_as_alone(&server, token, id, &alone);
        assert_eq!(server.job(token, id)["attempts"], 2);
        assert_eq!(entries(&scene.host, "receipt").iter().filter(|entry| entry["job"] == **id).count(), 1);
    }

    // One in whose hands engines die again and again, at last one that it has to itself, is found out.
    let poison = scene.sft(&server, &scene.a, &[&LONG[2..], &["--set", "steps=100000"]].concat()).remove(0);
    for attempt in 1..=3 {
        server.wait(&scene.a, &poison, |job| job["attempts"] == attempt && job["state"] == "running");
        // So that it is at work.
        let step = server.job(&scene.a, &poison)["last_step"]["step"].as_u64().unwrap_or_default();
        server.steps(&scene.a, &poison, step + 3);
        for engine in children(server.pid(), "engine") {
            assert!(Command::new("kill").args(["-KILL", &engine.to_string()]).status().unwrap().success());
        }
    }
    scene.assert_failed(&server, &scene.a, &poison, ("failed", "quarantined", "quarantined"));
    scene.assert_as_alone(&server, &scene.b, &scene.sft(&server, &scene.b, &LONG)[0], &alone);
    assert_eq!(children(server.pid(), "engine").len(), 1, "one engine, and no other that nobody ended");

    let began = Instant::now();
    while Held::by(&server).descriptors > before {
        assert!(began.elapsed() < Duration::from_secs(20), "{} descriptors before, {} now", before, Held::by(&server).descriptors);
        std::thread::sleep(Duration::from_millis(100));
    }
    scene.assert_sound(&server);
}

#[test]
fn n28_who_fills_the_device_takes_nothing_from_who_has_a_place_on_it() {
    let scene = Scene::new(&[]);
    let alone = scene.alone("alone", &NEIGHBOUR);
    // Room for the attackers, the neighbour and not much more.
    let server = scene.serve(&["--memory", "420MiB", "--trunk-cache", "1MiB"]);
    let hogs: Vec<String> = (0..2).map(|_| scene.told(&server, &scene.a, "adapters ", &[])).collect();
    let neighbour = &scene.sft(&server, &scene.b, &NEIGHBOUR)[0];
    let giant = scene.told(&server, &scene.a, "ok", &["--limit", "device-bytes=1GiB"]);
    scene.assert_as_alone(&server, &scene.b, neighbour, &alone);
    for hog in &hogs {
        // Refused by the number in its own limits, whoever else is there.
        scene.assert_failed(&server, &scene.a, hog, ("failed", "QuotaExceeded", "returned-error"));
    }
    let waits = server.wait(&scene.a, &giant, |job| job["reason"].is_string());
    assert!(waits["reason"].as_str().unwrap().starts_with("will not start: needs "), "{waits}");
    server.ok(&scene.a, &["cancel", &giant]);
    scene.assert_sound(&server);
}
