//! Attacks on the service: by what is uploaded over HTTP, by the number of jobs, by what they need, by tokens, by a device that is lost.
//!
//! Each beside a neighbour of another tenant, where there is one, whose bytes must be those of its run alone.

mod bodies;
mod credentials;
mod faults;
mod queue;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use nodus_tests::{Host, Server, assert_same, children, contents, guest, told_guest};
use serde_json::Value;

use crate::{COMPANY, entries};

/// The neighbour's job.
const NEIGHBOUR: [&str; 8] = ["--set", "learning_rate=0.01", "--set", "dropout=0.1", "--set", "epochs=2", "--held-out-count", "6"];

/// A data folder with the tiny Llama, and two tenants: `a` attacks, `b` is the neighbour.
struct Scene {
    host: Host,
    a: String,
    b: String,
    /// What the service held when it had just begun.
    fresh: Cell<Held>,
}

/// What the control process holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// Open sockets and pipes: what it has of other processes. (Files are its database's, which it opens as it needs them.)
    descriptors: usize,
    /// Memory of its own: not the pages of its executable, of which the more are resident the more was tried.
    resident_kib: u64,
}

impl Held {
    fn by(server: &Server) -> Self {
        let all = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
        let is_of_others = |to: std::path::PathBuf| ["socket:", "pipe:"].iter().any(|kind| to.to_string_lossy().starts_with(kind));
        let descriptors =
            all.filter(|entry| entry.as_ref().is_ok_and(|entry| std::fs::read_link(entry.path()).is_ok_and(is_of_others))).count();
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let resident = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        Self { descriptors, resident_kib: resident.split_whitespace().nth(1).unwrap().parse().unwrap() }
    }
}

/// Sockets and pipes that the control process has of one child, at most.
const OF_A_CHILD: usize = 6;
/// What it may keep in memory beyond what it began with, whatever was tried: pages of its database and stacks of its threads, as many as were at work
/// at once (a thousand jobs: 23 MiB). What must not grow any more after that is what `n42` looks at.
const KEPT_KIB: u64 = 40 << 10;

impl Scene {
    /// With these quotas of the attacker's.
    fn new(quotas: &[&str]) -> Self {
        let host = Host::with_llama();
        let (a, b) = (host.tenant("a", quotas), host.tenant("b", &[]));
        host.ok(["data", "put", host.path("tokens.jsonl").to_str().unwrap(), "--name", "tokens"]);
        Self { host, a, b, fresh: Cell::default() }
    }

    fn serve(&self, more: &[&str]) -> Server {
        let server = Server::start(&self.host, &[&["--device", "cpu"], more].concat());
        self.fresh.set(Held::by(&server));
        server
    }

    /// Submits a component of the tenant's; the ids of the jobs.
    fn submit(&self, server: &Server, token: &str, component: &Path, more: &[&str]) -> Vec<String> {
        let data = self.host.path("tokens.jsonl");
        let fixed = [component.to_str().unwrap(), "--model", "llama", "--data", data.to_str().unwrap(), "--seed", "7"];
        server.submit(token, &[&fixed[..], more].concat())
    }

    fn sft(&self, server: &Server, token: &str, more: &[&str]) -> Vec<String> {
        self.submit(server, token, &guest("sft"), more)
    }

    /// Submits the guest that does as it is told.
    fn told(&self, server: &Server, token: &str, what: &str, more: &[&str]) -> String {
        let set = format!("do=\"{what}\"");
        self.submit(server, token, &told_guest(), &[&["--set", &set], more].concat()).remove(0)
    }

    /// What the job leaves alone, on the command line.
    fn alone(&self, name: &str, more: &[&str]) -> BTreeMap<String, Vec<u8>> {
        let (sft, out) = (guest("sft"), self.host.path(name));
        let fixed = ["run", sft.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--seed", "7", "--out", out.to_str().unwrap()];
        self.host.ok(fixed.iter().chain(more));
        kept(&out)
    }

    /// The job ended well, and every byte of it is as alone.
    fn assert_as_alone(&self, server: &Server, token: &str, id: &str, alone: &BTreeMap<String, Vec<u8>>) {
        let job = server.ended(token, id);
        assert_eq!(job["state"], "succeeded", "{job}");
        let out = self.host.path(&format!("of-{id}"));
        server.ok(token, &["fetch", id, "--out", out.to_str().unwrap()]);
        assert_same(alone, &kept(&out), id);
    }

    /// The job failed with this text, by nobody's fault but its own, and leaves one line in the ledger, with this code.
    fn assert_failed(&self, server: &Server, token: &str, id: &str, (state, message, code): (&str, &str, &str)) {
        let job = server.ended(token, id);
        assert_eq!(job["state"], state, "{job}");
        assert!(job["message"].as_str().unwrap_or_default().contains(message), "{job}");
        let of = |entry: &&Value| entry["job"] == id;
        let failed = entries(&self.host, "job_failed");
        let codes: Vec<&Value> = failed.iter().filter(of).map(|entry| &entry["code"]).collect();
        assert_eq!(codes, [code], "{job}");
        assert_eq!(entries(&self.host, "receipt").iter().filter(of).count(), 0, "{job}");
    }

    /// What a tenant uses of one thing.
    fn usage(&self, server: &Server, token: &str, what: &str) -> u64 {
        let (status, _, body) = server.request(Some(token), "GET", "/v1/usage", &[], b"");
        assert_eq!(status, 200);
        let usage: Value = serde_json::from_slice(&body).unwrap();
        usage["usage"][what].as_u64().unwrap_or_else(|| panic!("{what}: {usage}"))
    }

    /// Rows, blobs, receipts and ledger agree, and the service holds no more than it began with and what its children take.
    fn assert_sound(&self, server: &Server) {
        let (began, fresh) = (Instant::now(), self.fresh.get());
        let within = |held: &Held| {
            let all = ["engine", "guest", "compile"].iter().map(|verb| children(server.pid(), verb).len()).sum::<usize>();
            held.descriptors <= fresh.descriptors + OF_A_CHILD * all && held.resident_kib <= fresh.resident_kib + KEPT_KIB
        };
        while !within(&Held::by(server)) {
            assert!(began.elapsed() < Duration::from_secs(20), "{fresh:?} at first, {:?} now", Held::by(server));
            std::thread::sleep(Duration::from_millis(100));
        }
        self.host.ok(["state", "fsck", "--deep"]);
        crate::assert_device_is_empty(&self.host);
    }
}

/// Every file of a folder; of the receipt all but what depends on company and time, and the names that things were given.
fn kept(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = contents(dir, &COMPANY);
    let receipt = files.get_mut("receipt.json").unwrap();
    let mut statement: Value = serde_json::from_slice(receipt).unwrap();
    for thing in ["component", "data", "trunk"] {
        statement["predicate"][thing].as_object_mut().unwrap().remove("name");
    }
    *receipt = statement.to_string().into_bytes();
    files
}

/// The code of a refusal.
fn code(body: &[u8]) -> String {
    let problem: Value = serde_json::from_slice(body).unwrap_or_else(|_| panic!("no problem: {}", nodus_tests::text(body)));
    problem["code"].as_str().unwrap().to_owned()
}
