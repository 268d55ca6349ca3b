//! The reference run of SmolLM2-135M-Instruct, through the public path. `NODUS_SMOLLM2` names the GGUF file; `cargo xtask test --slow` fetches it.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]

use nodus_tests::{Host, Step, golden, guest, json_lines, token_lines};

#[derive(serde::Deserialize)]
struct Reference {
    loss: Vec<f64>,
}

#[test]
fn twenty_steps_on_the_jargon_file() {
    let model = std::env::var("NODUS_SMOLLM2").expect("NODUS_SMOLLM2 names the GGUF file (`cargo xtask test --slow` sets it)");
    let host = Host::new();
    let reference: Reference = serde_json::from_str(&std::fs::read_to_string(golden("smollm2-135m-jargon/loss.json")).unwrap()).unwrap();
    let tokens = golden("smollm2-135m-jargon/tokens.safetensors");
    std::fs::write(host.path("tokens.jsonl"), token_lines(&tokens, ["input_ids", "labels", "attention_mask"])).unwrap();
    let params = serde_json::json!({"learning_rate": 1e-3, "weight_decay": 0.01, "batch_size": 2, "shuffle": false, "epochs": 1});
    std::fs::write(host.path("params.json"), params.to_string()).unwrap();
    host.ok(["model", "import", &model, "--name", "smollm2"]);
    host.ok(["data", "put", host.path("tokens.jsonl").to_str().unwrap(), "--name", "tokens"]);
    let init = format!("init_adapter={}", golden("smollm2-135m-jargon/init").display());
    let (sft, params, out) = (guest("sft"), host.path("params.json"), host.path("out"));
    host.ok([
        "run",
        sft.to_str().unwrap(),
        "--model",
        "smollm2",
        "--data",
        "tokens",
        "--params",
        params.to_str().unwrap(),
        "--set",
        &init,
        "--out",
        out.to_str().unwrap(),
    ]);
    let steps: Vec<Step> = json_lines(&out.join("losses.jsonl"));
    assert_eq!(steps.len(), 20);
    for (step, loss) in steps.iter().zip(&reference.loss) {
        assert!((step.loss - loss).abs() <= 2e-4, "step {}: loss {} expected {loss}", step.step, step.loss);
    }
}
