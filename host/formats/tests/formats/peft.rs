//! PEFT folders: the golden adapters, round trips, and what must be refused. Faults that other trainers had are named.

use cap_std::fs::Dir;
use cap_tempfile::TempDir;
use nodus_formats::{hf, peft};
use nodus_protocol::{AdapterWeights, LayerSelection, LoraConfig, ModelConfig, Module, ModuleOverride, ModuleWeights};
use proptest::prelude::*;

use crate::support::{copy, edit, golden, temp};

const RUNS: [&str; 9] =
    ["llama-qv", "llama-all", "llama-qv-rslora", "qwen2-qv", "qwen2-all", "qwen3-qv", "qwen3-all", "mistral-qv", "mistral-all"];

fn model(name: &str) -> ModelConfig {
    hf::open(&golden(&format!("models/{name}"))).unwrap().config
}

fn written(weights: &AdapterWeights) -> TempDir {
    let dir = temp();
    for (name, bytes) in peft::write(weights, "tiny").unwrap() {
        dir.write(name, bytes).unwrap();
    }
    dir
}

fn read_error(dir: &Dir, model: &ModelConfig) -> String {
    peft::read(dir, model).unwrap_err().to_string()
}

fn adapter(config: LoraConfig, model: &ModelConfig) -> AdapterWeights {
    let mut next = 0.0_f32;
    let mut data = |n: usize| -> Vec<f32> {
        (0..n)
            .map(|_| {
                next += 0.125;
                next.sin()
            })
            .collect()
    };
    let modules = config
        .modules(model)
        .map(|(layer, module)| {
            let rank = config.rank_of(layer, module) as usize;
            let (a, b) = (data(rank * model.module_in(module)), data(rank * model.module_out(module)));
            ModuleWeights { layer, module, rank, a, b }
        })
        .collect();
    AdapterWeights { config, modules }
}

fn lora() -> LoraConfig {
    LoraConfig {
        rank: 4,
        alpha: 8.0,
        rslora: false,
        dropout: 0.0,
        targets: vec![Module::VProj, Module::QProj],
        layers: LayerSelection::All,
        overrides: Vec::new(),
    }
}

#[test]
fn golden_adapters_read_and_write_back_the_same_tensors() {
    for run in RUNS {
        let model = model(run.split('-').next().unwrap());
        for part in ["init", "final"] {
            let dir = golden(&format!("runs/{run}/{part}"));
            let weights = peft::read(&dir, &model).unwrap();
            assert_eq!((weights.config.rank, weights.config.alpha, weights.config.rslora), (4, 8.0, run.ends_with("rslora")));
            assert_eq!(weights.modules.len(), if run.ends_with("all") { 28 } else { 8 });
            assert!(weights.modules.iter().all(|m| m.b.iter().any(|x| *x != 0.0)) == (part == "final"), "{run}/{part}");
            let ours = written(&weights).read("adapter_model.safetensors").unwrap();
            let theirs = dir.read("adapter_model.safetensors").unwrap();
            let (ours, theirs) =
                (safetensors::SafeTensors::deserialize(&ours).unwrap(), safetensors::SafeTensors::deserialize(&theirs).unwrap());
            assert_eq!(ours.len(), theirs.len());
            for (name, tensor) in theirs.iter() {
                let other = ours.tensor(name).unwrap();
                assert!(other.data() == tensor.data() && other.shape() == tensor.shape(), "{run}/{part}: {name}");
            }
        }
    }
}

/// Kind: rsLoRA's alpha / sqrt(r) lost on the way through a file (TensorRT-LLM 1668, peft 2733, aprender 2111): 4 times off at r = 16.
#[test]
fn fault_rslora_scale_survives_a_file() {
    let model = model("llama");
    let config = LoraConfig { rank: 16, alpha: 16.0, rslora: true, ..lora() };
    let back = peft::read(&written(&adapter(config, &model)), &model).unwrap();
    assert_eq!(back.config.scale_of(0, Module::QProj), 4.0);
    assert!(back.config.rslora);
}

/// Kind: alpha not divided by r (mlx-vlm 986): r = 8 and alpha = 16 gave 16 instead of 2.
#[test]
fn fault_alpha_is_divided_by_rank() {
    let model = model("llama");
    let back = peft::read(&written(&adapter(LoraConfig { rank: 8, alpha: 16.0, ..lora() }, &model)), &model).unwrap();
    assert_eq!(back.config.scale_of(0, Module::QProj), 2.0);
}

