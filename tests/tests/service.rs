//! The service from outside: a server on a free port, operators and tenants with the same binary.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};

use nodus_tests::{Host, golden, guest, host, text, token_lines};
use serde_json::Value;

/// A running service. Dropped, it is gone.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(host: &Host, more: &[&str]) -> Self {
        let mut command = Command::new(self::host());
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(more).env("NODUS_DATA_DIR", host.path("data"));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Self { child, url }
    }

    /// A verb as a tenant gives it.
    fn call(&self, token: &str, args: &[&str]) -> Output {
        Command::new(host()).args(args).env("NODUS_URL", &self.url).env("NODUS_TOKEN", token).env_remove("NODUS_DATA_DIR").output().unwrap()
    }

    fn ok(&self, token: &str, args: &[&str]) -> String {
        let output = self.call(token, args);
        assert!(output.status.success(), "{args:?}: {}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    fn refused(&self, token: &str, args: &[&str]) -> String {
        let output = self.call(token, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}\n{}", text(&output.stdout), text(&output.stderr));
        text(&output.stderr)
    }

    /// Asks it to end, and waits.
    fn end(mut self) -> Option<i32> {
        let asked = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(asked.success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn prepared() -> Host {
    let host = Host::new();
    std::fs::write(host.path("tokens.jsonl"), token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]))
        .unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host
}

fn json(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

#[test]
fn tenants_upload_submit_list_and_cancel_and_it_is_there_after_a_restart() {
    let host = prepared();
    let token = |name: &str| host.ok(["tenant", "add", name]).trim().to_owned();
    let (a, b) = (token("a"), token("b"));
    let sft = format!("sft={}", guest("sft").display());
    let server = Server::start(&host, &["--component", &sft]);
    let data = host.path("tokens.jsonl");
    // A learning rate that no job gets far with before it is cancelled would still be a job: many steps are asked for.
    let common = ["--model", "llama", "--data", data.to_str().unwrap(), "--held-out-count", "6", "--set", "steps=1000000", "--json"];
    let sweep = [&["submit", "sft"][..], &common, &["--sweep", "learning_rate=0.01,0.02", "--key", "k"]].concat();
    let made = json(&server.ok(&a, &sweep)).remove(0);
    assert_eq!(json(&server.ok(&a, &sweep)).remove(0), made, "the same key is the same submission");
    let path = guest("sft");
    let own = json(&server.ok(&a, &[&["submit", path.to_str().unwrap()][..], &common].concat())).remove(0);

    let listed = json(&server.ok(&a, &["jobs", "--json"]));
    let names: Vec<&str> = listed.iter().map(|job| job["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["", "learning_rate=0.02", "learning_rate=0.01"]);
    assert_eq!(listed[0]["component_id"], listed[1]["component_id"], "the same bytes have the same id");
    assert!(listed[0]["limits"]["device-bytes"].as_u64().unwrap() > 0);
    assert!(server.ok(&a, &["jobs"]).starts_with("ID"), "a table for people");

    assert_eq!(server.ok(&b, &["jobs", "--json"]), "");
    let job = own["jobs"][0]["id"].as_str().unwrap();
    for verb in ["watch", "logs", "metrics", "cancel"] {
        assert!(server.refused(&b, &[verb, job]).contains("not-found: there is no such job"), "{verb}");
    }
    assert!(server.refused("nodus_0", &["jobs"]).contains("unauthenticated"));
    let misspelt = [&["submit", "stf"][..], &common].concat();
    assert!(server.refused(&a, &misspelt).contains("there is no component `stf`"));

    let cohort = made["cohort"].as_str().unwrap();
    assert_eq!(json(&server.ok(&a, &["cancel", "--now", cohort, "--json"])).len(), 2);
    assert_eq!(server.end(), Some(0), "a service that is asked to end ends well");

    let server = Server::start(&host, &[]);
    let ids = |jobs: &[Value]| jobs.iter().map(|job| job["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(ids(&json(&server.ok(&a, &["jobs", "--json"]))), ids(&listed));
    server.ok(&a, &["cancel", "--now", job]);
    let watched = server.refused(&a, &["watch", cohort]);
    assert!(watched.contains("2 of 2 jobs did not end well") && watched.contains("cancelled"), "{watched}");
    let out = host.path("out");
    server.ok(&a, &["fetch", cohort, "--out", out.to_str().unwrap()]);
    assert!(out.join("learning_rate=0.01").is_dir());

    host.ok(["tenant", "disable", "a"]);
    assert!(server.refused(&a, &["jobs"]).contains("unauthenticated"), "beside the running service");
    let rotated = host.ok(["tenant", "rotate", "b"]);
    assert!(server.refused(&b, &["jobs"]).contains("unauthenticated"));
    server.ok(rotated.trim(), &["jobs"]);
}

#[test]
fn what_strangers_could_reach_needs_tls_and_one_service_has_the_folder() {
    let host = prepared();
    let refused = host.refused(2, ["serve", "--listen", "0.0.0.0:0"]);
    assert!(refused.contains("--tls-cert") && refused.contains("--insecure"), "{refused}");
    let _server = Server::start(&host, &[]);
    let second = host.refused(2, ["serve", "--listen", "127.0.0.1:0"]);
    assert!(second.contains("the service runs already"), "{second}");
    assert!(host.refused(2, ["tenant", "add", "../a"]).contains("cannot be a name"));
    host.ok(["tenant", "add", "a", "--quota", "queued-jobs=3"]);
    assert!(host.refused(2, ["tenant", "add", "a"]).contains("already"));
    assert!(host.ok(["tenant", "quota", "a", "device-ms=none"]).contains("queued-jobs=3\n"));
    assert!(host.refused(2, ["tenant", "rotate", "aa"]).contains("there are: a"));
    assert!(host.ok(["tenant", "list"]).starts_with("a  0 queued"));
}

#[test]
fn tls_is_spoken_with_those_who_trust_the_certificate() {
    let host = prepared();
    let token = host.ok(["tenant", "add", "a"]).trim().to_owned();
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(host.path("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(host.path("key.pem"), made.signing_key.serialize_pem()).unwrap();
    std::fs::write(host.path("serve.toml"), "tls_cert = \"cert.pem\"\ntls_key = \"key.pem\"\n").unwrap();
    let path = |name: &str| host.path(name).to_str().unwrap().to_owned();
    let server = Server::start(&host, &["--config", &path("serve.toml")]);
    assert!(server.url.starts_with("https://127.0.0.1:"), "{}", server.url);
    server.ok(&token, &["jobs", "--ca", &path("cert.pem")]);
    let distrusted = server.call(&token, &["jobs"]);
    assert!(!distrusted.status.success() && text(&distrusted.stderr).contains("asking the service"), "{}", text(&distrusted.stderr));
}
