//! A service of its own data folder, and what tests do with it: submit, wait, kill, fetch.

use std::cell::Cell;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nodus_tests::{Host, contents, golden, guest, host, text, token_lines};
use serde_json::Value;

/// Of a receipt, what equal jobs of a run and a service differ in.
const DIFFERS: [&str; 4] = ["times", "previous_receipt", "lane", "co_resident_jobs"];

/// A job that takes a while, with random numbers and evaluations in it.
pub(crate) const JOB: [&str; 6] = ["--set", "steps=600", "--set", "dropout=0.1", "--held-out-count", "6"];

/// A data folder with the tiny Llama as `llama`, the reference tokens as a file, and a tenant.
pub(crate) struct Scene {
    pub(crate) host: Host,
    pub(crate) token: String,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let host = Host::new();
        let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
        std::fs::write(host.path("tokens.jsonl"), lines).unwrap();
        host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
        host.ok(["data", "put", host.path("tokens.jsonl").to_str().unwrap(), "--name", "tokens"]);
        let mut scene = Self { host, token: String::new() };
        scene.token = scene.tenant("acme");
        scene
    }

    /// Adds a tenant; its token.
    pub(crate) fn tenant(&self, name: &str) -> String {
        let added = self.host.ok(["tenant", "add", name]);
        added.split_whitespace().find(|word| word.starts_with("nodus_")).unwrap().to_owned()
    }

    fn open_log(&self) -> std::fs::File {
        std::fs::OpenOptions::new().append(true).create(true).open(self.host.path("log")).unwrap()
    }

    /// What its services have logged.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.host.path("log")).unwrap_or_default()
    }

    /// What its services have logged of jobs that went on, a line each.
    pub(crate) fn went_on(&self) -> Vec<String> {
        self.log().lines().filter(|line| line.contains("a job went on where it was cut off")).map(str::to_owned).collect()
    }

    /// What a run of the command line leaves.
    pub(crate) fn run(&self, out: &str, more: &[&str]) {
        let sft = guest("sft");
        let place = self.host.path(out);
        let fixed = ["run", sft.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--seed", "7", "--out", place.to_str().unwrap()];
        self.host.ok(fixed.iter().chain(more));
    }
}

/// A running service. Dropped, it is gone.
pub(crate) struct Server<'a> {
    scene: &'a Scene,
    child: Child,
    url: String,
    /// Whose requests are made.
    token: Cell<&'a str>,
}

impl<'a> Server<'a> {
    pub(crate) fn start(scene: &'a Scene) -> Self {
        Self::start_with(scene, &["--device", "cpu"])
    }

    /// One that keeps its jobs as they are every so many seconds.
    pub(crate) fn start_keeping(scene: &'a Scene, seconds: &str) -> Self {
        Self::start_with(scene, &["--device", "cpu", "--snapshot-every", seconds])
    }

    /// What it logs goes to a file of the scene's; see [`Scene::log`].
    pub(crate) fn start_with(scene: &'a Scene, more: &[&str]) -> Self {
        let log = scene.open_log().into();
        Self::launch(scene, (Command::new(host()), log), more)
    }

