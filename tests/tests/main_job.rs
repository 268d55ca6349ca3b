//! The main job from outside: the same bytes twice, clear refusals that leave nothing, clean stops.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nodus_tests::{Host, Step, assert_same, contents, golden, guest, host, json_lines, text, token_lines};

/// A data folder with the tiny Llama as `llama` and the reference tokens as `tokens`.
fn prepared() -> Host {
    let host = Host::new();
    std::fs::write(host.path("tokens.jsonl"), token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]))
        .unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host.ok(["data", "put", host.path("tokens.jsonl").to_str().unwrap(), "--name", "tokens"]);
    host
}

/// The arguments of a run of `sft` into `out`, with more behind them.
fn run(host: &Host, out: &str, more: &[&str]) -> Vec<String> {
    let out = host.path(out);
    let fixed =
        ["run", guest("sft").to_str().unwrap(), "--model", "llama", "--data", "tokens", "--out", out.to_str().unwrap()].map(String::from);
    fixed.into_iter().chain(more.iter().map(ToString::to_string)).collect()
}

/// Of a receipt, what two equal runs differ in.
const DIFFERS: [&str; 2] = ["times", "previous_receipt"];

#[test]
fn the_same_job_gives_the_same_bytes_whatever_the_threads() {
    let host = prepared();
    let params = ["--set", "learning_rate=0.01", "--set", "dropout=0.1", "--set", "batch_size=3", "--set", "gradient_accumulation=2"];
    for (out, threads) in [("a", "1"), ("b", "2"), ("c", "2")] {
        let more: Vec<&str> = params.into_iter().chain(["--held-out-count", "6", "--threads", threads, "--seed", "7"]).collect();
        host.ok(run(&host, out, &more));
    }
    let first = contents(&host.path("a"), &DIFFERS);
    for name in ["adapter/adapter_model.safetensors", "adapter/adapter_config.json", "losses.jsonl", "held_out.jsonl", "receipt.json"] {
        assert!(first.contains_key(name), "{name} is missing: {:?}", first.keys());
    }
    for other in ["b", "c"] {
        assert_same(&first, &contents(&host.path(other), &DIFFERS), other);
    }
    host.ok(run(&host, "d", &["--seed", "8", "--set", "learning_rate=0.01"]));
    assert_ne!(first["losses.jsonl"], contents(&host.path("d"), &DIFFERS)["losses.jsonl"], "the seed counts");
}

#[test]
fn refusals_name_the_fault_and_leave_nothing() {
    let host = prepared();
    std::fs::write(host.path("module.wasm"), b"\0asm\x01\0\0\0").unwrap();
    std::fs::write(host.path("text.wasm"), "(component)").unwrap();
    std::fs::write(host.path("bad.json"), "{\"rank\": }").unwrap();
    let path = |name: &str| host.path(name).to_str().unwrap().to_owned();
    let before = contents(&host.path("data"), &DIFFERS);
    let sft = |more: &[&str]| run(&host, "out", more);
    let replaced = |from: &str, to: &str| sft(&[]).into_iter().map(|a| if a == from { to.to_owned() } else { a }).collect::<Vec<_>>();
    let sft_path = guest("sft").to_str().unwrap().to_owned();
    let cases: Vec<(Vec<String>, &[&str])> = vec![
        (replaced("llama", "lama"), &["lama", "llama"]),
        (replaced("tokens", "tokns"), &["tokns", "tokens"]),
        (replaced(&sft_path, &path("absent.wasm")), &["absent.wasm"]),
        (replaced(&sft_path, &path("module.wasm")), &["core module", "component"]),
        (replaced(&sft_path, &path("text.wasm")), &["text"]),
        (sft(&["--set", "learning_rat=1"]), &["learning_rat", "learning_rate"]),
        (sft(&["--set", "learning_rate=fast"]), &["learning_rate"]),
        (sft(&["--set", "learning_rate=-1"]), &["learning_rate", "-1"]),
        (sft(&["--set", "rank=0"]), &["rank", "0"]),
        (sft(&["--set", "rank=4.5"]), &["rank"]),
        (sft(&["--set", "targets=[\"q_prj\"]"]), &["q_prj", "q_proj"]),
        (sft(&["--set", "layers={\"last\":9}"]), &["layers", "9", "4"]),
        (sft(&["--set", "steps=3", "--set", "epochs=3"]), &["steps", "epochs"]),
        (sft(&["--set", "max_length=4096"]), &["max_length", "4096", "128"]),
        (sft(&["--set", "nonsense"]), &["nonsense", "="]),
        (sft(&["--params", &path("bad.json")]), &["bad.json"]),
        (sft(&["--held-out-count", "40"]), &["40"]),
        (sft(&["--set", "init_adapter=absent"]), &["absent"]),
    ];
    for (args, words) in cases {
        let error = host.refused(2, &args);
        for word in words {
            assert!(error.contains(word), "{args:?}: `{word}` is missing in: {error}");
        }
        assert!(error.lines().count() <= 3, "{args:?}: more than a few lines: {error}");
        assert!(!host.path("out/adapter").exists(), "{args:?} left an adapter");
        let after = contents(&host.path("data"), &DIFFERS);
        // What was compiled is kept for the next run.
        let after = after.keys().filter(|name| !name.starts_with("compiled/"));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.collect::<Vec<_>>(), "{args:?} left something");
    }
}

