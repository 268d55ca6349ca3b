//! Many jobs in one engine, from outside: sweeps, manifests and audits; what is shared changes no byte.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nodus_tests::{Host, assert_same, contents, golden, guest, host, statement, text, token_lines};
use serde_json::Value;

/// Of a receipt, what depends on company and time.
const COMPANY: [&str; 4] = ["times", "previous_receipt", "lane", "co_resident_jobs"];
/// A sweep of four members that differ in rank, and so in their adapters' shapes.
const SWEEP: [&str; 14] = [
    "--sweep",
    "learning_rate=0.01,0.003",
    "--sweep",
    "rank=4,2",
    "--set",
    "batch_size=3",
    "--set",
    "dropout=0.1",
    "--set",
    "epochs=2",
    "--set",
    "layers={\"last\": 1}",
    "--held-out-count",
    "6",
];
const MEMBERS: [&str; 4] =
    ["learning_rate=0.003,rank=2", "learning_rate=0.003,rank=4", "learning_rate=0.01,rank=2", "learning_rate=0.01,rank=4"];

/// A data folder with two tiny models, `llama` and `qwen3`, and two data sets, `tokens` and `few`.
fn prepared() -> Host {
    let host = Host::new();
    let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    let few: String = lines.lines().take(8).map(|line| format!("{line}\n")).collect();
    for (name, lines) in [("tokens", lines), ("few", few)] {
        std::fs::write(host.path(name), lines).unwrap();
        host.ok(["data", "put", host.path(name).to_str().unwrap(), "--name", name]);
    }
    for model in ["llama", "qwen3"] {
        host.ok(["model", "import", golden(&format!("models/{model}")).to_str().unwrap(), "--name", model]);
    }
    host
}