/// Kind: the scale folded into B on each load (SkyRL 2250). Loading is idempotent, and so is a chain of loads and saves.
#[test]
fn fault_scale_folded_on_load_loading_twice_changes_nothing() {
    let model = model("llama");
    let dir = golden("runs/llama-qv/final");
    let first = peft::read(&dir, &model).unwrap();
    assert_eq!(first, peft::read(&dir, &model).unwrap());
    let once = peft::write(&first, "tiny").unwrap();
    let again = peft::write(&peft::read(&written(&first), &model).unwrap(), "tiny").unwrap();
    assert_eq!(once, again);
    assert_eq!(peft::digest(&once), peft::digest(&again));
}

/// Kind: alpha defaulting to 0, so that no gradient flows (tinker-cloud 15).
#[test]
fn fault_alpha_zero_is_refused() {
    let dir = copy("runs/llama-qv/init");
    edit(&dir, "adapter_config.json", "\"lora_alpha\": 8", "\"lora_alpha\": 0");
    let error = read_error(&dir, &model("llama"));
    assert_eq!(error, "adapter_config.json: alpha is 0, expected a finite number above 0");
    edit(&dir, "adapter_config.json", "\"lora_alpha\": 0", "\"lora_alpha\": null");
    assert!(read_error(&dir, &model("llama")).contains("`lora_alpha`: absent"));
}

/// Kind: keys written under another prefix, so that a reload finds nothing (Soup 335). The key set is PEFT's, and the reload has
/// non-zero B.
#[test]
fn fault_prefix_keys_are_pefts_and_reload() {
    let model = model("llama");
    let weights = adapter(lora(), &model);
    let dir = written(&weights);
    let bytes = dir.read("adapter_model.safetensors").unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = file.names();
    names.sort_unstable();
    let mut expected: Vec<String> = (0..4)
        .flat_map(|n| ["q_proj", "v_proj"].map(|m| format!("base_model.model.model.layers.{n}.self_attn.{m}.lora_")))
        .flat_map(|stem| ["A", "B"].map(|part| format!("{stem}{part}.weight")))
        .collect();
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert!(peft::read(&dir, &model).unwrap().modules.iter().all(|m| m.b.iter().any(|x| *x != 0.0)));
}

/// Kind: a prefix mismatch silently serves the base model (vLLM 34186). No match is an error, and so is a key that is left over.
#[test]
fn fault_no_matching_module_is_an_error() {
    let dir = copy("runs/llama-qv/final");
    let mut bytes = dir.read("adapter_model.safetensors").unwrap();
    let prefix = b"base_model.model.model.";
    for at in 0..bytes.len() - prefix.len() {
        if bytes[at..].starts_with(prefix) {
            bytes[at..at + prefix.len()].copy_from_slice(b"base_model.model.xodel.");
        }
    }
    dir.write("adapter_model.safetensors", bytes).unwrap();
    let error = read_error(&dir, &model("llama"));
    assert!(error.contains("`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`: absent"), "{error}");
    for (pattern, reason) in [("\"nothing.*\"", "which no linear module of the model matches"), ("[]", "a list of module names")] {
        let dir = copy("runs/llama-qv/final");
        let text = dir.read_to_string("adapter_config.json").unwrap();
        let at = text.find("\"target_modules\": [").unwrap();
        let end = at + text[at..].find(']').unwrap() + 1;
        dir.write("adapter_config.json", format!("{}\"target_modules\": {pattern}{}", &text[..at], &text[end..])).unwrap();
        let error = read_error(&dir, &model("llama"));
        assert!(error.contains(reason), "{error}");
    }
}

/// Kind: modules trained but not saved (peft 3585), or "Missing LoRA key" from an own file (torchtune 2537).
#[test]
fn fault_missing_and_extra_keys_are_named() {
    let model = model("llama");
    let dir = copy("runs/llama-qv/final");
    edit(&dir, "adapter_config.json", "\"v_proj\"", "\"k_proj\"");
    let error = read_error(&dir, &model);
    assert!(
        error.contains("`base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight`: absent, expected a tensor of shape [4, 64]"),
        "{error}"
    );
    let dir = copy("runs/llama-qv/final");
    edit(&dir, "adapter_config.json", "\"layers_to_transform\": null", "\"layers_to_transform\": [0, 1, 2]");
    let error = read_error(&dir, &model);
    assert!(error.contains("layers.3.self_attn.q_proj.lora_A.weight`: a tensor that would go unused"), "{error}");
}

/// Kind: a saved checkpoint whose weights are empty (twinkle 211), or not finite with the job called a success (ainode 186).
#[test]
fn fault_empty_or_non_finite_weights_are_not_written() {
    let model = model("llama");
    let weights = adapter(lora(), &model);
    let spoil = |change: &dyn Fn(&mut AdapterWeights)| {
        let mut weights = weights.clone();
        change(&mut weights);
        peft::write(&weights, "tiny").unwrap_err().to_string()
    };
    assert!(spoil(&|w| w.modules.clear()).contains("no modules"));
    assert!(spoil(&|w| w.modules[0].b.clear()).contains("lora_B.weight`: 0 elements of rank 4"));
    assert!(spoil(&|w| w.modules[1].a[7] = f32::NAN).contains("lora_A.weight`: element 7 is not finite"));
    let dir = written(&weights);
    let mut bytes = dir.read("adapter_model.safetensors").unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    dir.write("adapter_model.safetensors", bytes).unwrap();
    assert!(read_error(&dir, &model).contains("is not finite"));
}

