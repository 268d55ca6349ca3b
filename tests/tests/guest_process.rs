//! The process that guests run in, from outside: it changes no byte, it has nothing, and its death harms nobody else.
#![cfg(target_os = "linux")]
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nodus_tests::{Host, assert_same, children, contents, golden, guest, host, text, token_lines};
use serde_json::Value;

/// Of a receipt, what two equal runs differ in.
const DIFFERS: [&str; 4] = ["times", "previous_receipt", "lane", "co_resident_jobs"];

/// A data folder with the tiny Llama as `llama` and the reference tokens as `tokens`.
fn prepared() -> Host {
    let host = Host::new();
    let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    std::fs::write(host.path("tokens"), lines).unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host.ok(["data", "put", host.path("tokens").to_str().unwrap(), "--name", "tokens"]);
    host
}

fn run(host: &Host, out: &str, more: &[&str]) -> Vec<String> {
    let (sft, out) = (guest("sft"), host.path(out));
    let fixed = ["run", sft.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--seed", "7", "--out", out.to_str().unwrap()];
    fixed.iter().chain(more).map(ToString::to_string).collect()
}

fn started(host_folder: &Host, args: Vec<String>) -> Child {
    let mut command = Command::new(host());
    command.args(args).env("NODUS_DATA_DIR", host_folder.path("data"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The guest process of a host, as soon as there is one that is not among these.
fn guest_process(host: u32, but: &[u32]) -> u32 {
    let began = Instant::now();
    loop {
        if let Some(pid) = children(host, "guest").into_iter().find(|pid| !but.contains(pid)) {
            return pid;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "no guest process was started");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a job has taken a step.
fn wait_for_steps(folder: &Path) {
    let began = Instant::now();
    let find = || {
        let parent = folder.parent().unwrap();
        let name = folder.file_name().unwrap().to_str().unwrap();
        // Results are made beside their place and put there at the end.
        let entries = std::fs::read_dir(parent).unwrap().filter_map(Result::ok);
        entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains(name)).find_map(|path| losses(&path))
    };
    while find().is_none() {
        assert!(began.elapsed() < Duration::from_secs(60), "no step was taken");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A file of losses that holds some, at or below a folder.
fn losses(folder: &Path) -> Option<PathBuf> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).ok()?.filter_map(Result::ok) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.ends_with("losses.jsonl") && entry.metadata().is_ok_and(|metadata| metadata.len() > 0) {
                return Some(path);
            }
        }
    }
    None
}

fn signal(name: &str, pid: u32) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap().success());
}

/// Whether this kernel grants all that a guest process gives up; older ones do not.
fn locks_wholly(host: &Host) -> bool {
    let is_whole = host.ok(["doctor"]).contains("wholly locked down");
    if !is_whole {
        eprintln!("this kernel does not lock guests down wholly (`nodus-host doctor`): what it lacks is not looked at");
    }
    is_whole
}

#[test]
fn the_process_changes_no_byte() {
    let host = prepared();
    let whole: &[&str] = if locks_wholly(&host) { &["--require-os-sandbox"] } else { &[] };
    let more = ["--sweep", "learning_rate=0.01,0.003", "--set", "dropout=0.1", "--set", "epochs=2", "--held-out-count", "6"];
    host.ok(run(&host, "apart", &[&more[..], whole].concat()));
    host.ok(run(&host, "here", &[&more[..], &["--in-process"]].concat()));
    for member in ["learning_rate=0.003", "learning_rate=0.01"] {
        let apart = contents(&host.path("apart").join(member), &DIFFERS);
        assert!(apart.contains_key("adapter/adapter_model.safetensors"), "{:?}", apart.keys());
        assert_same(&apart, &contents(&host.path("here").join(member), &DIFFERS), member);
    }
    let replayed = host.ok(["audit", "replay", host.path("here/learning_rate=0.01").to_str().unwrap()]);
    assert!(replayed.contains("bit-identical"), "{replayed}");
}

#[test]
fn the_process_has_two_sockets_and_nothing_else() {
    let folder = prepared();
    let is_whole = locks_wholly(&folder);
    // Containers have filters of their own.
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    let own_filters: u64 = own.lines().find_map(|line| line.strip_prefix("Seccomp_filters:")).unwrap_or("0").trim().parse().unwrap();
    let child = started(&folder, run(&folder, "out", &["--set", "epochs=100000"]));
    let pid = guest_process(child.id(), &[]);
    wait_for_steps(&folder.path("out"));
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        let name = field("Name:");
        if is_whole {
            let filters = (own_filters + 3).to_string();
            assert_eq!((field("NoNewPrivs:"), field("Seccomp:"), field("Seccomp_filters:")), ("1".into(), "2".into(), filters), "{name}");
        }
        for set in ["CapInh:", "CapPrm:", "CapEff:"] {
            assert_eq!(u64::from_str_radix(&field(set), 16), Ok(0), "{name}: {set}");
        }
    }
    assert_eq!(std::fs::read(format!("/proc/{pid}/environ")).unwrap(), b"");
    assert_eq!(std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
    let mut open: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap().to_string_lossy().into_owned())
        .map(|target| target.split([':', '[']).next().unwrap().to_owned())
        .collect();
    open.sort();
    open.dedup();
    assert_eq!(open, ["anon_inode", "pipe", "socket"], "sockets, its standard error, and what its runtimes wait with");
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    for name in ["Max core file size", "Max file size", "Max locked memory"] {
        let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(line.split_whitespace().rev().skip(1).take(2).all(|value| value == "0"), "{line}");
    }
    signal("INT", child.id());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(!Path::new(&format!("/proc/{pid}")).exists(), "the guest process outlived its parent");
}

