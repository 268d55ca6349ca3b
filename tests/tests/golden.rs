//! Reference runs by transformers + PEFT, repeated through the public path: component, WIT, sandbox, engine, files.
#![expect(clippy::disallowed_methods, reason = "tests work on real folders, as a user does")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]

use nodus_tests::{Host, Step, float_tensors, golden, guest, json_lines, token_lines};

/// A run's `loss.json`, what is used of it.
#[derive(serde::Deserialize)]
struct Reference {
    loss: Vec<f64>,
    grad_norm: Vec<f64>,
    lr: f64,
    weight_decay: f64,
    eval_mean_loss_after: f64,
}

/// Trains as the reference did, from its own initial adapter, and compares losses, gradient norms and the final adapter.
fn check(model: &str, run: &str) {
    let host = Host::new();
    let reference: Reference = serde_json::from_str(&std::fs::read_to_string(golden(&format!("runs/{run}/loss.json"))).unwrap()).unwrap();
    std::fs::write(host.path("tokens.jsonl"), token_lines(&golden("data/tokens.safetensors"), ["input_ids", "labels", "attention_mask"]))
        .unwrap();
    let params = serde_json::json!({
        "learning_rate": reference.lr, "weight_decay": reference.weight_decay, "batch_size": 2, "shuffle": false, "epochs": 1,
    });
    std::fs::write(host.path("params.json"), params.to_string()).unwrap();
    host.ok(["model", "import", golden(&format!("models/{model}")).to_str().unwrap(), "--name", model]);
    host.ok(["data", "put", host.path("tokens.jsonl").to_str().unwrap(), "--name", "tokens"]);
    let init = format!("init_adapter={}", golden(&format!("runs/{run}/init")).display());
    let (sft, params, out) = (guest("sft"), host.path("params.json"), host.path("out"));
    let out_text = out.to_str().unwrap();
    host.ok([
        "run",
        sft.to_str().unwrap(),
        "--model",
        model,
        "--data",
        "tokens",
        "--held-out",
        "tokens",
        "--params",
        params.to_str().unwrap(),
        "--set",
        &init,
        "--out",
        out_text,
    ]);

    let steps: Vec<Step> = json_lines(&out.join("losses.jsonl"));
    assert_eq!(steps.len(), reference.loss.len(), "one line a step");
    for ((step, loss), norm) in steps.iter().zip(&reference.loss).zip(&reference.grad_norm) {
        assert!((step.loss - loss).abs() <= 1e-5, "{run} step {}: loss {} expected {loss}", step.step, step.loss);
        assert!((step.grad_norm - norm).abs() <= 1e-4 * norm, "{run} step {}: norm {} expected {norm}", step.step, step.grad_norm);
        assert_eq!(u32::from_str_radix(step.loss_bits.trim_start_matches("0x"), 16).map(f32::from_bits).unwrap(), step.loss as f32);
    }
    let ours = float_tensors(&out.join("adapter/adapter_model.safetensors"));
    let theirs = float_tensors(&golden(&format!("runs/{run}/final/adapter_model.safetensors")));
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "the key set is PEFT's");
    // The first gradient of A is that of step 1, since B is zero at step 0. Where it is near AdamW's eps (1e-8), rounding decides the
    // weight's first move lr g / (|g| + eps): such a weight is held to one learning rate, all others to 1e-4.
    let first = float_tensors(&golden(&format!("runs/{run}/grads_step1.safetensors")));
    let mut undecided = 0;
    for (name, theirs) in &theirs {
        for (i, (a, b)) in ours[name].iter().zip(theirs).enumerate() {
            let is_undecided = name.contains("lora_A") && first[name][i].abs() < 5e-8;
            undecided += u32::from(is_undecided);
            let bound = if is_undecided { reference.lr as f32 } else { 1e-4 };
            assert!((a - b).abs() <= bound, "{run} {name}[{i}]: {a}, expected {b}");
        }
    }
    assert!(undecided <= 1, "{run}: {undecided} weights cannot be compared");

    // The reference evaluates batch by batch and averages the means; ours is the mean over tokens, so it is close, not equal.
    let held_out: Vec<serde_json::Value> = json_lines(&out.join("held_out.jsonl"));
    let last = held_out.last().unwrap()["loss"].as_f64().unwrap();
    assert!((last - reference.eval_mean_loss_after).abs() < 0.1, "{run}: held-out {last}, reference {}", reference.eval_mean_loss_after);
}

macro_rules! golden_runs {
    ($($test:ident: $model:literal $run:literal;)*) => { $(#[test] fn $test() { check($model, $run); })* };
}

golden_runs! {
    llama_qv: "llama" "llama-qv";
    llama_all: "llama" "llama-all";
    llama_qv_rslora: "llama" "llama-qv-rslora";
    qwen2_qv: "qwen2" "qwen2-qv";
    qwen2_all: "qwen2" "qwen2-all";
    qwen3_qv: "qwen3" "qwen3-qv";
    qwen3_all: "qwen3" "qwen3-all";
    mistral_qv: "mistral" "mistral-qv";
    mistral_all: "mistral" "mistral-all";
}