#[test]
fn patterns_layers_and_targets_are_understood_as_peft_does() {
    let model = model("llama");
    let config = LoraConfig {
        layers: LayerSelection::Last(2),
        overrides: vec![
            ModuleOverride { module: "layers.3.self_attn.v_proj".into(), rank: Some(8), alpha: None },
            ModuleOverride { module: "v_proj".into(), rank: Some(2), alpha: Some(32.0) },
        ],
        ..lora()
    };
    let weights = adapter(config, &model);
    let dir = written(&weights);
    assert_eq!(peft::read(&dir, &model).unwrap(), weights);
    assert_eq!(weights.config.rank_of(3, Module::VProj), 8);
    // The same in regular expressions, and the layers as part of the targets.
    edit(&dir, "adapter_config.json", "\"layers.3.self_attn.v_proj\"", "\".*3.*v_proj\"");
    let back = peft::read(&dir, &model).unwrap();
    assert_eq!((back.config.rank_of(3, Module::VProj), back.config.rank_of(2, Module::VProj)), (8, 2));
    assert_eq!(back.modules, weights.modules);
    let text = dir.read_to_string("adapter_config.json").unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["layers_to_transform"] = serde_json::Value::Null;
    for targets in [
        serde_json::json!(r"model\.layers\.[23]\.self_attn\.(q|v)_proj"),
        serde_json::json!(["2.self_attn.q_proj", "2.self_attn.v_proj", "model.layers.3.self_attn.q_proj", "3.self_attn.v_proj"]),
    ] {
        json["target_modules"] = targets;
        dir.write("adapter_config.json", json.to_string()).unwrap();
        let back = peft::read(&dir, &model).unwrap();
        assert_eq!((back.config.layers, back.modules), (LayerSelection::Last(2), weights.modules.clone()));
    }
    json["target_modules"] = serde_json::json!(r".*(2.self_attn.q_proj|3.self_attn.v_proj)");
    dir.write("adapter_config.json", json.to_string()).unwrap();
    assert!(read_error(&dir, &model).contains("a choice of other modules in some layers"));
    json["target_modules"] = serde_json::json!(".*");
    dir.write("adapter_config.json", json.to_string()).unwrap();
    assert!(read_error(&dir, &model).contains("an adapter on `lm_head` is not supported"));
    json["target_modules"] = serde_json::json!("(?!lm_head).*");
    dir.write("adapter_config.json", json.to_string()).unwrap();
    let expected = "`target_modules`: the regular expression `(?!lm_head).*` is not supported, expected one without look-around";
    assert!(read_error(&dir, &model).contains(expected));
}

#[test]
fn all_linear_is_every_module() {
    let dir = copy("runs/llama-all/init");
    let text = dir.read_to_string("adapter_config.json").unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["target_modules"] = "all-linear".into();
    dir.write("adapter_config.json", json.to_string()).unwrap();
    assert_eq!(peft::read(&dir, &model("llama")).unwrap().config.targets, Module::ALL);
}

