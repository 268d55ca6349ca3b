//! After all attacks, one after another in one guest process, host and process hold what they held before.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nodus_tests::{children, host as binary, text};

use crate::guests::{component, run_and_fail};
use crate::{assert_device_is_empty, failures, job, prepared, sft};

/// What a process holds.
#[derive(Debug)]
struct Held {
    resident_kib: u64,
    descriptors: usize,
}

impl Held {
    fn by(pid: u32) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let resident = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        // Of a process that is not dumpable, root alone is told; it may have 64.
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        Self { resident_kib: resident.split_whitespace().nth(1).unwrap().parse().unwrap(), descriptors }
    }
}

/// Waits until a job, whose results are made beside their place, has taken this many steps.
fn wait_for_steps(folder: &Path, job: &str, steps: usize) {
    let began = Instant::now();
    let losses = folder.join(".out.partial").join(job).join("losses.jsonl");
    while std::fs::read_to_string(&losses).map_or(0, |text| text.lines().count()) < steps {
        assert!(began.elapsed() < Duration::from_secs(300), "`{job}` has taken too few steps");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn nothing_is_left_of_any_attack() {
    let host = prepared();
    let attacks = run_and_fail();
    let round = |round: u32| attacks.iter().map(|(name, ..)| job(&host, &format!("{name}-{round}"), name)).collect::<String>();
    for (name, source, ..) in &attacks {
        std::fs::write(host.path(name), component((name, source))).unwrap();
    }
    // The first round for what is made once and kept: arenas, machine code.
    std::fs::write(host.path("jobs.toml"), round(1) + &sft(&host, "before", 40) + &round(2) + &sft(&host, "after", 40)).unwrap();
    let (manifest, out) = (host.path("jobs.toml"), host.path("out"));
    let mut command = Command::new(binary());
    command.args(["run", "--manifest", manifest.to_str().unwrap(), "--out", out.to_str().unwrap(), "--jobs", "1"]);
    command.args(["--limit", "cpu-stretch-ms=200"]).env("NODUS_DATA_DIR", host.path("data"));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let held = ["before", "after"].map(|job| {
        wait_for_steps(host.dir.path(), job, 20);
        let [guests] = children(child.id(), "guest").try_into().unwrap();
        [child.id(), guests].map(Held::by)
    });
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert_eq!(failures(&host).len(), 2 * attacks.len());
    assert_device_is_empty(&host);
    let [before, after] = &held;
    for (before, after) in before.iter().zip(after) {
        assert_eq!(before.descriptors, after.descriptors, "{held:?}");
        assert!(after.resident_kib * 100 <= before.resident_kib * 105, "{held:?}");
    }
}