    /// One whose disk can be full: see [`Server::fill`]. What it logs comes through a pipe, since no file takes it then.
    pub(crate) fn start_on_a_disk(scene: &'a Scene, more: &[&str]) -> Self {
        let mut command = Command::new("sh");
        // Beyond the limit a write is an error, and not the process's end.
        command.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]).arg(host());
        let mut server = Self::launch(scene, (command, Stdio::piped()), more);
        let (mut told, mut log) = (server.child.stderr.take().unwrap(), scene.open_log());
        std::thread::spawn(move || std::io::copy(&mut told, &mut log));
        server
    }

    fn launch(scene: &'a Scene, (mut command, log): (Command, Stdio), more: &[&str]) -> Self {
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(more);
        command.env("NODUS_DATA_DIR", scene.host.path("data")).env("NODUS_LOG", "info");
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { scene, child, url, token: Cell::new(&scene.token) }
    }

    /// From now on requests are this tenant's.
    pub(crate) fn speak_for(&self, token: &'a str) {
        self.token.set(token);
    }

    pub(crate) fn call(&self, args: &[&str]) -> Output {
        let mut command = Command::new(host());
        command.args(args).env("NODUS_URL", &self.url).env("NODUS_TOKEN", self.token.get()).env_remove("NODUS_DATA_DIR");
        command.output().unwrap()
    }

    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.call(args);
        assert!(output.status.success(), "{args:?}: {}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Submits; the ids of the jobs.
    pub(crate) fn submit(&self, more: &[&str]) -> Vec<String> {
        let (sft, tokens) = (guest("sft"), self.scene.host.path("tokens.jsonl"));
        let fixed = ["submit", sft.to_str().unwrap(), "--model", "llama", "--data", tokens.to_str().unwrap(), "--json"];
        let seed: &[&str] = if more.contains(&"--seed") { &[] } else { &["--seed", "7"] };
        let told: Value = serde_json::from_str(&self.ok(&[&fixed[..], seed, more].concat())).unwrap();
        told["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    }

    pub(crate) fn job(&self, id: &str) -> Value {
        let told = self.ok(&["jobs", "--json"]);
        let mut jobs = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        jobs.find(|job| job["id"] == id).unwrap()
    }

    /// Waits until the job is what it is waited for to be.
    pub(crate) fn wait(&self, id: &str, what: impl Fn(&Value) -> bool) -> Value {
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

    pub(crate) fn ended(&self, id: &str) -> Value {
        self.wait(id, |job| !["queued", "running"].contains(&job["state"].as_str().unwrap()))
    }

    /// Waits until the job has taken so many steps.
    pub(crate) fn steps(&self, id: &str, steps: u64) {
        self.wait(id, |job| job["last_step"]["step"].as_u64().is_some_and(|step| step >= steps));
    }

    /// Downloads a job's results.
    pub(crate) fn fetch(&self, id: &str, out: &str) -> std::path::PathBuf {
        let place = self.scene.host.path(out);
        self.ok(&["fetch", id, "--out", place.to_str().unwrap()]);
        place
    }

    /// The processes of one role.
    pub(crate) fn processes(&self, role: &str) -> Vec<u32> {
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

    pub(crate) fn kill_one(&self, role: &str) {
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

    /// From now on no file takes a byte at or beyond this place: of what is written across it the first part, as on a disk that becomes full.
    pub(crate) fn fill(&self, bytes: u64) {
        limit(self.child.id(), &format!("--fsize={bytes}:"));
    }

    /// There is room again.
    pub(crate) fn free(&self) {
        // Engines that were started meanwhile have its limit; guests write no files.
        let all = [vec![self.child.id()], self.processes("engine")].concat();
        all.into_iter().for_each(|pid| limit(pid, "--fsize=unlimited:"));
    }

    /// Kills the service and all its processes at once.
    pub(crate) fn kill_all(mut self) {
        let all = [self.processes("engine"), self.processes("guest"), vec![self.child.id()]].concat();
        let all: Vec<String> = all.iter().map(u32::to_string).collect();
        // One of them may be gone already.
        Command::new("kill").arg("-KILL").args(all).status().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks the service to end, and waits until it has.
    pub(crate) fn end(self) {
        self.signal("TERM");
        self.ended_itself();
    }

    pub(crate) fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([format!("-{name}"), self.child.id().to_string()]).status().unwrap().success());
    }

    /// Waits until the service has ended.
    pub(crate) fn ended_itself(mut self) {
        assert!(self.child.wait().unwrap().success());
    }

    /// The connection of an upload of which half has come.
    pub(crate) fn stalled_upload(&self) -> TcpStream {
        let mut stream = TcpStream::connect(self.url.rsplit('/').next().unwrap()).unwrap();
        let token = self.token.get();
        write!(stream, "PUT /v1/data/half HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: 99\r\n\r\n{{").unwrap();
        let began = Instant::now();
        // It has come once its file is there.
        while std::fs::read_dir(self.scene.host.path("data/service/tmp")).unwrap().next().is_none() {
            assert!(began.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(10));
        }
        stream
    }

    /// Whether it says that it can take work.
    pub(crate) fn is_ready(&self) -> bool {
        let mut stream = TcpStream::connect(self.url.rsplit('/').next().unwrap()).unwrap();
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert!(line.contains(" 204 ") || line.contains(" 503 "), "{line}");
        line.contains(" 204 ")
    }

    /// Kills the service, as a machine's end would.
    pub(crate) fn kill(mut self) {
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

/// Sets a limit of a process, which may be gone by then.
fn limit(pid: u32, which: &str) {
    Command::new("prlimit").args(["--pid", &pid.to_string(), which]).status().unwrap();
}

/// Every file of a folder; of the receipt all but what differs and the names that things were given.
pub(crate) fn kept(dir: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    let mut files = contents(dir, &DIFFERS);
    let receipt = files.get_mut("receipt.json").unwrap();
    let mut statement: Value = serde_json::from_slice(receipt).unwrap();
    for thing in ["component", "data", "trunk"] {
        statement["predicate"][thing].as_object_mut().unwrap().remove("name");
    }
    *receipt = statement.to_string().into_bytes();
    files
}
