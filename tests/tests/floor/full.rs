//! A disk that is full for a while: jobs wait for it, and end as if it had never been.

use std::time::Duration;

use nodus_tests::assert_same;
use serde_json::Value;

use crate::kills::{Random, told};
use crate::server::{JOB, Scene, Server, kept};

/// Seconds between two snapshots.
const EVERY: [&str; 4] = ["--device", "cpu", "--snapshot-every", "0.3"];
const SWEEP: [&str; 10] =
    ["--sweep", "rank=2,4,8", "--set", "steps=300", "--set", "dropout=0.1", "--held-out-count", "6", "--set", "evaluate_every=50"];
const MEMBERS: [&str; 3] = ["rank=2", "rank=4", "rank=8"];
/// Sweeps, each of which the disk refuses again and again until it has ended.
const ROUNDS: u64 = if cfg!(feature = "slow") { 20 } else { 1 };
/// How often in each, at most.
const FULL_MAX: usize = 6;

fn is_over(server: &Server<'_>, ids: &[String]) -> bool {
    ids.iter().all(|id| !["queued", "running"].contains(&server.job(id)["state"].as_str().unwrap()))
}

fn sleep(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

#[test]
fn a_disk_that_is_full_at_random_moments_changes_no_byte() {
    let scene = Scene::new();
    scene.run("run", &SWEEP);
    let server = Server::start_on_a_disk(&scene, &EVERY);
    let undisturbed = server.submit(&SWEEP);
    let expected: Vec<_> = undisturbed.iter().map(|id| (server.ended(id)["state"].clone(), told(&server, id))).collect();
    let (mut full, mut attempts, mut all) = (0, 0, undisturbed);
    for round in 0..ROUNDS {
        let mut random = Random(round);
        let ids = server.submit(&SWEEP);
        for _ in 0..FULL_MAX {
            sleep(random.below(900));
            if is_over(&server, &ids) {
                break;
            }
            // Wholly, or where files are a little longer than some are now.
            let bytes = if random.below(2) == 0 { 0 } else { random.below(200_000) };
            server.fill(bytes);
            full += 1;
            sleep(200 + random.below(1500));
            server.free();
        }
        for ((id, member), (state, events)) in ids.iter().zip(MEMBERS).zip(&expected) {
            let job = server.ended(id);
            let what = format!("round {round}, {member}");
            assert_eq!((&job["state"], job["state"].as_str()), (state, Some("succeeded")), "{what}: {job}\n{}", scene.log());
            assert_same(&kept(&scene.host.path("run").join(member)), &kept(&server.fetch(id, &format!("{round}-{member}"))), &what);
            assert_eq!(told(&server, id), *events, "{what}");
            attempts += job["attempts"].as_u64().unwrap() - 1;
        }
        all.extend(ids);
    }
    println!("{full} times full, {attempts} attempts more than without");
    assert!(attempts >= ROUNDS, "nothing was interrupted");
    assert_eq!(std::fs::read_dir(scene.host.path("data/journals")).unwrap().count(), 0, "journals of jobs that ended are left");
    server.end();
    let fsck = scene.host.ok(["state", "fsck", "--deep"]);
    assert!(fsck.contains("agree"), "{fsck}");
    let receipts = scene.host.ok(["audit", "ledger", "--kind", "receipt"]);
    let count = |id: &String| receipts.lines().filter(|line| line.contains(id.as_str())).count();
    assert!(all.iter().all(|id| count(id) == 1), "{receipts}");
}

#[test]
fn a_job_waits_for_the_disk_for_as_long_as_it_takes_and_its_owner_is_told_why() {
    let scene = Scene::new();
    scene.run("run", &JOB);
    let server = Server::start_on_a_disk(&scene, &EVERY);
    let id = &server.submit(&JOB)[0];
    server.steps(id, 30);
    server.fill(0);
    let job = server.wait(id, |job| job["reason"].as_str().is_some_and(|reason| reason.contains("disk")));
    assert_eq!(job["state"], "running", "nothing can be written: {job}");
    assert!(!server.call(&["cancel", id]).status.success(), "a stop that cannot be written is not promised");
    assert!(!server.is_ready(), "what is refused is refused by more than a full disk's own word");
    // Far longer than a few tries take.
    sleep(15_000);
    assert_eq!(server.job(id)["state"], "running");
    assert!(!server.is_ready());
    server.free();
    let job = server.ended(id);
    assert_eq!((job["state"].as_str(), &job["reason"]), (Some("succeeded"), &Value::Null), "{job}\n{}", scene.log());
    assert_same(&kept(&scene.host.path("run")), &kept(&server.fetch(id, "fetched")), "after the disk was full");
    let began = std::time::Instant::now();
    while !server.is_ready() {
        assert!(began.elapsed() < Duration::from_secs(30), "it can be written again");
        sleep(50);
    }
    let said = scene.log().lines().filter(|line| line.contains("ERROR") && line.contains("it is tried again until it can be")).count();
    assert_eq!(said, 1, "{}", scene.log());
}

#[test]
fn a_stop_that_is_asked_for_after_the_disk_was_full_has_its_effect() {
    let scene = Scene::new();
    let server = Server::start_on_a_disk(&scene, &EVERY);
    let long = [&JOB[2..], &["--set", "steps=100000"]].concat();
    let [gently, at_once] = [&server.submit(&long)[0], &server.submit(&long)[0]];
    [gently, at_once].iter().for_each(|id| server.steps(id, 20));
    server.fill(0);
    let is_told = |job: &Value| job["reason"].as_str().is_some_and(|reason| reason.contains("disk"));
    [gently, at_once].iter().for_each(|id| drop(server.wait(id, is_told)));
    server.free();
    server.ok(&["cancel", gently]);
    server.ok(&["cancel", "--now", at_once]);
    assert_eq!(server.ended(at_once)["state"], "cancelled");
    let job = server.ended(gently);
    assert_eq!(job["state"], "stopped", "{job}");
    let fetched = server.fetch(gently, "fetched");
    let replayed = scene.host.ok(["audit", "replay", fetched.to_str().unwrap()]);
    assert!(replayed.contains("bit-identical"), "{replayed}");
}
