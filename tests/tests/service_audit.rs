//! `audit job`: an auditor's machine has the model and nothing else; all the rest comes from the service and is held against the receipt.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::process::{Command, Output};

use nodus_tests::{Host, Server, guest, host, text};

/// The verb on an auditor's machine.
fn audit(auditor: &Host, server: &Server, token: &str, id: &str, more: &[&str]) -> Output {
    let out = auditor.path(&format!("audited-{}", std::fs::read_dir(auditor.dir.path()).unwrap().count()));
    let mut command = Command::new(host());
    command.args(["audit", "job", id, "--out", out.to_str().unwrap()]).args(more);
    command.env("NODUS_URL", &server.url).env("NODUS_TOKEN", token).env("NODUS_DATA_DIR", auditor.path("data")).output().unwrap()
}

fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stderr)
}

#[test]
fn a_job_of_a_service_is_checked_and_run_again_elsewhere() {
    let (own, auditor) = (Host::with_llama(), Host::with_llama());
    let (a, b) = (own.tenant("a", &[]), own.tenant("b", &[]));
    let eval = format!("eval={}", guest("eval").display());
    let blobs = || std::fs::read_dir(own.path("data/blobs")).map_or(0, Iterator::count);
    let before = blobs();
    let server = Server::start(&own, &["--device", "cpu", "--component", &eval]);
    let (path, data) = (guest("sft"), own.path("tokens.jsonl"));
    let inputs = ["--model", "llama", "--data", data.to_str().unwrap(), "--held-out-count", "6", "--set", "steps=20"];
    let first = server.submit(&a, &[&[path.to_str().unwrap()][..], &inputs].concat()).remove(0);
    assert_eq!(server.ended(&a, &first)["state"], "succeeded");
    let start = format!("init_adapter={first}");
    let second = server.submit(&a, &[&[path.to_str().unwrap()][..], &inputs, &["--set", &start]].concat()).remove(0);
    assert_eq!(server.ended(&a, &second)["state"], "succeeded");
    let key = own.path("data/host_key.pub.pem");
    let replay = ["--replay", "--device", "cpu", "--key", key.to_str().unwrap()];
    for id in [&first, &second] {
        let told = ok(&audit(&auditor, &server, &a, id, &replay));
        assert!(told.contains("bit-identical: 20 losses") && told.contains("ledger: ok"), "{told}");
    }
    // Without a machine to run it on: all that can be checked.
    let told = ok(&audit(&auditor, &server, &a, &first, &[]));
    assert!(told.contains("believing the service's own word") && told.contains("were zeroed") && !told.contains("bit-identical"), "{told}");
    assert!(refused(&audit(&auditor, &server, &b, &first, &[])).contains("there is no such job"));

    // A ready-made component is the operator's.
    let theirs = server.submit(&b, &[&["eval"][..], &inputs[..6]].concat()).remove(0);
    assert_eq!(server.ended(&b, &theirs)["state"], "succeeded");
    let lacking = refused(&audit(&auditor, &server, &b, &theirs, &replay));
    assert!(lacking.contains("component `eval`") && lacking.contains("--component"), "{lacking}");
    let wrong = refused(&audit(&auditor, &server, &b, &theirs, &[&replay[..], &["--component", path.to_str().unwrap()]].concat()));
    assert!(wrong.contains("component `eval`"), "{wrong}");
    // Where the right one is there too, the wrong one is still a mistake.
    let wrong = guest("eval");
    let wrong = refused(&audit(&auditor, &server, &a, &first, &[&replay[..], &["--component", wrong.to_str().unwrap()]].concat()));
    assert!(wrong.contains("--component is sha256:") && wrong.contains("expected the one that the job ran"), "{wrong}");
    let eval = guest("eval");
    let with = [&replay[..], &["--component", eval.to_str().unwrap()]].concat();
    assert!(ok(&audit(&auditor, &server, &b, &theirs, &with)).contains("bit-identical"));
    // The service has it, and keeps it as long as the job is there, once.
    assert!(ok(&audit(&own, &server, &b, &theirs, &replay)).contains("bit-identical"));
    assert_eq!(blobs(), before, "a second copy of what the service keeps");

    // Another key than the operator's own, and a job without a receipt.
    auditor.ok(["model", "list"]);
    let foreign = auditor.path("data/host_key.pub.pem");
    let distrusted = refused(&audit(&auditor, &server, &a, &first, &["--key", foreign.to_str().unwrap()]));
    assert!(distrusted.contains("not what was signed"), "{distrusted}");
    let cancelled = server.submit(&a, &[&[path.to_str().unwrap()][..], &inputs, &["--set", "steps=100000"]].concat()).remove(0);
    server.ok(&a, &["cancel", "--now", &cancelled]);
    server.ended(&a, &cancelled);
    assert!(refused(&audit(&auditor, &server, &a, &cancelled, &[])).contains("no receipt"));
}
