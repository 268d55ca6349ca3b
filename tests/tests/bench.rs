//! `bench` from outside, on a tiny model and the CPU: every arm, its check, its files.
//!
//! Asserts no time: those are the machine's.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use nodus_tests::{Host, golden};
use serde_json::Value;

fn prepared() -> Host {
    let host = Host::new();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "tiny", "--no-tokenizer"]);
    host
}

fn args(host: &Host, kind: &str, out: &str, more: &[&str]) -> Vec<String> {
    let out = host.path(out);
    let fixed = ["bench", kind, "--model", "tiny", "--shape", "2x12", "--batches", "2", "--warmup", "2", "--rank", "4", "--device", "cpu"];
    fixed.iter().chain(more).chain(&["--out", out.to_str().unwrap()]).map(|word| (*word).to_owned()).collect()
}

/// The whole file.
fn file(host: &Host, out: &str) -> Value {
    serde_json::from_slice(&std::fs::read(host.path(out).join("report.json")).unwrap()).unwrap()
}

/// Its only measurement.
fn report(host: &Host, out: &str) -> Value {
    let file = file(host, out);
    let [one] = file.get("measurements").and_then(Value::as_array).unwrap().as_slice() else { panic!("one measurement expected: {file}") };
    one.clone()
}

fn write(path: &std::path::Path, measurement: &Value) {
    let file = serde_json::json!({"format": "nodus-bench-2", "measurements": [measurement]});
    std::fs::write(path, serde_json::to_vec(&file).unwrap()).unwrap();
}

#[test]
fn every_arm_of_a_sweep_is_bit_equal_to_the_dedicated_one() {
    let host = prepared();
    let told = host.ok(args(&host, "sweep", "out", &["--jobs", "3", "--epochs", "2", "--layers", "last:1", "--labelled", "0.5"]));
    assert!(told.contains("equal (3 of 3)") && !told.contains("FAILED"), "{told}");
    let report = report(&host, "out");
    let rows = report["rows"].as_array().unwrap();
    let arms: Vec<&str> = rows.iter().map(|row| row["arm"].as_str().unwrap()).collect();
    assert_eq!(arms, ["dedicated", "dedicated-cache", "stock-mps", "mps100", "packed", "fused", "fused-cache"]);
    for row in rows {
        // Two steps of warm-up, two epochs of two batches.
        assert!(row["jobs"].as_array().unwrap().iter().all(|job| job["loss_bits"].as_array().unwrap().len() == 6), "{row}");
        assert_eq!(row["audit"], "not audited");
        assert!(row["ratio"].as_f64().is_some() && row["sm_activity"].is_null(), "{row}");
    }
    // Of three members' batches the trunk was computed for one, and with the cache in one of two epochs.
    let (packed, fused, cached) = (&rows[4]["sharing"], &rows[5]["sharing"], &rows[6]["sharing"]);
    assert_eq!(packed["row_halves_shared"], 0, "{packed}");
    assert!(fused["row_halves_shared"].as_u64().unwrap() > 0 && fused["trunk_cache_hits"] == 0, "{fused}");
    assert!(cached["trunk_cache_hits"].as_u64().unwrap() > 0, "{cached}");
    // Members differ from each other, or equality would prove nothing.
    let jobs = rows[0]["jobs"].as_array().unwrap();
    assert_ne!(jobs[0]["adapter"], jobs[1]["adapter"]);
    let kept = std::fs::read_dir(host.path("out/adapters")).unwrap().count();
    assert_eq!(kept, 3, "equal adapters of all arms are one file");
    let command = report["command"].as_str().unwrap();
    assert!(
        command.contains("bench sweep --model tiny --layers last:1 --jobs 3 --shape 2x12 --labelled 0.5 --batches 2 --epochs 2"),
        "{command}"
    );
    let page = std::fs::read_to_string(host.path("out/report.html")).unwrap();
    assert!(page.contains("<svg") && !page.contains("http") && !page.contains("<script"), "{page}");
    assert!(!host.path("out/.mps").exists());
}

#[test]
fn tenants_have_their_own_data_seed_and_rank() {
    let host = prepared();
    let arms = ["--jobs", "2", "--layers", "all", "--arms", "packed,fused"];
    let told = host.ok(args(&host, "tenants", "out", &arms));
    assert!(told.matches("equal (2 of 2)").count() == 2 && told.contains("the reference"), "{told}");
    let setting = &report(&host, "out")["setting"];
    assert_eq!(setting["ranks"], serde_json::json!([4, 2]));
    assert_ne!(setting["data_digests"][0], setting["data_digests"][1]);
    let refused = host.refused(2, args(&host, "tenants", "out", &arms));
    assert!(refused.contains("exists and is not empty"), "{refused}");
    let refused = host.refused(2, args(&host, "peer", "other", &["--python", "/no/python"]));
    assert!(refused.contains("does not have torch, transformers and peft"), "{refused}");
    let refused = host.refused(2, args(&host, "sweep", "other", &["--arms", "torch-eager"]));
    assert!(refused.contains("`bench peer`"), "{refused}");
    let refused = host.refused(2, args(&host, "tenants", "other", &["--arms", "fused-cache"]));
    assert!(refused.contains("give --epochs 2"), "{refused}");
}

