//! Which device a run computes on, from outside; on a machine without a card as on one with it.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use nodus_tests::{Host, golden, guest, statement, token_lines};

/// A data folder with a tiny model and a model of random weights, and data of tokens.
fn prepared() -> Host {
    let host = Host::new();
    let lines = token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]);
    std::fs::write(host.path("tokens"), lines.lines().take(6).map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    host.ok(["data", "put", host.path("tokens").to_str().unwrap(), "--name", "tokens"]);
    host.ok(["model", "import", golden("models/llama").to_str().unwrap(), "--name", "llama"]);
    host.ok(["model", "import", "--random", "smollm2-135m", "--seed", "5", "--name", "random"]);
    host
}

/// A run of two steps.
fn run(host: &Host, model: &str, out: &str, more: &[&str]) -> Vec<String> {
    let (sft, out) = (guest("sft"), host.path(out));
    let fixed = ["run", sft.to_str().unwrap(), "--model", model, "--data", "tokens", "--out", out.to_str().unwrap()];
    let steps = ["--set", "steps=2", "--set", "batch_size=1", "--set", "max_length=24"];
    fixed.iter().chain(&steps).chain(more).map(ToString::to_string).collect()
}

#[test]
fn a_device_that_is_not_there_is_refused_with_what_is_missing() {
    let host = prepared();
    let error = host.refused(2, run(&host, "llama", "out", &["--device", "cuda:77"]));
    assert!(error.contains("--device cuda:77 cannot be used: "), "{error}");
    assert!(error.contains("was not found: install") || error.contains("there is no card 77"), "{error}");
    assert!(!host.path("out").exists());
    let error = host.refused(2, run(&host, "llama", "out", &["--device", "cpu", "--dtype", "bf16"]));
    assert!(error.contains("expected f32 or nothing: the CPU computes in float32 alone"), "{error}");
}

#[test]
fn a_replay_on_another_device_is_refused() {
    let host = prepared();
    host.ok(run(&host, "llama", "out", &["--device", "cpu"]));
    let class = &statement(&std::fs::read(host.path("out/receipt.json")).unwrap())["predicate"]["device_class"];
    assert_eq!((class["backend"].as_str(), class["precision"].as_str()), (Some("cpu"), Some("f32")));
    let replay = ["audit".to_owned(), "replay".to_owned(), host.path("out").to_str().unwrap().to_owned()];
    assert!(host.ok(&replay).starts_with("bit-identical"));
    let error = host.refused(2, replay.iter().map(String::as_str).chain(["--device", "cuda"]));
    let (absent, other) = ("the job ran on cpu ", "backend: the receipt's is `cpu`, here it is `cuda`");
    assert!(error.contains(absent) && error.contains("cannot be used") || error.contains(other), "{error}");
}

#[test]
fn random_weights_follow_from_a_recipe() {
    let host = prepared();
    let listed = host.ok(["model", "list"]);
    assert!(listed.contains("random  llama, 134515008 parameters") && listed.contains("random weights, no tokenizer"), "{listed}");
    host.ok(run(&host, "random", "out", &["--device", "cpu"]));
    let receipt = statement(&std::fs::read(host.path("out/receipt.json")).unwrap());
    let digest = receipt["predicate"]["trunk"]["digest"]["sha256"].as_str().unwrap();
    assert!(listed.contains(digest), "{digest} is not that of {listed}");

    host.ok(["model", "import", "--random", "smollm2-135m", "--seed", "5", "--name", "same"]);
    host.ok(["model", "import", "--random", "smollm2-135m", "--seed", "6", "--name", "other"]);
    assert_eq!(host.ok(["model", "list"]).matches(digest).count(), 2);
    std::fs::write(host.path("text"), "{\"text\": \"words\"}\n").unwrap();
    host.ok(["data", "put", host.path("text").to_str().unwrap(), "--name", "text"]);
    let sft = guest("sft");
    let words = ["run", sft.to_str().unwrap(), "--model", "random", "--data", "text", "--out", host.path("words").to_str().unwrap()]
        .map(str::to_owned);
    assert!(host.refused(2, words).contains("tokenizer"));
}
