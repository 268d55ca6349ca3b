//! 42, 43 and 45: floods of jobs, places that run out, starts that fail.

use std::time::{Duration, Instant};

use nodus_tests::{Server, guest, text, told_guest};
use serde_json::Value;

use super::{Held, NEIGHBOUR, Scene};

/// By how much memory goes up and down from flood to flood (in twelve floods: by 2.9 MiB, more beside other tests), 8 KiB a job at most.
const NOISE_KIB: u64 = 8 << 10;

#[test]
fn n42_a_thousand_jobs_of_one_tenant_delay_anothers_by_one() {
    let scene = Scene::new(&["queued-jobs=1000", "requests-per-second=none"]);
    let alone = scene.alone("alone", &NEIGHBOUR);
    // Room for one job at a time.
    let server = scene.serve(&["--memory", "180MiB", "--trunk-cache", "1MiB"]);
    let rates = (1..=1000).map(|number| format!("{number}e-5")).collect::<Vec<_>>().join(",");
    let flood = ["--set", "epochs=1", "--held-out-count", "6", "--sweep", &format!("learning_rate={rates}")];
    let flooding = scene.sft(&server, &scene.a, &flood);
    server.wait(&scene.a, &flooding[0], |job| job["state"] != "queued");
    let (sft, data) = (guest("sft"), scene.host.path("tokens.jsonl"));
    let more = ["submit", sft.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--sweep", flood[5]];
    let refused = server.refused(&scene.a, &more);
    assert!(refused.contains("quota-exceeded") && refused.contains("quota `queued-jobs` is 1000"), "{refused}");

    let neighbour = &scene.sft(&server, &scene.b, &NEIGHBOUR)[0];
    scene.assert_as_alone(&server, &scene.b, neighbour, &alone);
    let job = server.job(&scene.b, neighbour);
    let [submitted, started] = ["submitted_ms", "started_ms"].map(|field| job[field].as_u64().unwrap());
    let (_, _, page) = server.request(Some(&scene.a), "GET", "/v1/jobs?limit=200&state=succeeded", &[], b"");
    let page: Value = serde_json::from_slice(&page).unwrap();
    let starts = page["jobs"].as_array().unwrap().iter().filter_map(|job| job["started_ms"].as_u64());
    let between = starts.filter(|at| (submitted..started).contains(at)).count();
    assert!(between <= 1, "{between} of a flood's jobs were started while the neighbour's waited");

    cancel(&scene, &server, &flooding);
    // Another flood leaves nothing beyond what the first did.
    let first = Held::by(&server).resident_kib;
    let flooding = scene.sft(&server, &scene.a, &flood);
    cancel(&scene, &server, &flooding);
    let second = Held::by(&server).resident_kib;
    assert!(second <= first + NOISE_KIB, "{first} KiB after a thousand jobs, {second} after two thousand");
}

/// Cuts off all that is left of a flood; the service is then as it was.
fn cancel(scene: &Scene, server: &Server, flooding: &[String]) {
    let cohort = server.job(&scene.a, &flooding[0])["cohort"].as_str().unwrap().to_owned();
    server.ok(&scene.a, &["cancel", "--now", &cohort]);
    let began = Instant::now();
    while scene.usage(server, &scene.a, "queued_jobs") + scene.usage(server, &scene.a, "running_jobs") > 0 {
        assert!(began.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    }
    scene.assert_sound(server);
}

/// There is no pool of instances to exhaust: a job needs a place on the device and one of its tenant's, and waits for either.
#[test]
fn n43_who_has_no_place_waits_and_is_told_for_what() {
    let scene = Scene::new(&["running-jobs=1"]);
    let alone = scene.alone("alone", &NEIGHBOUR);
    let server = scene.serve(&["--memory", "300MiB", "--trunk-cache", "1MiB"]);
    let first = scene.told(&server, &scene.a, "until-stop", &[]);
    server.wait(&scene.a, &first, |job| job["state"] == "running");
    let second = scene.told(&server, &scene.a, "ok", &[]);
    let reason = |token: &str, id: &str| {
        let job = server.wait(token, id, |job| job["reason"].is_string());
        assert_eq!(job["state"], "queued", "{job}");
        job["reason"].as_str().unwrap().to_owned()
    };
    assert_eq!(reason(&scene.a, &second), "waiting for another of your jobs to end: 1 run, 1 may");
    // The neighbour has a place; its second job finds the device full.
    let large = ["--limit", "device-bytes=128MiB"];
    let occupant = scene.told(&server, &scene.b, "until-stop", &[]);
    server.wait(&scene.b, &occupant, |job| job["state"] == "running");
    let waiting = &scene.sft(&server, &scene.b, &[&NEIGHBOUR[..], &large].concat())[0];
    assert!(reason(&scene.b, waiting).starts_with("waiting for device memory: needs "));
    server.ok(&scene.b, &["cancel", &occupant]);
    server.ok(&scene.a, &["cancel", &first]);
    assert_eq!(server.ended(&scene.a, &second)["state"], "succeeded");
    assert_eq!(server.ended(&scene.b, waiting)["state"], "succeeded");
    scene.assert_as_alone(&server, &scene.b, &scene.sft(&server, &scene.b, &NEIGHBOUR)[0], &alone);
    scene.assert_sound(&server);
}

#[test]
fn n45_a_start_that_fails_gives_back_what_was_set_aside_for_it() {
    // Just enough for one job at a time.
    let scene = Scene::new(&["queued-jobs=1", "running-jobs=1", "device-bytes=128MiB"]);
    let alone = scene.alone("alone", &NEIGHBOUR);
    let server = scene.serve(&[]);
    for round in 0..3 {
        let failing = scene.told(&server, &scene.a, "panic on purpose", &[]);
        scene.assert_failed(&server, &scene.a, &failing, ("failed", "panicked", "panicked"));
        for what in ["queued_jobs", "running_jobs"] {
            assert_eq!(scene.usage(&server, &scene.a, what), 0, "{what} after round {round}");
        }
    }
    // Uploads that are refused count nothing.
    let before = scene.usage(&server, &scene.a, "stored_bytes");
    let half = std::fs::read(told_guest()).unwrap();
    for (method, path, body) in
        [("POST", "/v1/components", &half[..half.len() / 2]), ("PUT", "/v1/data/bad", &b"{\"text\": \"x\"}\n{\"txt\": 1}\n"[..])]
    {
        let (status, _, answer) = server.request(Some(&scene.a), method, path, &[], body);
        assert_eq!(status, 422, "{}", text(&answer));
        assert_eq!(scene.usage(&server, &scene.a, "stored_bytes"), before, "{path}");
    }
    // One that is stopped half-way.
    let holding = scene.told(&server, &scene.a, "until-stop", &[]);
    server.wait(&scene.a, &holding, |job| job["state"] == "running");
    server.ok(&scene.a, &["cancel", &holding]);
    server.ended(&scene.a, &holding);
    // And still there is room for one that is as it should be.
    scene.assert_as_alone(&server, &scene.a, &scene.sft(&server, &scene.a, &NEIGHBOUR)[0], &alone);
    scene.assert_sound(&server);
}
