//! A run that is interrupted goes on where it was: its results are those of one that nothing interrupted.
#![cfg(target_os = "linux")]
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nodus_tests::{Host, assert_same, children, contents, golden, guest, host, text, token_lines};

/// Of a receipt, what two equal runs differ in.
const DIFFERS: [&str; 2] = ["times", "previous_receipt"];
/// A sweep of two members that share passes, with random numbers and evaluations.
const SWEEP: [&str; 10] = [
    "--sweep",
    "learning_rate=0.01,0.003",
    "--set",
    "dropout=0.1",
    "--set",
    "steps=600",
    "--set",
    "evaluate_every=100",
    "--held-out-count",
    "6",
];

/// A data folder with the tiny Llama as `llama` and the reference tokens as `tokens`.
fn prepared() -> Host {
    let host = Host::new();
    let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    std::fs::write(host.path("tokens.jsonl"), &lines).unwrap();
    std::fs::write(host.path("fewer.jsonl"), lines.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    for name in ["tokens", "fewer"] {
        host.ok(["data", "put", host.path(&format!("{name}.jsonl")).to_str().unwrap(), "--name", name]);
    }
    host
}

fn command(of: &Host, out: &str, more: &[&str]) -> Command {
    let mut command = Command::new(host());
    command.args(["run", guest("sft").to_str().unwrap(), "--model", "llama", "--data", "tokens", "--seed", "7", "--device", "cpu"]);
    command.args(["--snapshot-every", "0.2", "--out", of.path(out).to_str().unwrap()]).args(more);
    command.env("NODUS_DATA_DIR", of.path("data")).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Runs to the end; what was said on the way.
fn run(of: &Host, out: &str, more: &[&str]) -> String {
    let output = command(of, out, more).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stderr)
}

/// Lines of a file that is being written.
fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

/// A run that has taken so many steps.
fn run_to(of: &Host, (out, member): (&str, &str), steps: usize, more: &[&str]) -> Child {
    let mut child = command(of, out, more).stderr(Stdio::null()).spawn().unwrap();
    wait_for(of, (out, member), steps, &mut child);
    child
}

/// Waits until it has.
fn wait_for(of: &Host, (out, member): (&str, &str), steps: usize, child: &mut Child) {
    let losses = of.path(&format!(".{out}.partial")).join(member).join("losses.jsonl");
    let began = Instant::now();
    while lines(&losses) < steps {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it had taken {steps} steps");
        assert!(began.elapsed() < Duration::from_secs(180), "{steps} steps take too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_run_killed_at_three_points_goes_on_to_the_same_bytes() {
    let host = prepared();
    run(&host, "whole", &SWEEP);
    let mut resume: &[&str] = &[];
    for steps in [1, 170, 431] {
        let mut child = run_to(&host, ("out", "learning_rate=0.01"), steps, &[&SWEEP[..], resume].concat());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!host.path("out").exists());
        resume = &["--resume"];
    }
    let said = run(&host, "out", &[&SWEEP[..], resume].concat());
    for member in ["learning_rate=0.01", "learning_rate=0.003"] {
        let differs = |dir: &str| contents(&host.path(dir).join(member), &DIFFERS);
        assert_same(&differs("whole"), &differs("out"), member);
        host.ok(["audit", "verify", host.path("out").join(member).to_str().unwrap()]);
        let line =
            said.lines().find(|line| line.contains(&format!("{member}: went on where it was cut off"))).unwrap_or_else(|| panic!("{said}"));
        assert!(!line.contains(": 0 calls"), "{line}");
    }
    assert!(!host.path(".out.journal").exists() && !host.path(".whole.journal").exists(), "what ended needs no journal");
    let error = text(&command(&host, "other", &["--resume"]).output().unwrap().stderr);
    assert!(error.contains("there is no interrupted run to go on with"), "{error}");
}

#[test]
fn what_a_second_interrupt_cut_off_goes_on_as_if_nobody_had_asked_it_to_stop() {
    let host = prepared();
    let job = &SWEEP[2..];
    run(&host, "whole", job);
    let mut child = run_to(&host, ("out", ""), 40, job);
    // Its guest does not hear of the first before the second.
    let guests = children(child.id(), "guest");
    assert!(Command::new("kill").args(["-STOP", &guests[0].to_string()]).status().unwrap().success());
    signal(&child, "INT");
    std::thread::sleep(Duration::from_millis(200));
    signal(&child, "INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(lines(&host.path("out/losses.jsonl")) >= 40 && !host.path("out/receipt.json").exists());
    // What there was stays where it is until there is more, and takes the place of nothing.
    let part = contents(&host.path("out"), &[]);
    let refused = command(&host, "out", &[job, &["--resume", "--set", "rank=3"]].concat()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
    assert_same(&part, &contents(&host.path("out"), &[]), "refused");
    std::fs::create_dir(host.path(".out.killed")).unwrap();
    std::fs::write(host.path(".out.killed/other"), "x").unwrap();
    // As where it had heard of it, when it had made so many calls, and was cut off at what it does then.
    std::fs::write(host.path(".out.journal/stop-0"), "21").unwrap();
    let said = run(&host, "out", &[job, &["--resume"]].concat());
    assert!(!said.contains("asked to stop"), "{said}");
    let line = said.lines().find(|line| line.contains("went on where it was cut off")).unwrap();
    // The first three of the 21 calls are no steps; where a snapshot had been made by then, some of them are answered and not made again.
    let number = |after: &str| line.split(after).nth(1).unwrap().trim_start().split(' ').next().unwrap().parse::<u64>().unwrap();
    let (answered, steps) = (number("cut off:"), number("journal,"));
    assert_eq!(steps, 21_u64.saturating_sub(answered.max(3)), "21 calls are held against what comes now: {line}");
    assert_same(&contents(&host.path("whole"), &DIFFERS), &contents(&host.path("out"), &DIFFERS), "cut off");
    assert_same(&part, &contents(&host.path(".out.killed-2"), &[]), "set aside");
    assert_eq!(std::fs::read_to_string(host.path(".out.killed/other")).unwrap(), "x");
    assert!(!host.path(".out.journal").exists());
}

#[test]
fn what_is_not_as_it_was_is_named() {
    let host = prepared();
    let job = &SWEEP[2..];
    let mut child = run_to(&host, ("out", ""), 60, job);
    child.kill().unwrap();
    child.wait().unwrap();
    let refused = |more: &[&str], what: &str| {
        let output = command(&host, "out", &[job, more, &["--resume"]].concat()).output().unwrap();
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(what) && error.contains("--resume"), "{what}: {error}");
    };
    refused(&["--set", "rank=3"], "parameter `rank` was not given when the run began, and is 3 now");
    refused(&["--limit", "log-bytes=4096"], "limit `log-bytes` was");
    refused(&["--sweep", "learning_rate=0.1,0.2"], "the number of jobs was 1 when the run began, and is 2 now");
    let changed = |from: &str, to: &str, what: &str| {
        let args: Vec<String> = command(&host, "out", &[job, &["--resume"]].concat())
            .get_args()
            .map(|arg| if arg == from { to.to_owned() } else { arg.to_str().unwrap().to_owned() })
            .collect();
        let error = host.refused(2, args);
        assert!(error.contains(what), "{what}: {error}");
    };
    changed("tokens", "fewer", "data was");
    changed("7", "8", "seed was 7 when the run began, and is 8 now");
    changed(guest("sft").to_str().unwrap(), guest("eval").to_str().unwrap(), "component was");
    host.ok(["model", "import", golden("models/qwen2").to_str().unwrap(), "--name", "qwen"]);
    changed("llama", "qwen", "model was");
    let place = host.path(".out.journal/run.json");
    let kept = std::fs::read_to_string(&place).unwrap();
    // Another version's may lack what this one needs.
    std::fs::write(&place, kept.replacen(env!("CARGO_PKG_VERSION"), "0.0.1", 1).replacen(r#""account""#, r#""other""#, 1)).unwrap();
    refused(&[], "the version of nodus-host was \"0.0.1");
    std::fs::write(&place, &kept).unwrap();
    let replies = host.path(".out.journal/journals/0/replies");
    let whole = std::fs::read(&replies).unwrap();
    std::fs::write(&replies, [&[7; 32], &whole[32..]].concat()).unwrap();
    refused(&[], "another device class");
    std::fs::write(&replies, whole).unwrap();
    // Another job's journal: such a job does otherwise every time.
    std::fs::write(&place, kept.replacen(r#""dropout":0.1"#, r#""dropout":0.2"#, 1)).unwrap();
    let other = [job, &["--resume"]].concat().into_iter().map(|arg| if arg == "dropout=0.1" { "dropout=0.2" } else { arg });
    let output = command(&host, "out", &other.collect::<Vec<_>>()).output().unwrap();
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("must be run anew") && !error.contains("`--resume` goes on"), "{error}");
    std::fs::write(&place, kept).unwrap();
    let said = run(&host, "out", &[job, &["--resume"]].concat());
    assert!(said.contains("went on where it was cut off"), "{said}");
}

#[test]
fn a_journal_that_is_taken_away_costs_no_result_and_no_stop() {
    let host = prepared();
    let (first, second) = ("learning_rate=0.01", "learning_rate=0.003");
    let sweep = [&SWEEP[..], &["--jobs", "1"]].concat();
    let asked = |out: &str, times: u32| {
        let mut child = command(&host, out, &sweep).stdout(Stdio::null()).spawn().unwrap();
        wait_for(&host, (out, second), 20, &mut child);
        std::fs::remove_dir_all(host.path(&format!(".{out}.journal"))).unwrap();
        if times > 1 {
            // Its guest does not hear of the first before the second.
            let guests = children(child.id(), "guest");
            assert!(Command::new("kill").args(["-STOP", &guests[0].to_string()]).status().unwrap().success());
        }
        for _ in 0..times {
            signal(&child, "INT");
            std::thread::sleep(Duration::from_millis(200));
        }
        let output = child.wait_with_output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{said}");
        assert!(!said.contains("`--resume` goes on"), "{said}");
        host.ok(["audit", "verify", host.path(out).join(first).to_str().unwrap()]);
        said
    };
    let said = asked("cut", 2);
    assert!(said.contains("it must be run anew"), "{said}");
    assert!(lines(&host.path("cut").join(second).join("losses.jsonl")) >= 20);
    let said = asked("stopped", 1);
    assert!(said.contains("its stop cannot be noted"), "{said}");
    host.ok(["audit", "verify", host.path("stopped").join(second).to_str().unwrap()]);
}

#[test]
fn a_run_that_begins_anew_keeps_the_journal_of_the_interrupted_one() {
    let host = prepared();
    let mut child = run_to(&host, ("out", ""), 60, &SWEEP[2..]);
    child.kill().unwrap();
    child.wait().unwrap();
    let journal = contents(&host.path(".out.journal"), &[]);
    let said = run(&host, "out", &["--set", "steps=2"]);
    assert!(said.contains(".out.journal.killed"), "{said}");
    assert_same(&journal, &contents(&host.path(".out.journal.killed"), &[]), "set aside");
    assert!(!host.path(".out.journal").exists());
}

/// The same, where it had sealed receipts: nobody goes on with it, and they are settled.
#[test]
fn a_run_that_begins_anew_settles_the_receipts_of_the_interrupted_one() {
    let host = prepared();
    let (_, sweep) = rates();
    let job = ["--sweep", &sweep, "--set", "steps=2"];
    let out = killed_between(&host, |out| command(&host, out, &job).stderr(Stdio::null()).spawn().unwrap());
    let unsettled = || std::fs::read_dir(host.path("data/sealed")).unwrap().count();
    assert!(unsettled() > 0);
    run(&host, out, &["--set", "steps=2"]);
    assert_eq!(unsettled(), 0);
    assert!(host.path(&format!(".{out}.journal.killed")).exists());
}

/// Receipts of the ledger: each job's, in order.
fn receipts(of: &Host) -> Vec<(String, String)> {
    let ledger = std::fs::read_to_string(of.path("data/ledger.jsonl")).unwrap_or_default();
    let (whole, _) = ledger.rsplit_once('\n').unwrap_or_default();
    let entries = whole.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let text = |entry: &serde_json::Value, field: &str| entry[field].as_str().unwrap().to_owned();
    entries.filter(|entry| entry["kind"] == "receipt").map(|entry| (text(&entry, "job"), text(&entry, "receipt"))).collect()
}

/// Kills a run after the first of its receipts was sealed and before its results are in their place; which place.
fn killed_between(of: &Host, start: impl Fn(&str) -> Child) -> &'static str {
    let is_killed = |out: &&str| {
        let before = receipts(of).len();
        let mut child = start(out);
        while receipts(of).len() == before {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it had sealed a receipt");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        !of.path(out).exists()
    };
    ["a", "b", "c", "d", "e"].into_iter().find(is_killed).unwrap_or_else(|| panic!("it is always in its place before it can be killed"))
}

/// A sweep of so many members that their receipts take a while.
fn rates() -> (Vec<String>, String) {
    let rates: Vec<String> = (11..=26).map(|number| format!("0.0{number}1")).collect();
    let sweep = format!("learning_rate={}", rates.join(","));
    (rates, sweep)
}

/// Killed after the first of its receipts was sealed and before its results are in their place: the ledger has no second line of any.
#[test]
fn a_run_killed_between_its_receipts_and_its_place_has_each_in_the_ledger_once() {
    let host = prepared();
    let (rates, sweep) = rates();
    let job = ["--sweep", &sweep, "--set", "steps=2"];
    let out = killed_between(&host, |out| command(&host, out, &job).stderr(Stdio::null()).spawn().unwrap());
    let sealed = receipts(&host);
    let said = run(&host, out, &[&job[..], &["--resume"]].concat());
    assert_eq!(said.matches("went on where it was cut off").count(), rates.len(), "{said}");
    let all = receipts(&host);
    assert!(all.starts_with(&sealed));
    let jobs: std::collections::BTreeSet<&String> = all.iter().map(|(job, _)| job).collect();
    // Of the runs that were in their place too early all.
    let runs = usize::from(out.as_bytes()[0] - b'a') + 1;
    assert_eq!((jobs.len(), all.len()), (runs * rates.len(), runs * rates.len()), "one line of each: {all:?}");
    for rate in &rates {
        let member = host.path(out).join(format!("learning_rate={rate}"));
        host.ok(["audit", "verify", member.to_str().unwrap()]);
    }
    assert_eq!(std::fs::read_dir(host.path("data/sealed")).unwrap().count(), 0, "what is in its place is settled");
}

/// The same of a run that was asked to stop: gone on with, it is as if nobody had asked, and its receipts are of what it comes to then.
#[test]
fn a_stopped_run_killed_after_its_receipts_has_others_of_what_it_comes_to() {
    let host = prepared();
    let (rates, sweep) = rates();
    let job = ["--sweep", &sweep, "--set", "steps=200"];
    let out = killed_between(&host, |out| {
        let child = run_to(&host, (out, &format!("learning_rate={}", rates[0])), 20, &job);
        signal(&child, "INT");
        child
    });
    let sealed = receipts(&host);
    // As where the stop of the first could not be noted: its journal is gone, and it begins anew.
    std::fs::remove_file(host.path(&format!(".{out}.journal/stop-0"))).unwrap();
    std::fs::remove_dir_all(host.path(&format!(".{out}.journal/journals/0"))).unwrap();
    let said = run(&host, out, &[&job[..], &["--resume"]].concat());
    assert!(!said.contains("asked to stop"), "{said}");
    let all = receipts(&host);
    let of_this = sealed.iter().filter(|(job, _)| all.iter().filter(|(other, _)| other == job).count() == 2).count();
    assert!(all.starts_with(&sealed) && of_this > 0 && all.len() == sealed.len() + rates.len(), "{all:?}");
    for rate in &rates {
        let member = host.path(out).join(format!("learning_rate={rate}"));
        assert_eq!(lines(&member.join("losses.jsonl")), 200);
        host.ok(["audit", "verify", member.to_str().unwrap()]);
    }
}

/// Removes a folder that somebody still writes to: a file that is made while it is emptied leaves it standing, and it is emptied again.
fn take_away(folder: &std::path::Path) {
    while let Err(error) = std::fs::remove_dir_all(folder) {
        match error.kind() {
            std::io::ErrorKind::DirectoryNotEmpty => {}
            std::io::ErrorKind::NotFound => return,
            _ => panic!("{}: {error}", folder.display()),
        }
    }
}

#[test]
fn a_journal_that_is_taken_away_before_a_member_starts_costs_it_nothing() {
    let host = prepared();
    let sweep = [&SWEEP[..], &["--jobs", "1"]].concat();
    let mut child = command(&host, "out", &sweep).spawn().unwrap();
    wait_for(&host, ("out", "learning_rate=0.01"), 20, &mut child);
    take_away(&host.path(".out.journal"));
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("learning_rate=0.003: what was kept of the run was taken away: the job begins anew, and is not kept"), "{said}");
    for member in ["learning_rate=0.01", "learning_rate=0.003"] {
        host.ok(["audit", "verify", host.path("out").join(member).to_str().unwrap()]);
    }
}

#[test]
fn room_for_journals_that_keeps_nothing_is_refused() {
    let host = prepared();
    let refused = command(&host, "out", &["--journal-bytes", "1000"]).output().unwrap();
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("--journal-bytes") && said.contains("expected at least 1MiB, such as 64GiB"), "{said}");
}