#[test]
fn a_killed_process_fails_its_jobs_and_no_others() {
    let folder = prepared();
    let job = |name: &str, epochs: &str| {
        format!(
            "[[jobs]]\nname = \"{name}\"\ncomponent = {:?}\nmodel = \"llama\"\ndata = \"tokens\"\nseed = 7\n\
             params = {{ epochs = {epochs}, learning_rate = 0.01 }}\n",
            guest("sft").to_str().unwrap()
        )
    };
    std::fs::write(folder.path("alone.toml"), job("second", "2")).unwrap();
    std::fs::write(folder.path("both.toml"), job("first", "100000") + &job("second", "2")).unwrap();
    let run = |manifest: &str, out: &str| {
        let (manifest, out) = (folder.path(manifest), folder.path(out));
        ["run", "--lane", "solo", "--manifest", manifest.to_str().unwrap(), "--out", out.to_str().unwrap()].map(String::from).to_vec()
    };
    folder.ok(run("alone.toml", "alone"));
    let child = started(&folder, run("both.toml", "both"));
    let pid = guest_process(child.id(), &[]);
    wait_for_steps(&folder.path("both"));
    signal("KILL", pid);
    let output = child.wait_with_output().unwrap();
    let told = text(&output.stderr) + &text(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{told}");
    let summary: Value = serde_json::from_slice(&std::fs::read(folder.path("both/summary.json")).unwrap()).unwrap();
    assert_eq!((&summary["jobs"][0]["status"], &summary["jobs"][1]["status"]), (&"failed".into(), &"completed".into()), "{summary}");
    assert!(
        told.contains("the job's process was killed from outside (SIGKILL), as the kernel does where the machine runs out of memory"),
        "{told}"
    );
    let (alone, second) = (folder.path("alone/second"), folder.path("both/second"));
    assert_same(&contents(&alone, &DIFFERS), &contents(&second, &DIFFERS), "the neighbour of a process that was killed");
    // All that the engine gave the killed job, it has back.
    let ledger = folder.ok(["audit", "ledger", "--json"]);
    let sums: Value = serde_json::from_str(ledger.lines().last().unwrap()).unwrap();
    let bytes = &sums["adapter_bytes"]["local"];
    assert!(bytes["allocated"].as_u64().unwrap() > 0 && bytes["allocated"] == bytes["zeroed"], "{sums}");
}

#[test]
fn members_of_a_sweep_fail_together_and_the_host_says_why() {
    let folder = prepared();
    let child = started(&folder, run(&folder, "out", &["--sweep", "learning_rate=0.01,0.003", "--set", "epochs=100000"]));
    let pid = guest_process(child.id(), &[]);
    wait_for_steps(&folder.path("out"));
    signal("ABRT", pid);
    let output = child.wait_with_output().unwrap();
    let told = text(&output.stderr) + &text(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert_eq!(told.matches("(SIGABRT)").count(), 2, "{told}");
}

#[test]
fn an_interrupt_before_any_job_started_is_heard_and_leaves_nothing() {
    let folder = prepared();
    // The component is not compiled yet, which takes longer than this.
    let child = started(&folder, run(&folder, "out", &["--set", "epochs=100000"]));
    while !folder.path(".out.partial").exists() {
        std::thread::sleep(Duration::from_millis(1));
    }
    signal("INT", child.id());
    let output = child.wait_with_output().unwrap();
    let told = text(&output.stderr) + &text(&output.stdout);
    assert_eq!(output.status.code(), Some(130), "{told}");
    assert!(told.contains("stopping before any job starts") && told.contains("cancelled: nothing was kept"), "{told}");
    assert!(!folder.path("out").exists() && !folder.path(".out.partial").exists(), "{told}");
}

#[test]
fn a_second_interrupt_ends_process_and_host() {
    let folder = prepared();
    let child = started(&folder, run(&folder, "out", &["--set", "epochs=100000"]));
    let pid = guest_process(child.id(), &[]);
    wait_for_steps(&folder.path("out"));
    signal("STOP", pid);
    signal("INT", child.id());
    std::thread::sleep(Duration::from_millis(500));
    signal("INT", child.id());
    let asked = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_guest_process_ends_with_its_parent() {
    let folder = prepared();
    let mut child = started(&folder, run(&folder, "out", &["--set", "epochs=100000"]));
    let pid = guest_process(child.id(), &[]);
    wait_for_steps(&folder.path("out"));
    child.kill().unwrap();
    child.wait().unwrap();
    let began = Instant::now();
    while Path::new(&format!("/proc/{pid}")).exists() {
        assert!(began.elapsed() < Duration::from_secs(20), "it is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn compiled_code_that_somebody_changed_is_not_run() {
    let folder = prepared();
    folder.ok(run(&folder, "first", &[]));
    let compiled = || {
        let entries = std::fs::read_dir(folder.path("data/compiled")).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.file_name().unwrap() != "seal.key").collect::<Vec<_>>()
    };
    let [path] = compiled().try_into().unwrap();
    let good = std::fs::read(&path).unwrap();
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    std::fs::write(&path, &bad).unwrap();
    let second = folder.call(run(&folder, "second", &[]));
    assert!(second.status.success() && text(&second.stderr).contains("compiled again"), "{}", text(&second.stderr));
    assert_ne!(std::fs::read(&path).unwrap(), bad, "it was put right");
    assert_eq!(compiled().len(), 1);
    assert_same(&contents(&folder.path("first"), &DIFFERS), &contents(&folder.path("second"), &DIFFERS), "after a change on the disk");
    let key = folder.path("data/compiled/seal.key");
    let mode = |mode| std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&key).unwrap().permissions()) & 0o777, 0o600);
    mode(0o644);
    assert!(folder.refused(1, run(&folder, "third", &[])).contains("expected 600"));
    mode(0o600);
}

#[test]
fn limits_are_the_operators_to_set() {
    let folder = prepared();
    let refused = folder.refused(2, run(&folder, "out", &["--limit", "adapters=0"]));
    assert!(refused.contains("adapters"), "{refused}");
    let refused = folder.refused(2, run(&folder, "out", &["--limit", "component-functions=1"]));
    assert!(refused.contains("component-functions, expected at most 1"), "{refused}");
    let refused = folder.refused(2, run(&folder, "out", &["--limit", "compile-memory-bytes=1000000"]));
    assert!(refused.contains("the process that compiles it"), "{refused}");
    folder.ok(run(&folder, "out", &["--limit", "adapters=3"]));
    let receipt = nodus_tests::statement(&std::fs::read(folder.path("out/receipt.json")).unwrap());
    assert_eq!(receipt["predicate"]["limits"]["adapters"], 3);
}

/// 35: several hosts compile the same component at once, in one new folder.
#[test]
fn hosts_that_compile_the_same_component_at_once_do_not_disturb_each_other() {
    let folder = prepared();
    let outs = ["first", "second", "third"];
    let children = outs.map(|out| started(&folder, run(&folder, out, &[])));
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && !text(&output.stderr).contains("warn"), "{}", text(&output.stderr));
    }
    for out in outs {
        assert_same(&contents(&folder.path("first"), &DIFFERS), &contents(&folder.path(out), &DIFFERS), out);
    }
    assert_eq!(std::fs::read_dir(folder.path("data/compiled")).unwrap().count(), 2, "the key and one component");
}

