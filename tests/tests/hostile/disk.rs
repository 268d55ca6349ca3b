//! A full disk: the host's trouble, told as such, and the neighbour's results are as alone.

use std::process::Command;

use nodus_tests::{assert_same, contents, host as binary, text};
use serde_json::Value;

use crate::guests::{FULL_DISK, component};
use crate::{COMPANY, assert_device_is_empty, entries, failures, job, prepared, sft};

/// No file of the host grows beyond so many blocks of 512 bytes: writing more is an error, as on a full disk.
const BLOCKS: &str = "2048";

#[test]
fn a_full_disk_is_the_hosts_failure_and_nobody_elses() {
    let host = prepared();
    let (name, _) = FULL_DISK;
    std::fs::write(host.path(name), component(FULL_DISK)).unwrap();
    std::fs::write(host.path("alone.toml"), sft(&host, "neighbour", 3)).unwrap();
    std::fs::write(host.path("both.toml"), sft(&host, "neighbour", 3) + &job(&host, name, name)).unwrap();
    let run = |manifest: &str, out: &str, before: &str| {
        let (manifest, out) = (host.path(manifest), host.path(out));
        let script = format!("{before} exec \"$@\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh"]).arg(binary()).args([
            "run",
            "--manifest",
            manifest.to_str().unwrap(),
            "--out",
            out.to_str().unwrap(),
        ]);
        shell.env("NODUS_DATA_DIR", host.path("data")).output().unwrap()
    };
    // There is room for it: it ends well.
    assert!(run("alone.toml", "alone", "").status.success());
    let room = run("both.toml", "room", "");
    assert!(room.status.success(), "{}", text(&room.stderr));
    let output = run("both.toml", "full", &format!("trap '' XFSZ; ulimit -f {BLOCKS};"));
    let told = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let summary: Value = serde_json::from_slice(&std::fs::read(host.path("full/summary.json")).unwrap()).unwrap();
    assert_eq!(summary["jobs"][1]["status"], "failed by the host", "{summary}");
    assert!(
        summary["jobs"][1]["reason"].as_str().unwrap().contains("the job's results could not be written: writing log.txt"),
        "{summary}"
    );
    assert!(!host.path("full").join(name).exists(), "results that nobody signed");
    for together in ["room/neighbour", "full/neighbour"] {
        assert_same(&contents(&host.path("alone/neighbour"), &COMPANY), &contents(&host.path(together), &COMPANY), together);
    }
    assert_eq!(failures(&host), [(1, "internal".to_owned())]);
    assert_eq!(entries(&host, "receipt").len(), 4);
    assert_device_is_empty(&host);
}
