//! Attacks by what runs, all at once, beside a neighbour.

use std::fmt::Write as _;

use nodus_tests::{assert_same, contents, text};
use serde_json::Value;

use crate::guests::{component, run_and_fail};
use crate::{COMPANY, assert_device_is_empty, entries, failures, job, prepared, sft};

#[test]
fn each_fails_by_its_own_fault_and_the_neighbour_is_as_alone() {
    let host = prepared();
    let neighbour = sft(&host, "neighbour", 3);
    let mut all = neighbour.clone();
    for (name, source, ..) in run_and_fail() {
        std::fs::write(host.path(name), component((name, source))).unwrap();
        all += &job(&host, name, name);
    }
    std::fs::write(host.path("alone.toml"), neighbour).unwrap();
    std::fs::write(host.path("all.toml"), all).unwrap();
    let run = |manifest: &str, out: &str| {
        let (manifest, out) = (host.path(manifest), host.path(out));
        let fixed = ["run", "--manifest", manifest.to_str().unwrap(), "--out", out.to_str().unwrap()];
        // So that a guest that spins is soon found.
        host.call(fixed.iter().chain(&["--limit", "cpu-stretch-ms=1000"]))
    };
    assert!(run("alone.toml", "alone").status.success());
    let output = run("all.toml", "all");
    let told = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(!told.contains('\u{1b}') && !told.contains("\nerror: forged"), "an escape or a forged line reached the terminal: {told:?}");

    let summary: Value = serde_json::from_slice(&std::fs::read(host.path("all/summary.json")).unwrap()).unwrap();
    let jobs = summary["jobs"].as_array().unwrap();
    let mut faults = String::new();
    for (name, _, _, expected) in run_and_fail() {
        let row = jobs.iter().find(|row| row["name"] == name).unwrap();
        let reason = row["reason"].as_str().unwrap_or_default();
        // Where the component names its functions, they follow.
        if row["status"] != "failed" || reason.split(" (in ").next() != Some(expected) {
            writeln!(faults, "{name}: {} {reason:?}, expected {expected:?}", row["status"]).unwrap();
        }
        assert!(!reason.contains('/') || reason.contains("pointer/length"), "{name}: a path? {reason}");
        assert!(!host.path("all").join(name).exists(), "{name} left something");
    }
    assert!(faults.is_empty(), "{faults}");
    assert_same(&contents(&host.path("alone/neighbour"), &COMPANY), &contents(&host.path("all/neighbour"), &COMPANY), "the neighbour");

    // One line for each: of those that failed a code, of the neighbour (the first of both runs) a receipt.
    let codes: Vec<(usize, String)> =
        run_and_fail().iter().zip(1..).map(|((_, _, code, _), number)| (number, (*code).to_owned())).collect();
    assert_eq!(failures(&host), codes);
    assert_eq!(entries(&host, "receipt").len(), 2);
    assert_device_is_empty(&host);
}