#[test]
fn an_output_folder_in_use_is_left_alone() {
    let host = prepared();
    std::fs::create_dir(host.path("out")).unwrap();
    std::fs::write(host.path("out/mine.txt"), "mine").unwrap();
    let error = host.refused(2, run(&host, "out", &[]));
    assert!(error.contains("out") && error.contains("empty"), "{error}");
    assert_eq!(contents(&host.path("out"), &DIFFERS).into_keys().collect::<Vec<_>>(), ["mine.txt"]);
}

#[test]
fn bad_data_is_refused_with_file_line_and_reason() {
    let host = Host::new();
    let cases = [
        ("{\"text\": \"a\"}\n{\"txt\": \"b\"}\n", "2", "txt"),
        ("{\"text\": \"a\"}\n{\"prompt\": \"b\", \"completion\": \"c\"}\n", "2", "prompt"),
        ("{\"text\": 1}\n", "1", "text"),
        ("{\"text\": \"a\"}\nnot json\n", "2", "JSON"),
        ("{\"tokens\": [1, 2], \"weights\": [0, -1]}\n", "1", "weights"),
        ("", "", "empty"),
    ];
    for (lines, line, word) in cases {
        std::fs::write(host.path("bad.jsonl"), lines).unwrap();
        let error = host.refused(2, ["data", "put", host.path("bad.jsonl").to_str().unwrap(), "--name", "bad"]);
        for part in ["bad.jsonl", line, word] {
            assert!(error.contains(part), "{lines:?}: `{part}` is missing in: {error}");
        }
        assert!(!host.ok(["data", "list"]).contains("bad"));
    }
}

#[test]
fn a_truncated_model_is_refused_and_not_listed() {
    let host = Host::new();
    let folder = host.path("model");
    std::fs::create_dir(&folder).unwrap();
    std::fs::copy(golden("models/llama/config.json"), folder.join("config.json")).unwrap();
    let weights = std::fs::read(golden("models/llama/model.safetensors")).unwrap();
    std::fs::write(folder.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let error = host.refused(2, ["model", "import", folder.to_str().unwrap(), "--name", "half"]);
    assert!(error.contains("model.safetensors"), "{error}");
    assert!(!host.ok(["model", "list"]).contains("half"));
}

#[test]
fn a_run_that_goes_non_finite_fails_with_its_step_and_publishes_nothing() {
    let host = prepared();
    let error = host.refused(2, run(&host, "out", &["--set", "learning_rate=1e38", "--set", "batch_size=2"]));
    assert!(error.contains("step") && (error.contains("NaN") || error.contains("finite")), "{error}");
    assert!(!host.path("out/adapter").exists() && !host.path("out/receipt.json").exists());
    let steps: Vec<Step> = json_lines(&host.path("out/losses.jsonl"));
    assert!(!steps.is_empty() && steps.len() < 20, "{} steps", steps.len());
}

#[test]
fn an_adapter_that_disagrees_with_the_parameters_is_refused() {
    let host = prepared();
    let init = format!("init_adapter={}", golden("runs/llama-qv/init").display());
    for (field, ours, theirs) in
        [("rank=16", "16", "4"), ("alpha=32", "32", "8"), ("rslora=true", "true", "false"), ("targets=[\"k_proj\"]", "k_proj", "q_proj")]
    {
        let error = host.refused(2, run(&host, "out", &["--set", &init, "--set", field]));
        for word in [field.split('=').next().unwrap(), ours, theirs] {
            assert!(error.contains(word), "{field}: `{word}` is missing in: {error}");
        }
    }
}

#[test]
fn interrupting_stops_cleanly_and_keeps_what_was_trained() {
    // Ctrl-C, what `kill` and batch systems send, and a terminal that is gone.
    for signal in ["-INT", "-TERM", "-HUP"] {
        let host_folder = prepared();
        let mut child = Command::new(host())
            .args(run(&host_folder, "out", &["--set", "epochs=100000", "--set", "learning_rate=0.001"]))
            .env("NODUS_DATA_DIR", host_folder.path("data"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_secs(3));
        let asked = Instant::now();
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        child.wait().unwrap();
        assert!(asked.elapsed() < Duration::from_secs(10), "it took {:?} after {signal}", asked.elapsed());
        let output = child.wait_with_output().unwrap();
        let told = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{signal}: {told}");
        assert!(told.contains("kept") && told.contains("adapter"), "{signal}: {told}");
        let steps: Vec<Step> = json_lines(&host_folder.path("out/losses.jsonl"));
        assert!(steps.len() > 3 && host_folder.path("out/adapter/adapter_model.safetensors").exists(), "{signal}: {} steps", steps.len());
        let replayed = host_folder.ok(["audit", "replay", host_folder.path("out").to_str().unwrap()]);
        assert!(replayed.starts_with("bit-identical") && replayed.contains(&format!("{} losses", steps.len())), "{replayed}");
    }
}