#[test]
fn reports_are_compared_and_a_slower_one_is_named() {
    let host = prepared();
    host.ok(args(&host, "sweep", "out", &["--jobs", "2", "--layers", "last:1", "--arms", "fused"]));
    let a = host.path("out/report.json");
    let mut slower = report(&host, "out");
    let rate = slower["rows"][1]["steady_rate"].as_f64().unwrap();
    slower["rows"][1]["steady_rate"] = (rate / 2.0).into();
    let b = host.path("slower.json");
    write(&b, &slower);
    let (a, b) = (a.to_str().unwrap(), b.to_str().unwrap());
    host.ok(["bench", "compare", a, a]);
    // Two files are all that it needs.
    let elsewhere = host.path("no data here");
    host.ok(["--data-dir", elsewhere.to_str().unwrap(), "bench", "compare", a, a]);
    assert!(!elsewhere.exists());
    let refused = host.refused(2, ["bench", "compare", a, b]);
    assert!(refused.contains("slower by more than 5 %: fused"), "{refused}");
    host.ok(["bench", "compare", b, a]);
    // Work that was measured twice: the first is held against the first, the second against the second.
    let twice = host.path("twice");
    host.ok(["bench", "merge", a, b, "--out", twice.to_str().unwrap()]);
    let twice = twice.join("report.json");
    let told = host.ok(["bench", "compare", twice.to_str().unwrap(), twice.to_str().unwrap()]);
    assert_eq!(told.matches("+0.0 %").count(), 4, "{told}");
    slower["work"]["jobs"] = 3.into();
    write(std::path::Path::new(b), &slower);
    assert!(host.refused(2, ["bench", "compare", a, b]).contains("other work"));
}

#[test]
fn an_audit_replays_every_job_and_names_a_row_that_differs() {
    let host = prepared();
    let shape = ["--jobs", "2", "--layers", "last:1", "--arms", "fused", "--peak", "0.001"];
    host.ok(args(&host, "sweep", "out", &shape));
    // Two jobs take two steps each, of 24 rows: at a GFLOP/s that takes its time.
    let fused = &report(&host, "out")["rows"][1];
    assert!(fused["floor"]["seconds"].as_f64().unwrap() > 0.0 && fused["audit"] == "not audited", "{fused}");
    let out = host.path("out");
    let audit = |out: &std::path::Path| ["bench", "audit", out.to_str().unwrap(), "--device", "cpu"].map(str::to_owned);
    let told = host.ok(audit(&out));
    assert!(told.matches("replayed alone in another process, all bits equal").count() == 2, "{told}");
    let rows = report(&host, "out")["rows"].clone();
    assert!(rows.as_array().unwrap().iter().all(|row| row["audit"].as_str().unwrap().starts_with("audited")), "{rows}");
    assert!(!out.join(".audit").exists());

    // A report that says something else than its receipts is not replayed.
    let mut altered = report(&host, "out");
    altered["rows"][1]["jobs"][0]["loss_bits"][2] = "3f800000".into();
    write(&out.join("report.json"), &altered);
    let refused = host.refused(2, audit(&out));
    assert!(refused.contains("row `fused` is not what its receipt says"), "{refused}");
    // Nor a receipt that nobody signed.
    let receipt = out.join("receipts/fused.json");
    let text = std::fs::read_to_string(&receipt).unwrap();
    std::fs::write(&receipt, text.replace("\"sig\":\"", "\"sig\":\"AA")).unwrap();
    let refused = host.refused(2, audit(&out));
    assert!(refused.contains("receipts/fused.json"), "{refused}");
}

#[test]
fn a_job_in_the_foreground_changes_no_bit_and_its_steps_are_told() {
    let host = prepared();
    let told = host.ok(args(&host, "sweep", "out", &["--jobs", "2", "--layers", "last:1", "--arms", "stock-mps,fused", "--foreground"]));
    assert!(told.matches("a foreground job beside").count() == 2 && !told.contains("FAILED"), "{told}");
    let rows = report(&host, "out")["rows"].clone();
    assert!(rows[0]["foreground"].is_null(), "{rows}");
    for row in [&rows[1], &rows[2]] {
        assert!(row["foreground"]["alone_ms"]["p50"].as_f64().unwrap() > 0.0 && row["ratio"].as_f64().is_some(), "{row}");
        assert!(row["foreground"]["beside_ms"]["p50"].as_f64().unwrap() > 0.0, "{row}");
        // The one in the foreground is not counted as work of the arm.
        assert_eq!(row["jobs"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn several_measurements_become_one_report_with_a_table_for_each_question() {
    let host = prepared();
    let (sweep, tenants) =
        (["--jobs", "2", "--layers", "last:1", "--arms", "fused"], ["--jobs", "2", "--layers", "all", "--arms", "packed"]);
    host.ok(args(&host, "sweep", "a", &sweep));
    host.ok(args(&host, "tenants", "b", &tenants));
    let path = |out: &str| host.path(out).join("report.json").to_str().unwrap().to_owned();
    let all = host.path("all").to_str().unwrap().to_owned();
    let told = host.ok(["bench".into(), "merge".into(), path("a"), path("b"), "--out".into(), all.clone()]);
    assert!(told.contains("2 measurements"), "{told}");
    assert_eq!(file(&host, "all")["measurements"], serde_json::json!([report(&host, "a"), report(&host, "b")]));
    let page = std::fs::read_to_string(host.path("all/report.html")).unwrap();
    let tables = ["1. Shared trunk", "2. Reuse", "4. Unrelated tenants"];
    assert!(tables.iter().all(|table| page.contains(table)) && !page.contains("3. Mean SM activity"), "{page}");
    let refused = host.refused(2, ["bench".into(), "merge".into(), path("a"), path("a"), "--out".into(), format!("{all}-2")]);
    assert!(refused.contains("another report given here holds too"), "{refused}");
    // Only work that both have is compared.
    let told = host.ok(["bench".into(), "compare".into(), path("a"), path("all"), "--tolerance".into(), "99".into()]);
    assert!(told.lines().count() == 3 && told.starts_with("2 members"), "{told}");
}