#[test]
fn a_process_that_hangs_is_ended() {
    let folder = prepared();
    let child = started(&folder, run(&folder, "out", &["--set", "epochs=100000", "--guest-silence-ms", "1000"]));
    let pid = guest_process(child.id(), &[]);
    wait_for_steps(&folder.path("out"));
    signal("STOP", pid);
    let stopped = Instant::now();
    let output = child.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("the job's process gave no sign of life for 1000 ms and was ended"), "{told}");
    assert!(stopped.elapsed() < Duration::from_secs(30), "{:?}", stopped.elapsed());
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    let entry: Value =
        serde_json::from_str(folder.ok(["audit", "ledger", "--json", "--kind", "job_failed"]).lines().next().unwrap()).unwrap();
    assert_eq!(entry["code"], "guest-process");
}

/// The compiler is locked down wholly, guests would not be: known only when all is ready, and still the user's to put right.
#[test]
fn locks_that_are_missing_late_are_refused_as_those_that_are_missing_early() {
    let folder = prepared();
    if !locks_wholly(&folder) {
        return;
    }
    let mut shell = Command::new("sh");
    // More CPU time than a compiler is given, less than guests are.
    shell.args(["-c", "ulimit -t 1000; exec \"$@\"", "sh"]).arg(host()).args(run(&folder, "out", &["--require-os-sandbox"]));
    let output = shell.env("NODUS_DATA_DIR", folder.path("data")).output().unwrap();
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("--require-os-sandbox: the kernel does not lock guests down wholly: a limit on Cpu"), "{told}");
    assert!(!folder.path("out").exists());
    let ledger = folder.ok(["audit", "ledger", "--kind", "job_failed"]);
    assert!(ledger.contains("os-sandbox"), "{ledger}");
}
