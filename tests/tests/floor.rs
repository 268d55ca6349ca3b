//! The floor from outside: what a service keeps of a job is what a run would, whatever is killed on the way.
#![cfg(target_os = "linux")]
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nodus_tests::{Host, assert_same, contents, golden, guest, host, statement, text, token_lines};
use serde_json::Value;

/// Of a receipt, what equal jobs of a run and a service differ in.
const DIFFERS: [&str; 4] = ["times", "previous_receipt", "lane", "co_resident_jobs"];

/// A data folder with the tiny Llama as `llama`, the reference tokens as a file, and a tenant.
struct Scene {
    host: Host,
    token: String,
}

impl Scene {
    fn new() -> Self {
        let host = Host::new();
        let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
        std::fs::write(host.path("tokens.jsonl"), lines).unwrap();
        host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
        host.ok(["data", "put", host.path("tokens.jsonl").to_str().unwrap(), "--name", "tokens"]);
        let added = host.ok(["tenant", "add", "acme"]);
        let token = added.split_whitespace().find(|word| word.starts_with("nodus_")).unwrap().to_owned();
        Self { host, token }
    }

    /// What a run of the command line leaves.
    fn run(&self, out: &str, more: &[&str]) {
        let sft = guest("sft");
        let place = self.host.path(out);
        let fixed = ["run", sft.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--seed", "7", "--out", place.to_str().unwrap()];
        self.host.ok(fixed.iter().chain(more));
    }
}

/// A running service. Dropped, it is gone.
struct Server<'a> {
    scene: &'a Scene,
    child: Child,
    url: String,
}

impl<'a> Server<'a> {
    fn start(scene: &'a Scene) -> Self {
        let mut command = Command::new(host());
        command.args(["serve", "--listen", "127.0.0.1:0", "--device", "cpu"]).env("NODUS_DATA_DIR", scene.host.path("data"));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { scene, child, url }
    }

    fn ok(&self, args: &[&str]) -> String {
        let mut command = Command::new(host());
        command.args(args).env("NODUS_URL", &self.url).env("NODUS_TOKEN", &self.scene.token).env_remove("NODUS_DATA_DIR");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Submits; the ids of the jobs.
    fn submit(&self, more: &[&str]) -> Vec<String> {
        let (sft, tokens) = (guest("sft"), self.scene.host.path("tokens.jsonl"));
        let fixed = ["submit", sft.to_str().unwrap(), "--model", "llama", "--data", tokens.to_str().unwrap(), "--seed", "7", "--json"];
        let told: Value = serde_json::from_str(&self.ok(&[&fixed[..], more].concat())).unwrap();
        told["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    }

    fn job(&self, id: &str) -> Value {
        let told = self.ok(&["jobs", "--json"]);
        let mut jobs = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        jobs.find(|job| job["id"] == id).unwrap()
    }

    /// Waits until the job is what it is waited for to be.
    fn wait(&self, id: &str, what: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let job = self.job(id);
            if what(&job) {
                return job;
            }
            assert!(began.elapsed() < Duration::from_secs(180), "{job}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn ended(&self, id: &str) -> Value {
        self.wait(id, |job| !["queued", "running"].contains(&job["state"].as_str().unwrap()))
    }

    /// Waits until the job has taken so many steps.
    fn steps(&self, id: &str, steps: u64) {
        self.wait(id, |job| job["last_step"]["step"].as_u64().is_some_and(|step| step >= steps));
    }

    /// Downloads a job's results.
    fn fetch(&self, id: &str, out: &str) -> std::path::PathBuf {
        let place = self.scene.host.path(out);
        self.ok(&["fetch", id, "--out", place.to_str().unwrap()]);
        place
    }

    /// The processes of one role.
    fn processes(&self, role: &str) -> Vec<u32> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap() {
            let Ok(pid) = entry.unwrap().file_name().to_string_lossy().parse::<u32>() else { continue };
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse::<u32>().ok());
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if parent == Some(self.child.id()) && line.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes()) {
                found.push(pid);
            }
        }
        found
    }

    fn kill_one(&self, role: &str) {
        let began = Instant::now();
        loop {
            if let Some(pid) = self.processes(role).first() {
                assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "there is no {role} process");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Kills the service, as a machine's end would.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Every file of a folder; of the receipt all but what differs and the names that things were given.
fn kept(dir: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    let mut files = contents(dir, &DIFFERS);
    let receipt = files.get_mut("receipt.json").unwrap();
    let mut statement: Value = serde_json::from_slice(receipt).unwrap();
    for thing in ["component", "data", "trunk"] {
        statement["predicate"][thing].as_object_mut().unwrap().remove("name");
    }
    *receipt = statement.to_string().into_bytes();
    files
}

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

const LONG: [&str; 6] = ["--set", "steps=600", "--set", "dropout=0.1", "--held-out-count", "6"];

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
    for attempt in 1..=5 {
        server.wait(id, |job| job["attempts"] == attempt && job["state"] == "running");
        server.kill_one("guest");
    }
    let job = server.ended(id);
    assert_eq!(job["state"], "failed", "{job}");
    assert!(job["message"].as_str().unwrap().contains("SIGKILL"), "{job}");
    let next = &server.submit(&SWEEP[2..])[0];
    assert_eq!(server.ended(next)["state"], "succeeded");
}
