//! Processes killed at random points of a job's work: it ends as if nothing had been, and little of its work is done again.

use nodus_tests::assert_same;
use serde_json::Value;

use crate::server::{Scene, Server, kept};

/// Seconds between two snapshots.
const EVERY: &str = "0.5";
/// What is done again at most where a snapshot is made every half a second, with what it takes on a busy machine to write one.
const REPEATED_MS_MAX: u64 = 2500;
/// Jobs that are each killed once in every way.
const ROUNDS: u64 = if cfg!(feature = "slow") { 50 } else { 2 };
const STEPS: u64 = 500;
const JOB: [&str; 8] = ["--set", "steps=500", "--set", "dropout=0.1", "--held-out-count", "6", "--set", "evaluate_every=50"];

/// What is killed.
#[derive(Clone, Copy, Debug)]
enum Kill {
    Guest,
    Engine,
    Control,
    All,
}

fn start(scene: &Scene) -> Server<'_> {
    Server::start_with(scene, &["--device", "cpu", "--snapshot-every", EVERY])
}

/// Numbers that look random, the same for the same seed (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }
}

/// What a job told: kind and body of every event, and its log.
fn told(server: &Server<'_>, id: &str) -> (Vec<(Value, Value)>, String) {
    let events = server.ok(&["metrics", id, "--json"]);
    let event = |line: &str| {
        let event: Value = serde_json::from_str(line).unwrap();
        (event["kind"].clone(), event["body"].clone())
    };
    (events.lines().map(event).collect(), server.ok(&["logs", id]))
}

/// A field of every line about a job that went on, by its name.
fn figures(log: &str, name: &str) -> Vec<u64> {
    let lines = log.lines().filter(|line| line.contains("a job went on where it was cut off"));
    let field = |line: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
    lines.filter_map(field).collect()
}

#[test]
fn what_is_killed_at_random_points_goes_on_from_its_last_snapshot() {
    let scene = Scene::new();
    let mut server = start(&scene);
    let undisturbed = &server.submit(&JOB)[0];
    assert_eq!(server.ended(undisturbed)["state"], "succeeded");
    let expected = (kept(&server.fetch(undisturbed, "undisturbed")), told(&server, undisturbed));
    for round in 0..ROUNDS {
        let mut random = Random(round);
        let mut kills = [Kill::Guest, Kill::Engine, Kill::Control, Kill::All];
        (1..kills.len()).rev().for_each(|place| kills.swap(place, random.below(place as u64 + 1) as usize));
        let mut points = [(); 4].map(|()| 1 + random.below(STEPS - 50));
        points.sort_unstable();
        let id = &server.submit(&JOB)[0];
        for (kill, point) in kills.iter().zip(points) {
            server.steps(id, point);
            match kill {
                Kill::Guest => server.kill_one("guest"),
                Kill::Engine => server.kill_one("engine"),
                Kill::Control => {
                    server.kill();
                    server = start(&scene);
                }
                Kill::All => {
                    server.kill_all();
                    server = start(&scene);
                }
            }
        }
        let job = server.ended(id);
        let what = format!("round {round}: {kills:?} at {points:?}");
        assert_eq!(job["state"], "succeeded", "{what}: {job}");
        assert_same(&expected.0, &kept(&server.fetch(id, &format!("killed-{round}"))), &what);
        assert_eq!(told(&server, id), expected.1, "{what}");
    }
    let log = scene.log();
    let (repeated_ms, steps) = (figures(&log, "repeated_ms"), figures(&log, "repeated_steps"));
    let (answered, most) = (figures(&log, "answered").iter().sum::<u64>(), repeated_ms.iter().max());
    println!(
        "{} attempts went on: {answered} calls answered from the journal, {} steps done again",
        steps.len(),
        steps.iter().sum::<u64>()
    );
    println!("work done again in one of them: {most:?} ms at most, {:?} steps at most", steps.iter().max());
    assert!(steps.len() as u64 >= 2 * ROUNDS && answered > 0, "{log}");
    assert!(most.is_some_and(|most| *most <= REPEATED_MS_MAX), "{most:?} ms of work were done again");
    let journals = std::fs::read_dir(scene.host.path("data/journals")).unwrap().count();
    assert_eq!(journals, 0, "journals of jobs that ended are left");
}

#[test]
fn a_service_that_ends_keeps_its_jobs_as_they_are() {
    let scene = Scene::new();
    let server = Server::start(&scene);
    let undisturbed = &server.submit(&JOB)[0];
    let id = &server.submit(&[&JOB[2..], &["--set", "steps=5000"]].concat())[0];
    server.steps(id, 20);
    assert_eq!(server.ended(undisturbed)["state"], "succeeded");
    server.end();
    let server = Server::start(&scene);
    server.wait(id, |_| !figures(&scene.log(), "answered").is_empty());
    let log = scene.log();
    assert_eq!(figures(&log, "repeated"), [0], "{log}");
    // Nobody asked it to stop.
    let steps = server.job(id)["last_step"]["step"].as_u64().unwrap();
    server.steps(id, steps + 100);
    server.ok(&["cancel", id]);
    assert_eq!(server.ended(id)["state"], "stopped");
}

/// A job of this seed ends its engine's process at its step 6: a fault that development builds have planted.
const FAULTY: &str = "4195811333";

#[test]
fn a_job_that_ends_engines_is_found_out_and_the_others_go_on() {
    let scene = Scene::new();
    let server = start(&scene);
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
    let heavy = [&JOB[2..], &["--set", "steps=400", "--set", "batch_size=8"]].concat();
    scene.run("run", &heavy);
    let server = start(&scene);
    let id = &server.submit(&heavy)[0];
    for attempt in 2..6 {
        server.wait(id, |job| job["state"] == "running" && job["last_step"]["step"].as_u64().is_some_and(|step| step >= 5));
        if scene.log().contains("lane=Solo") {
            break;
        }
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
