//! A thousand short jobs, one after another in one guest process: it holds as much memory after the last as after the first hundred.
#![cfg(target_os = "linux")]
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nodus_tests::{Host, children, golden, host as binary, text, told_guest};

const JOBS: usize = 1000;

/// Resident memory of a process; none once it has ended.
fn resident_kib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find(|line| line.starts_with("VmRSS:"))?.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn a_thousand_jobs_leave_as_much_memory_as_a_hundred() {
    let host = Host::new();
    std::fs::write(host.path("tokens"), "{\"tokens\":[1,2,3]}\n{\"tokens\":[4,5,6]}\n").unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host.ok(["data", "put", host.path("tokens").to_str().unwrap(), "--name", "tokens"]);
    let guest = told_guest();
    let job = |number: usize| {
        format!(
            "[[jobs]]\nname = \"{number}\"\ncomponent = {guest:?}\nmodel = \"llama\"\ndata = \"tokens\"\nparams = {{ do = \"train 1\" }}\n"
        )
    };
    std::fs::write(host.path("jobs.toml"), (0..JOBS).map(job).collect::<String>()).unwrap();
    let (manifest, out) = (host.path("jobs.toml"), host.path("out"));
    let mut command = Command::new(binary());
    command.args(["run", "--manifest", manifest.to_str().unwrap(), "--out", out.to_str().unwrap(), "--jobs", "1", "--device", "cpu"]);
    command.env("NODUS_DATA_DIR", host.path("data")).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    // Results are made beside their place; a job that has begun has its files filled.
    let has_begun = |number: usize| {
        let losses = host.path(".out.partial").join(number.to_string()).join("losses.jsonl");
        std::fs::metadata(losses).is_ok_and(|metadata| metadata.len() > 0)
    };
    let began = Instant::now();
    let held = [100, JOBS - 10].map(|number| {
        while !has_begun(number) {
            assert!(began.elapsed() < Duration::from_secs(600), "job {number} has not begun");
            std::thread::sleep(Duration::from_millis(2));
        }
        let guests = children(child.id(), "guest");
        resident_kib(*guests.first().unwrap()).unwrap()
    });
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    eprintln!("resident memory of the guest process, KiB: {held:?}; {JOBS} jobs in {:?}", began.elapsed());
    let [first, last] = held;
    assert!(last * 100 <= first * 105, "{held:?}");
}