/// The arguments of a run of `sft` into `out`, with more behind them.
fn run(host: &Host, out: &str, more: &[&str]) -> Vec<String> {
    let (sft, out) = (guest("sft"), host.path(out));
    let fixed = ["run", sft.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--seed", "7", "--out", out.to_str().unwrap()];
    fixed.iter().chain(more).map(ToString::to_string).collect()
}

fn audit(what: &str, path: &Path) -> [String; 3] {
    ["audit".into(), what.into(), path.to_str().unwrap().into()]
}

/// A whole run's files; the summary without what the machine did.
fn all(host: &Host, out: &str) -> BTreeMap<String, Vec<u8>> {
    let mut found = contents(&host.path(out), &COMPANY);
    let summary: Value = serde_json::from_slice(&found["summary.json"]).unwrap();
    found.insert("summary.json".into(), summary["jobs"].to_string().into_bytes());
    found
}

#[test]
fn a_sweep_gives_the_same_bytes_in_every_lane() {
    let host = prepared();
    let told = host.ok(run(&host, "fused", &SWEEP));
    for word in ["learning_rate", "held-out", "completed", "4 jobs", "lane fused", "bound"] {
        assert!(told.contains(word), "`{word}` is missing in {told}");
    }
    let fused = all(&host, "fused");
    for (out, more) in [
        ("solo", &["--lane", "solo"][..]),
        ("one", &["--jobs", "1", "--trunk-cache", "0"]),
        ("two", &["--jobs", "2", "--threads", "1", "--trunk-cache", "64KiB"]),
    ] {
        let more: Vec<&str> = SWEEP.iter().chain(more).copied().collect();
        host.ok(run(&host, out, &more));
        assert_same(&fused, &all(&host, out), out);
    }
    for member in MEMBERS {
        let params: Vec<&str> = member.split(',').flat_map(|setting| ["--set", setting]).chain(SWEEP[4..].iter().copied()).collect();
        host.ok(run(&host, member, &params));
        let folder = |files: &BTreeMap<String, Vec<u8>>| -> BTreeMap<String, Vec<u8>> {
            files.iter().filter_map(|(name, bytes)| Some((name.strip_prefix(&format!("{member}/"))?.to_owned(), bytes.clone()))).collect()
        };
        assert_same(&contents(&host.path(member), &COMPANY), &folder(&fused), member);
        let receipt = statement(&std::fs::read(host.path("fused").join(member).join("receipt.json")).unwrap());
        assert_eq!((&receipt["predicate"]["lane"], &receipt["predicate"]["co_resident_jobs"]), (&"fused".into(), &3.into()));
    }
    let summary: Value = serde_json::from_slice(&std::fs::read(host.path("fused/summary.json")).unwrap()).unwrap();
    let sharing = &summary["machine"]["sharing"];
    assert!(sharing["row_halves_shared"].as_u64().unwrap() > 0, "nothing was shared: {sharing}");
    assert!(sharing["trunk_cache_hits"].as_u64().unwrap() > 0, "the second epoch hit nothing: {sharing}");
    assert!(sharing["batches"].as_u64().unwrap() > sharing["passes"].as_u64().unwrap(), "no pass had two members: {sharing}");
    let csv = text(&fused["summary.csv"]);
    assert_eq!(csv.lines().count(), 5, "{csv}");
    assert!(csv.starts_with("name,learning_rate,rank,status,"), "{csv}");
}

#[test]
fn a_member_that_fails_stops_no_other_and_is_named() {
    let host = prepared();
    let sweep = ["--sweep", "learning_rate=0.01,1e38,-1", "--set", "batch_size=4"];
    let output = host.call(run(&host, "out", &sweep));
    let (told, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("2 of 3 jobs failed: learning_rate=1e+38, learning_rate=-1"), "{error}");
    assert!(told.contains("finite") && told.contains("learning_rate is -1"), "{told}");
    host.ok(run(&host, "alone", &["--set", "learning_rate=0.01", "--set", "batch_size=4"]));
    assert_same(&contents(&host.path("alone"), &COMPANY), &contents(&host.path("out/learning_rate=0.01"), &COMPANY), "the survivor");
    let failed = contents(&host.path("out/learning_rate=1e+38"), &[]);
    assert!(failed.contains_key("losses.jsonl") && !failed.contains_key("receipt.json"), "{:?}", failed.keys());
    assert!(!host.path("out/learning_rate=-1").exists());
    let summary: Value = serde_json::from_slice(&std::fs::read(host.path("out/summary.json")).unwrap()).unwrap();
    let statuses: Vec<&str> = summary["jobs"].as_array().unwrap().iter().map(|job| job["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["completed", "failed", "failed"]);
}

#[test]
fn unrelated_jobs_of_a_manifest_equal_each_alone() {
    let host = prepared();
    std::fs::write(host.path("b.json"), r#"{"rank": 2, "targets": "all-linear", "layers": {"last": 1}, "learning_rate": 0.02}"#).unwrap();
    let (sft, eval) = (guest("sft"), guest("eval"));
    let manifest = format!(
        "[[jobs]]\nname = \"a\"\ncomponent = \"{sft}\"\nmodel = \"llama\"\ndata = \"tokens\"\nseed = 3\nheld_out_count = 4\n\
         params = {{ rank = 4, learning_rate = 0.01, batch_size = 3, dropout = 0.1 }}\n\
         [[jobs]]\nname = \"b\"\ncomponent = \"{sft}\"\nmodel = \"qwen3\"\ndata = \"few\"\nheld_out = \"tokens\"\nparams = \"b.json\"\n\
         [[jobs]]\nname = \"c\"\ncomponent = \"{eval}\"\nmodel = \"llama\"\ndata = \"few\"\nseed = 9\n",
        sft = sft.display(),
        eval = eval.display()
    );
    std::fs::write(host.path("jobs.toml"), manifest).unwrap();
    let (manifest, out) = (host.path("jobs.toml"), host.path("out"));
    let told = host.ok(["run", "--manifest", manifest.to_str().unwrap(), "--out", out.to_str().unwrap()]);
    assert!(told.contains("3 jobs"), "{told}");
    let alone: [(&str, &Path, &[&str]); 3] = [
        (
            "a",
            &sft,
            &["--model", "llama", "--data", "tokens", "--seed", "3", "--held-out-count", "4", "--set", "rank=4", "--set", "dropout=0.1"],
        ),
        ("b", &sft, &["--model", "qwen3", "--data", "few", "--held-out", "tokens", "--params", "b.json"]),
        ("c", &eval, &["--model", "llama", "--data", "few", "--seed", "9"]),
    ];
    for (name, component, args) in alone {
        let (single, params) = (host.path(name), host.path("b.json"));
        let args = args.iter().map(|arg| if *arg == "b.json" { params.to_str().unwrap() } else { arg });
        let more: &[&str] = if name == "a" { &["--set", "learning_rate=0.01", "--set", "batch_size=3"] } else { &[] };
        let fixed = ["run", component.to_str().unwrap(), "--out", single.to_str().unwrap()];
        host.ok(fixed.into_iter().chain(args).chain(more.iter().copied()));
        assert_same(&contents(&single, &COMPANY), &contents(&out.join(name), &COMPANY), name);
    }
    // A manifest may stand anywhere: what it names is relative to it.
    std::fs::write(host.path("jobs.toml"), "[[jobs]]\nname = \"a\"\ncomponent = \"absent.wasm\"\nmodel = \"llama\"\ndata = \"few\"\n")
        .unwrap();
    let error = host.refused(2, ["run", "--manifest", manifest.to_str().unwrap(), "--out", host.path("x").to_str().unwrap()]);
    assert!(error.contains(host.path("absent.wasm").to_str().unwrap()), "{error}");
}

#[test]
fn refusals_of_sweeps_manifests_and_memory_say_what_would_be_right() {
    let host = prepared();
    std::fs::write(host.path("bad.toml"), "[[jobs]]\nname = \"a\"\nmodle = \"llama\"\n").unwrap();
    let bad = host.path("bad.toml");
    let manifest = ["run", "--manifest", bad.to_str().unwrap(), "--out", "x"].map(str::to_owned);
    let cases: Vec<(Vec<String>, &[&str])> = vec![
        (run(&host, "out", &["--sweep", "rank=4,4"]), &["rank", "twice"]),
        (run(&host, "out", &["--sweep", "rank=4", "--sweep", "rank=8"]), &["rank", "swept twice"]),
        (run(&host, "out", &["--sweep", "rank=4,8", "--set", "rank=2"]), &["rank", "both set and swept"]),
        (run(&host, "out", &["--manifest", "x.toml"]), &["--manifest", "cannot be used with"]),
        (manifest.to_vec(), &["bad.toml", "`modle`", "`model`"]),
        (run(&host, "out", &["--memory", "100kB"]), &["not enough memory", "100000 bytes", "weights", "--memory"]),
    ];
    for (args, words) in cases {
        let error = host.refused(2, &args);
        for word in words {
            assert!(error.contains(word), "{args:?}: `{word}` is missing in: {error}");
        }
        assert!(!host.path("out").exists(), "{args:?} left something");
    }
}

#[test]
fn a_job_is_held_to_its_own_limits_and_leaves_its_room_to_the_next() {
    let host = prepared();
    let sweep = |out: &str, more: &[&str]| run(&host, out, &[&["--sweep", "rank=2,4,8", "--set", "steps=2"], more].concat());
    let error = host.refused(2, sweep("out", &["--memory", "100kB"]));
    let part = |name: &str| -> u64 {
        let (_, rest) = error.split_once(&format!("{name} ")).unwrap();
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    };
    assert_eq!(part("adapters"), 3 * (64 << 20), "{error}");
    // Room for one at a time: each can begin only when the room of the one before is free again.
    let one = (part("weights") + part("tables") + part("adapters") / 3 + part("activations")).to_string();
    assert!(host.refused(2, sweep("out", &["--memory", &one])).contains("--jobs"));
    host.ok(sweep("one", &["--memory", &one, "--jobs", "1"]));
    host.ok(sweep("all", &[]));
    assert_same(&all(&host, "one"), &all(&host, "all"), "one at a time in little memory");
    let limits = statement(&std::fs::read(host.path("one/rank=2/receipt.json")).unwrap())["predicate"]["limits"].clone();
    assert_eq!((limits["device-bytes"].as_u64(), limits["activation-bytes"].as_u64()), (Some(64 << 20), Some(part("activations"))));

    for (limit, is_enough) in [("device-bytes=28671", false), ("device-bytes=28672", true)] {
        // Rank 2: (64 + 64) + (64 + 32) for each rank in four layers, 16 bytes a weight.
        let args = run(&host, limit, &["--set", "rank=2", "--set", "steps=1", "--limit", limit]);
        match is_enough {
            true => drop(host.ok(args)),
            false => assert!(host.refused(2, args).contains("device-bytes"), "the job's own limit is named"),
        }
    }
    let error = host.refused(2, run(&host, "little", &["--set", "steps=1", "--limit", "activation-bytes=1000"]));
    assert!(error.contains("the batch needs") && error.contains("expected at most the job's 1000 (activation-bytes)"), "{error}");
}

#[test]
fn what_was_signed_is_verified_and_what_was_changed_is_named() {
    let host = prepared();
    host.ok(run(&host, "out", &["--sweep", "rank=2,4", "--held-out-count", "6"]));
    let out = host.path("out");
    let told = host.ok(audit("verify", &out));
    assert_eq!(told.matches("chain: ok").count(), 2, "{told}");
    let member = out.join("rank=2");
    assert!(host.ok(audit("verify", &member.join("receipt.json"))).contains("adapter files: ok"));

    // Without the ledger the chain is not checked, and it is said so.
    let own_key = host.path("data/host_key.pub.pem");
    let told = host.ok(audit("verify", &member).iter().map(String::as_str).chain(["--key", own_key.to_str().unwrap()]));
    assert!(told.contains("signature: ok") && told.contains("chain: not checked (no ledger was given)"), "{told}");

    let stranger = Host::new();
    std::fs::write(stranger.path("some.jsonl"), "{\"text\": \"a\"}\n").unwrap();
    stranger.ok(["data", "put", stranger.path("some.jsonl").to_str().unwrap(), "--name", "some"]);
    let key = stranger.path("data/host_key.pub.pem");
    let other = host.call(audit("verify", &member).iter().map(String::as_str).chain(["--key", key.to_str().unwrap()]));
    assert_eq!(other.status.code(), Some(2));
    assert!(text(&other.stdout).contains("signature: FAILED") && text(&other.stdout).contains("unknown key"), "{}", text(&other.stdout));

    for (file, what) in [
        ("adapter/adapter_model.safetensors", "subject files: FAILED"),
        ("losses.jsonl", "losses: FAILED"),
        ("held_out.jsonl", "held-out losses: FAILED"),
    ] {
        let path = member.join(file);
        let whole = std::fs::read(&path).unwrap();
        let changed = if file.ends_with("jsonl") { text(&whole).replacen("0x4", "0x3", 1).into_bytes() } else { flipped(&whole) };
        assert_ne!(whole, changed, "{file}");
        std::fs::write(&path, changed).unwrap();
        let output = host.call(audit("verify", &out));
        let (told, error) = (text(&output.stdout), text(&output.stderr));
        assert!(told.contains(what) && error.contains("1 of 2 receipts") && error.contains("rank=2"), "{file}: {told}\n{error}");
        assert_eq!(output.status.code(), Some(2));
        std::fs::write(&path, whole).unwrap();
    }
    host.ok(audit("verify", &out));
}

/// The same bytes but for one bit in the middle.
fn flipped(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    bytes
}

#[test]
fn a_replay_is_bit_identical_or_names_the_first_difference() {
    let host = prepared();
    let init = format!("init_adapter={}", golden("runs/llama-qv/init").display());
    let more = ["--set", &init, "--sweep", "learning_rate=0.01,0.003", "--held-out-fraction", "0.2"];
    host.ok(run(&host, "out", &more));
    let member = host.path("out/learning_rate=0.003");
    let told = host.ok(audit("replay", &member));
    assert!(told.starts_with("bit-identical: ") && told.contains("evaluations"), "{told}");

    let path = member.join("losses.jsonl");
    let whole = std::fs::read_to_string(&path).unwrap();
    let bits = serde_json::from_str::<Value>(whole.lines().nth(2).unwrap()).unwrap()["loss_bits"].as_str().unwrap().to_owned();
    let planted = format!("{}{:x}", &bits[..9], u8::from_str_radix(&bits[9..], 16).unwrap() ^ 1);
    std::fs::write(&path, whole.replacen(&bits, &planted, 1)).unwrap();
    let error = host.refused(2, audit("replay", &member));
    assert!(error.contains(&format!("not bit-identical: losses.jsonl, step 3: expected {planted}, got {bits}")), "{error}");
    std::fs::write(&path, whole).unwrap();

    let adapter = member.join("adapter/adapter_model.safetensors");
    let bytes = std::fs::read(&adapter).unwrap();
    std::fs::write(&adapter, flipped(&bytes)).unwrap();
    let error = host.refused(2, audit("replay", &member));
    assert!(error.contains(&format!("adapter/adapter_model.safetensors, byte {}", bytes.len() / 2)), "{error}");
    std::fs::write(&adapter, bytes).unwrap();

    host.ok(["data", "rm", "tokens"]);
    let error = host.refused(2, audit("replay", &member));
    assert!(error.contains("data set `tokens`") && error.contains("not in the data folder"), "{error}");
}

#[test]
fn the_ledger_adds_up() {
    let host = prepared();
    let failed = host.call(run(&host, "out", &["--sweep", "rank=2,4", "--sweep", "learning_rate=0.01,1e38"]));
    assert_eq!(failed.status.code(), Some(2), "{}", text(&failed.stderr));
    let told = host.ok(["audit", "ledger", "--tenant", "local", "--json"]);
    let last: Value = serde_json::from_str(told.lines().last().unwrap()).unwrap();
    let bytes = &last["adapter_bytes"]["local"];
    // q_proj and v_proj of four layers: (64 + 64) + (64 + 32) for each rank, 16 bytes a weight; four jobs, two of each rank.
    let expected = 2 * (2 + 4) * 4 * (128 + 96) * 16;
    assert_eq!((bytes["allocated"].as_u64(), bytes["zeroed"].as_u64()), (Some(expected), Some(expected)), "{told}");
    assert_eq!((&last["receipts"], &last["jobs_failed"]), (&Value::from(2), &Value::from(2)));
    assert!(bytes["written"].as_u64().unwrap() > 0 && bytes["exported"].as_u64().unwrap() > 0, "{told}");
    let receipts = host.ok(["audit", "ledger", "--kind", "receipt"]);
    assert!(receipts.contains("2 entries, 2 receipts and 0 failed jobs among them") && receipts.contains("the chain holds"), "{receipts}");
    assert!(host.ok(["audit", "ledger", "--tenant", "nobody"]).starts_with("0 entries"));
    let key = std::fs::metadata(host.path("data/host_key.pem")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&key.permissions()) & 0o777, 0o600);
}

#[test]
fn an_interrupt_stops_all_and_starts_no_more() {
    let prepared = prepared();
    let more = ["--sweep", "learning_rate=0.01,0.003,0.001", "--set", "epochs=100000", "--jobs", "2"];
    let child = Command::new(host())
        .args(run(&prepared, "out", &more))
        .env("NODUS_DATA_DIR", prepared.path("data"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("learning_rate=0.01: step 1"), "{}", text(&output.stderr));
    let summary: Value = serde_json::from_slice(&std::fs::read(prepared.path("out/summary.json")).unwrap()).unwrap();
    let statuses: Vec<&str> = summary["jobs"].as_array().unwrap().iter().map(|job| job["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["stopped", "stopped", "not started"]);
    for member in ["learning_rate=0.01", "learning_rate=0.003"] {
        assert!(prepared.path("out").join(member).join("adapter/adapter_model.safetensors").exists());
        let replayed = prepared.ok(audit("replay", &prepared.path("out").join(member)));
        assert!(replayed.starts_with("bit-identical"), "{replayed}");
    }
    assert!(!prepared.path("out/learning_rate=0.001").exists());
}
