//! Processes killed at random points of a job's work: it ends as if nothing had been, and little of its work is done again.

use std::time::{Duration, Instant};

use nodus_tests::assert_same;
use serde_json::Value;

use crate::server::{Scene, Server, kept};

/// Seconds between two snapshots.
const EVERY: &str = "0.5";
/// What is done again at most where a snapshot is made every half a second, with what it takes on a busy machine to write one.
const REPEATED_MS_MAX: u64 = 2500;
/// What a service may take to end on a busy machine.
const END: Duration = Duration::from_secs(8);
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

/// Numbers that look random, the same for the same seed (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }
}

/// What a job told: kind and body of every event, and its log.
pub(crate) fn told(server: &Server<'_>, id: &str) -> (Vec<(Value, Value)>, String) {
    let events = server.ok(&["metrics", id, "--json"]);
    let event = |line: &str| {
        let event: Value = serde_json::from_str(line).unwrap();
        (event["kind"].clone(), event["body"].clone())
    };
    (events.lines().map(event).collect(), server.ok(&["logs", id]))
}

/// A field of every line about a job that went on, by its name.
fn figures(scene: &Scene, name: &str) -> Vec<u64> {
    let field = |line: &String| line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok());
    scene.went_on().iter().filter_map(field).collect()
}

#[test]
fn what_is_killed_at_random_points_goes_on_from_its_last_snapshot() {
    let scene = Scene::new();
    let mut server = Server::start_keeping(&scene, EVERY);
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
                    server = Server::start_keeping(&scene, EVERY);
                }
                Kill::All => {
                    server.kill_all();
                    server = Server::start_keeping(&scene, EVERY);
                }
            }
        }
        let job = server.ended(id);
        let what = format!("round {round}: {kills:?} at {points:?}");
        assert_eq!(job["state"], "succeeded", "{what}: {job}");
        assert_same(&expected.0, &kept(&server.fetch(id, &format!("killed-{round}"))), &what);
        assert_eq!(told(&server, id), expected.1, "{what}");
    }
    let (repeated_ms, steps) = (figures(&scene, "repeated_ms"), figures(&scene, "repeated_steps"));
    let (answered, most) = (figures(&scene, "answered").iter().sum::<u64>(), repeated_ms.iter().max());
    println!(
        "{} attempts went on: {answered} calls answered from the journal, {} steps done again",
        steps.len(),
        steps.iter().sum::<u64>()
    );
    println!("work done again in one of them: {most:?} ms at most, {:?} steps at most", steps.iter().max());
    assert!(steps.len() as u64 >= 2 * ROUNDS && answered > 0, "{}", scene.log());
    assert!(most.is_some_and(|most| *most <= REPEATED_MS_MAX), "{most:?} ms of work were done again");
    let journals = std::fs::read_dir(scene.host.path("data/journals")).unwrap().count();
    assert_eq!(journals, 0, "journals of jobs that ended are left");
}

#[test]
fn a_service_that_ends_keeps_its_jobs_as_they_are() {
    let scene = Scene::new();
    let server = Server::start_keeping(&scene, EVERY);
    let undisturbed = &server.submit(&JOB)[0];
    let id = &server.submit(&[&JOB[2..], &["--set", "steps=5000"]].concat())[0];
    server.steps(id, 20);
    assert_eq!(server.ended(undisturbed)["state"], "succeeded");
    let asked = Instant::now();
    server.end();
    assert!(asked.elapsed() < END, "{:?}: it waited for a job that takes minutes", asked.elapsed());
    let server = Server::start_keeping(&scene, EVERY);
    server.wait(id, |_| !figures(&scene, "answered").is_empty());
    assert_eq!(figures(&scene, "repeated"), [0], "{}", scene.log());
    // Nobody asked it to stop.
    let steps = server.job(id)["last_step"]["step"].as_u64().unwrap();
    server.steps(id, steps + 100);
    server.ok(&["cancel", id]);
    assert_eq!(server.ended(id)["state"], "stopped");
}

/// The first one waits for what is under way, here a body that does not come.
#[test]
fn a_second_signal_ends_a_service_at_once_and_its_jobs_go_on() {
    let scene = Scene::new();
    scene.run("undisturbed", &JOB);
    for (first, second) in [("TERM", "TERM"), ("INT", "TERM"), ("TERM", "INT")] {
        let server = Server::start_keeping(&scene, EVERY);
        let id = &server.submit(&JOB)[0];
        server.steps(id, 100);
        let _stalled = server.stalled_upload();
        let began = Instant::now();
        server.signal(first);
        std::thread::sleep(Duration::from_millis(300));
        server.signal(second);
        server.ended_itself();
        assert!(began.elapsed() < Duration::from_secs(5), "{first}, {second}: {:?}", began.elapsed());
        let server = Server::start_keeping(&scene, EVERY);
        assert_eq!(server.ended(id)["state"], "succeeded");
        assert_same(&kept(&scene.host.path("undisturbed")), &kept(&server.fetch(id, id)), first);
    }
    assert_eq!(scene.went_on().len(), 3, "{}", scene.log());
}
