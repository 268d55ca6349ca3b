//! A running service, as operators and tenants meet it: the binary's own verbs, and HTTP written by hand where a client would be too polite.
//!
//! Never outlives its test: dropped, it is gone.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{Host, children, host, text};

/// How long anything may take that is waited for.
const PATIENCE: Duration = Duration::from_secs(180);

/// A running service.
pub struct Server {
    child: Child,
    /// Where it listens: `http://127.0.0.1:PORT`.
    pub url: String,
}

/// What was answered: the status, the head in small letters, the body.
pub type Answer = (u16, String, Vec<u8>);

impl Server {
    /// Starts one on a free port, on this host's data folder.
    #[must_use]
    pub fn start(of: &Host, more: &[&str]) -> Self {
        Self::start_at(of, "http://127.0.0.1:0", more)
    }

    /// The same where another one listened: the address of its [`Server::url`].
    #[must_use]
    pub fn start_at(of: &Host, url: &str, more: &[&str]) -> Self {
        let mut command = Command::new(host());
        let address = url.rsplit_once('/').unwrap().1;
        command.args(["serve", "--listen", address]).args(more).env("NODUS_DATA_DIR", of.path("data"));
        // Its memory is then what it holds, and not also what lies unused in the C library's heaps, of which each thread may have one.
        command.env("MALLOC_ARENA_MAX", "1");
        let log = std::fs::OpenOptions::new().append(true).create(true).open(of.path("log")).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { child, url }
    }

    /// Kills it, as a machine's end would.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The control process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A verb as a tenant gives it.
    #[must_use]
    pub fn call(&self, token: &str, args: &[&str]) -> Output {
        Command::new(host()).args(args).env("NODUS_URL", &self.url).env("NODUS_TOKEN", token).env_remove("NODUS_DATA_DIR").output().unwrap()
    }

    /// One that is answered well; what it says.
    pub fn ok(&self, token: &str, args: &[&str]) -> String {
        let output = self.call(token, args);
        assert!(output.status.success(), "{args:?}: {}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// One that is refused; why.
    pub fn refused(&self, token: &str, args: &[&str]) -> String {
        let output = self.call(token, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stderr)
    }

    /// Submits with `--json`; the ids of the jobs.
    pub fn submit(&self, token: &str, args: &[&str]) -> Vec<String> {
        let told: Value = serde_json::from_str(&self.ok(token, &[&["submit"], args, &["--json"]].concat())).unwrap();
        told["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect()
    }

    /// A job, as its owner sees it.
    #[must_use]
    pub fn job(&self, token: &str, id: &str) -> Value {
        let (status, _, body) = self.request(Some(token), "GET", &format!("/v1/jobs/{id}"), &[], b"");
        assert_eq!(status, 200, "{}", text(&body));
        serde_json::from_slice(&body).unwrap()
    }

    /// Waits until the job is what it is waited for to be.
    pub fn wait(&self, token: &str, id: &str, what: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let job = self.job(token, id);
            if what(&job) {
                return job;
            }
            assert!(began.elapsed() < PATIENCE, "{job}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the job has ended.
    pub fn ended(&self, token: &str, id: &str) -> Value {
        self.wait(token, id, |job| job["state"] != "queued" && job["state"] != "running")
    }

    /// Waits until the job has taken so many steps.
    pub fn steps(&self, token: &str, id: &str, steps: u64) {
        self.wait(token, id, |job| job["last_step"]["step"].as_u64().is_some_and(|step| step >= steps));
    }

    /// Kills one process of a role (`engine`, `guest`), once there is one; which it was.
    pub fn kill_one(&self, role: &str) -> u32 {
        let began = Instant::now();
        loop {
            if let Some(pid) = children(self.pid(), role).first() {
                assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
                return *pid;
            }
            assert!(began.elapsed() < PATIENCE, "there is no {role} process");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A connection.
    #[must_use]
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.url.rsplit('/').next().unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// One request over a connection of its own.
    #[must_use]
    pub fn request(&self, token: Option<&str>, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if let Some(token) = token {
            head += &format!("authorization: Bearer {token}\r\n");
        }
        let mut stream = self.connect();
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        // Who is refused early is hung up on while it still writes.
        let reader = stream.try_clone().unwrap();
        let answered = std::thread::spawn(move || answer(reader));
        drop(stream.write_all(body));
        answered.join().unwrap().unwrap_or_else(|| panic!("{method} {path}: no answer"))
    }

    /// Asks it to end, and waits.
    #[must_use]
    pub fn end(mut self) -> Option<i32> {
        assert!(Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

/// The one answer that a connection still has to give; none where it is hung up.
#[must_use]
pub fn answer(mut stream: TcpStream) -> Option<Answer> {
    let mut bytes = Vec::new();
    // A reset after the answer takes nothing away that was read.
    drop(stream.read_to_end(&mut bytes));
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = text(&bytes[..end]).to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Some((status, head, bytes[end + 4..].to_vec()))
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
