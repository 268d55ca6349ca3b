//! What must be refused early, and what evaluations say of themselves, from outside.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::process::Command;

use nodus_tests::{Host, golden, guest, json_lines, text, token_lines};

/// A data folder with the tiny Llama as `llama` and the reference tokens as `tokens`.
fn prepared() -> Host {
    let host = Host::new();
    std::fs::write(host.path("tokens.jsonl"), token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]))
        .unwrap();
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host.ok(["data", "put", host.path("tokens.jsonl").to_str().unwrap(), "--name", "tokens"]);
    host
}

/// The arguments of a run of a ready-made guest into `out`, with more behind them.
fn run(host: &Host, component: &str, out: &str, more: &[&str]) -> Vec<String> {
    let (component, out) = (guest(component), host.path(out));
    let fixed = ["run", component.to_str().unwrap(), "--model", "llama", "--data", "tokens", "--out", out.to_str().unwrap()];
    fixed.into_iter().chain(more.iter().copied()).map(str::to_owned).collect()
}

#[test]
fn evaluations_say_what_they_were_of() {
    let host = prepared();
    let told = host.ok(run(&host, "eval", "both", &["--held-out-count", "4"]));
    assert!(told.contains("held-out loss: ") && told.contains("training-data loss: "), "{told}");
    let lines: Vec<serde_json::Value> = json_lines(&host.path("both/held_out.jsonl"));
    assert_eq!(lines.iter().map(|line| line["data"].as_str().unwrap()).collect::<Vec<_>>(), ["train", "held-out"]);
    let told = host.ok(run(&host, "eval", "train", &[]));
    assert!(!told.contains("held-out loss") && told.contains("training-data loss: "), "{told}");
}

#[test]
fn a_mistyped_data_folder_is_named_and_not_made() {
    let host = prepared();
    let absent = host.path("mistyped/folder").to_str().unwrap().to_owned();
    for verb in [&["model", "list"][..], &["data", "list"], &["model", "rm", "x"], &["audit", "ledger"]] {
        let error = host.refused(2, verb.iter().chain(&["--data-dir", &absent]));
        assert!(error.contains("there is no data folder") && error.contains("--data-dir"), "{error}");
    }
    host.refused(2, run(&host, "sft", "new/parent/out", &["--data-dir", &absent]));
    // A job that fails before its first step leaves nothing either.
    let error = host.refused(2, run(&host, "sft", "new/parent/out", &["--set", "rank=0"]));
    assert!(error.contains("rank is 0"), "{error}");
    assert!(!host.path("mistyped").exists() && !host.path("new").exists());
}

#[test]
fn a_place_for_results_that_cannot_be_is_refused_before_anything_is_opened() {
    let host = prepared();
    for (out, why) in [("/proc", "a mount point"), ("/proc/none/out", "cannot create"), ("/dev/null/out", "cannot create")] {
        let mut args = run(&host, "sft", "unused", &[]);
        let place = args.iter().position(|arg| arg == "--out").unwrap() + 1;
        let model = args.iter().position(|arg| arg == "--model").unwrap() + 1;
        (args[place], args[model]) = (out.to_owned(), "absent".to_owned());
        let error = host.refused(2, args);
        assert!(error.contains(why) && error.contains(out.trim_end_matches("/out")), "{error}");
    }
}

#[test]
fn a_component_and_its_parameters_are_held_to_the_jobs_own_limits() {
    let host = prepared();
    std::fs::write(host.path("params.json"), r#"{"rank": 4}"#).unwrap();
    let params = host.path("params.json").to_str().unwrap().to_owned();
    for (limit, more, words) in [
        ("component-bytes=1", &[][..], "sft.wasm"),
        ("memories=0", &[], "memories"),
        ("tables=0", &[], "tables"),
        ("parameter-bytes=5", &["--params", params.as_str()], "params.json"),
        ("parameter-bytes=5", &["--set", "rank=4"], "parameter-bytes"),
    ] {
        let error = host.refused(2, run(&host, "sft", "out", &[&["--limit", limit], more].concat()));
        assert!(error.contains(words) && !host.path("out").exists(), "{limit}: {error}");
    }
}

#[test]
fn pipes_and_long_files_are_refused_before_anything_is_copied() {
    let host = Host::new();
    let pipe = host.path("pipe.jsonl");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let error = host.refused(2, ["data", "put", pipe.to_str().unwrap(), "--name", "p"]);
    assert!(error.contains("a pipe or a device"), "{error}");
    let folder = host.path("model");
    std::fs::create_dir(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden("models/llama").join(file), folder.join(file)).unwrap();
    }
    std::fs::File::create(folder.join("tokenizer.json")).unwrap().set_len(3 << 30).unwrap();
    let error = host.refused(2, ["model", "import", folder.to_str().unwrap(), "--name", "m"]);
    assert!(error.contains("tokenizer.json") && error.contains("has 3.2 GB, expected at most"), "{error}");
}

#[test]
fn an_adapter_of_another_model_is_used_with_a_warning() {
    let host = prepared();
    let init = format!("init_adapter={}", golden("runs/llama-qv/init").display());
    let output = host.call(run(&host, "sft", "out", &["--set", &init, "--set", "steps=1"]));
    let told = text(&output.stderr);
    assert!(output.status.success() && told.contains("was made for the model") && told.contains("`llama`"), "{told}");
    let own = format!("init_adapter={}", host.path("out/adapter").display());
    let output = host.call(run(&host, "sft", "again", &["--set", &own, "--set", "steps=1"]));
    let told = text(&output.stderr);
    assert!(output.status.success() && !told.contains("was made for the model"), "{told}");
}

/// The digest of a component is part of a result's identity: it must not depend on who built it where.
#[test]
fn components_name_no_folder_of_the_machine_that_built_them() {
    let root = nodus_tests::root().to_str().unwrap().to_owned();
    let home = std::env::var("HOME").unwrap() + "/";
    for name in ["sft", "eval", "halving"] {
        let bytes = std::fs::read(guest(name)).unwrap();
        for folder in ["/.cargo/", "/.rustup/", "/home/", &home, &root] {
            let found = bytes.windows(folder.len()).position(|window| window == folder.as_bytes());
            let around = found.map(|at| text(&bytes[at..bytes.len().min(at + 80)]));
            assert_eq!(around, None, "{name}.wasm names {folder}: build it with `cargo xtask guests`");
        }
    }
}