#[test]
fn other_features_of_peft_are_refused_by_name() {
    let model = model("llama");
    for (from, to, reason) in [
        ("\"use_dora\": false", "\"use_dora\": true", "`use_dora`: this feature of PEFT (true) is not supported"),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "`bias`: trained biases (`all`) is not supported"),
        ("\"lora_bias\": false", "\"lora_bias\": true", "`lora_bias`"),
        ("\"fan_in_fan_out\": false", "\"fan_in_fan_out\": true", "`fan_in_fan_out`"),
        ("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]", "`modules_to_save`"),
        ("\"trainable_token_indices\": null", "\"trainable_token_indices\": [3]", "`trainable_token_indices`"),
        ("\"layer_replication\": null", "\"layer_replication\": [[0, 2]]", "`layer_replication`"),
        ("\"exclude_modules\": null", "\"exclude_modules\": \"x\"", "`exclude_modules`"),
        ("\"target_parameters\": null", "\"target_parameters\": [\"x\"]", "`target_parameters`"),
        ("\"init_lora_weights\": true", "\"init_lora_weights\": \"pissa\"", "changes the base weights"),
        ("\"peft_type\": \"LORA\"", "\"peft_type\": \"LOHA\"", "the adapter type `LOHA`"),
        ("\"task_type\": \"CAUSAL_LM\"", "\"task_type\": \"SEQ_CLS\"", "the task `SEQ_CLS`"),
        ("\"use_qalora\": false", "\"use_new\": 1", "`use_new`: this feature of PEFT (1)"),
        ("\"v_proj\"", "\"embed_tokens\"", "an adapter on `embed_tokens` is not supported"),
        ("\"v_proj\"", "\"lm_head\"", "an adapter on `lm_head` is not supported"),
        ("\"r\": 4", "\"r\": 0", "`r`: 0"),
        ("\"r\": 4", "\"r\": 100000", "rank is 100000"),
        ("\"r\": 4", "\"r\": 5", "shape [4, 64], expected [5, 64]"),
        ("\"lora_dropout\": 0.0", "\"lora_dropout\": 1.5", "dropout is 1.5"),
        ("\"rank_pattern\": {}", "\"rank_pattern\": {\"x_proj\": 3}", "`rank_pattern`: `x_proj`, which no linear module"),
        ("\"alpha_pattern\": {}", "\"alpha_pattern\": {\"(\": 3}", "the regular expression"),
        ("\"layers_to_transform\": null", "\"layers_to_transform\": 9", "layers from 0 to 3"),
        ("\"layers_to_transform\": null", "\"layers_to_transform\": [0], \"layers_pattern\": \"h\"", "`layers_pattern`: \"h\""),
    ] {
        let dir = copy("runs/llama-qv/init");
        edit(&dir, "adapter_config.json", from, to);
        if to.contains("layers_pattern") {
            edit(&dir, "adapter_config.json", "\"layers_pattern\": null,", "");
        }
        let error = read_error(&dir, &model);
        assert!(error.contains(reason), "{to}: {error}");
    }
    let dir = copy("runs/llama-qv/init");
    dir.remove_file("adapter_model.safetensors").unwrap();
    assert_eq!(read_error(&dir, &model), "adapter_model.safetensors is missing, expected the adapter's weights");
}

#[test]
fn half_precision_is_widened() {
    let model = model("llama");
    let dir = copy("runs/llama-qv/final");
    let bytes = dir.read("adapter_model.safetensors").unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let halves: Vec<_> = file
        .iter()
        .map(|(name, t)| {
            let data: Vec<u8> =
                t.data().as_chunks::<4>().0.iter().flat_map(|b| half::f16::from_f32(f32::from_le_bytes(*b)).to_le_bytes()).collect();
            (name.to_owned(), t.shape().to_vec(), data)
        })
        .collect();
    let views = halves.iter().map(|(n, s, d)| (n, safetensors::tensor::TensorView::new(safetensors::Dtype::F16, s.clone(), d).unwrap()));
    let full = peft::read(&dir, &model).unwrap();
    dir.write("adapter_model.safetensors", safetensors::serialize(views, None).unwrap()).unwrap();
    let narrow = peft::read(&dir, &model).unwrap();
    for (f, n) in full.modules.iter().zip(&narrow.modules) {
        assert!(f.b.iter().zip(&n.b).all(|(f, n)| half::f16::from_f32(*f).to_f32() == *n));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Written and read back, an adapter is what it was.
    #[test]
    fn round_trips(
        rank in 1_u32..9, alpha in 1_u32..64, half_alpha: bool, rslora: bool, dropout in 0_u32..10,
        targets in proptest::sample::subsequence(Module::ALL.to_vec(), 1..=7).prop_shuffle(),
        layers in prop_oneof![Just(LayerSelection::All), (1_u32..4).prop_map(LayerSelection::Last), Just(LayerSelection::Only(vec![0, 2]))],
        over_rank in proptest::option::of(1_u32..9), over_alpha in proptest::option::of(1_u32..64),
    ) {
        let model = model("qwen3");
        let overrides = match (over_rank, over_alpha) {
            (None, None) => Vec::new(),
            (rank, alpha) => vec![ModuleOverride { module: targets[0].name().into(), rank, alpha: alpha.map(|a| a as f32) }],
        };
        let alpha = if half_alpha { alpha as f32 + 0.1 } else { alpha as f32 };
        let config = LoraConfig { rank, alpha, rslora, dropout: dropout as f32 / 10.0, targets, layers, overrides };
        let weights = adapter(config, &model);
        prop_assert_eq!(peft::read(&written(&weights), &model).unwrap(), weights);
    }

    /// Whatever bytes a folder holds, reading it answers.
    #[test]
    fn hostile_bytes_are_answered(at in 0_usize..2000, byte: u8) {
        let model = model("llama");
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            let dir = copy("runs/llama-qv/init");
            let mut bytes = dir.read(file).unwrap();
            let at = at % bytes.len();
            bytes[at] = byte;
            dir.write(file, bytes).unwrap();
            let _ = peft::read(&dir, &model);
        }
    }
}
