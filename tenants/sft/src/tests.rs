//! What can be proven without a host: defaults, refusals, counts, and agreement with a loaded adapter.

use nodus_guest::{AdamW, LayerSelection, LoraConfig, TrunkInfo, parse_params};
use serde_json::{Value, json};

use crate::adapter::{agree, fresh};
use crate::forms::{Decay, Targets};
use crate::params::Params;

fn trunk() -> TrunkInfo {
    TrunkInfo {
        architecture: "llama".into(),
        layers: 4,
        hidden_size: 64,
        vocabulary_size: 256,
        context_length: 128,
        eos_token: None,
        target_modules: ["q_proj", "k_proj", "v_proj", "o_proj"].map(String::from).to_vec(),
        digest: String::new(),
    }
}

fn params(json: &Value) -> Params {
    parse_params(&json.to_string()).unwrap()
}

/// What is said about these parameters, by whichever check refuses them first.
fn refusal(json: &Value) -> String {
    match parse_params::<Params>(&json.to_string()) {
        Ok(params) => params.validate(&trunk()).unwrap_err().to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn defaults_are_those_of_the_readme() {
    let params = params(&json!({}));
    params.validate(&trunk()).unwrap();
    let config = fresh(&params, &trunk());
    assert_eq!(config, LoraConfig::new(8).alpha(16.0).targets(["q_proj", "v_proj"]));
    assert_eq!(params.optimiser(2e-4), AdamW::new(2e-4));
    assert_eq!((params.learning_rate, params.schedule), (2e-4, Decay::Constant));
    assert_eq!((params.batch_size, params.gradient_accumulation, params.evaluate_every), (8, 1, 0));
    assert_eq!((params.total_steps(7), params.warmup(7)), (7, 0));
    assert!(params.shuffle && params.max_length.is_none() && params.patience.is_none());
}

#[test]
fn every_parameter_has_its_row_in_the_readme() {
    let rows: Vec<&str> = include_str!("../README.md").lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let refused = refusal(&json!({ "?": 1 }));
    assert_eq!(refused.split("Known are ").last().unwrap(), rows.join(", "));
}

#[test]
fn targets_and_layers_have_their_forms() {
    let config = |json| fresh(&params(&json), &trunk());
    assert_eq!(config(json!({"targets": "all-linear"})).targets, trunk().target_modules);
    assert_eq!(config(json!({"targets": ["o_proj"]})).targets, ["o_proj"]);
    assert_eq!(config(json!({"layers": "all"})).layers, LayerSelection::All);
    assert_eq!(config(json!({"layers": {"last": 2}})).layers, LayerSelection::Last(2));
    assert_eq!(config(json!({"layers": [0, 3]})).layers, LayerSelection::Only(vec![0, 3]));
    assert_eq!(params(&json!({"targets": null})).targets, None);
    let text = refusal(&json!({"targets": "q_proj"}));
    assert!(text.starts_with("parameters: targets: found \"q_proj\", expected a list of module names"), "{text}");
    let text = refusal(&json!({"layers": {"first": 2}}));
    assert!(text.starts_with("parameters: layers: unknown parameter `first`, expected `last`"), "{text}");
    assert_eq!(params(&json!({"targets": ["a"]})).targets, Some(Targets::Names(vec!["a".into()])));
}

#[test]
fn refusals_name_the_parameter_its_value_and_the_range() {
    let cases = [
        (json!({"rank": 0}), "rank is 0, expected 1 to 512"),
        (json!({"rank": 513}), "rank is 513, expected 1 to 512"),
        (json!({"alpha": 0}), "alpha is 0, expected a finite number above 0"),
        (json!({"dropout": 1}), "dropout is 1, expected 0 to below 1"),
        (json!({"learning_rate": -1e-3}), "learning_rate is -0.001, expected a finite number, 0 or more"),
        (json!({"learning_rate": 1e300}), "expected a finite number, 0 or more"),
        (json!({"beta2": 1.0}), "beta2 is 1, expected 0 to below 1"),
        (json!({"eps": 0}), "eps is 0, expected a finite number above 0"),
        (json!({"weight_decay": -1}), "weight_decay is -1, expected a finite number, 0 or more"),
        (json!({"max_grad_norm": 0}), "max_grad_norm is 0, expected a finite number above 0, or null for no clipping"),
        (json!({"warmup_ratio": 1.5}), "warmup_ratio is 1.5, expected 0 to 1"),
        (json!({"batch_size": 0}), "batch_size is 0, expected 1 or more"),
        (json!({"gradient_accumulation": 0}), "gradient_accumulation is 0, expected 1 or more"),
        (json!({"epochs": 0}), "epochs is 0, expected 1 or more"),
        (json!({"steps": 0}), "steps is 0, expected 1 or more"),
        (json!({"max_length": 1}), "max_length is 1, expected 2 to the model's context of 128"),
        (json!({"max_length": 129}), "max_length is 129, expected 2 to the model's context of 128"),
        (json!({"patience": 0, "evaluate_every": 1}), "patience is 0, expected 1 or more"),
        (json!({"patience": 2}), "patience needs evaluate_every, which is 0: set it to a number of steps"),
        (json!({"epochs": 1, "steps": 1}), "epochs and steps are both given, expected at most one of them"),
        (json!({"warmup_steps": 1, "warmup_ratio": 0.1}), "warmup_steps and warmup_ratio are both given, expected at most one of them"),
        (json!({"targets": []}), "targets is an empty list, expected \"all-linear\", or some of q_proj, k_proj, v_proj, o_proj"),
        (json!({"targets": ["c_attn"]}), "targets is a list with `c_attn`, expected some of q_proj, k_proj, v_proj, o_proj"),
        (json!({"targets": ["q_proj", "q_proj"]}), "targets is a list with `q_proj` twice, expected each once"),
        (json!({"layers": {"last": 5}}), "layers is the last 5, expected the last 1 to 4"),
        (json!({"layers": [4]}), "layers is [4], expected layers from 0 to 3, at least one, each once"),
        (json!({"layers": []}), "layers is [], expected layers from 0 to 3, at least one, each once"),
        (json!({"schedule": "step"}), "schedule: found `step`, expected one of `constant`, `linear`, `cosine`"),
        (json!({"lr": 1e-4}), "unknown parameter `lr`. Known are rank, alpha, "),
        (json!({"warmup_step": 3}), "unknown parameter `warmup_step`, did you mean `warmup_steps`?"),
    ];
    for (json, expected) in cases {
        let text = refusal(&json);
        assert!(text.contains(expected), "{json}: {text}");
    }
}

#[test]
fn steps_and_warm_up_are_counted() {
    assert_eq!(params(&json!({"epochs": 3})).total_steps(7), 21);
    assert_eq!(params(&json!({"steps": 5})).total_steps(7), 5);
    assert_eq!(params(&json!({"warmup_ratio": 0.1})).warmup(21), 3, "rounded up, as transformers does");
    assert_eq!(params(&json!({"warmup_steps": 4})).warmup(21), 4);
    let linear = params(&json!({"schedule": "linear", "learning_rate": 1.0, "warmup_steps": 2})).schedule(6);
    assert_eq!([0, 1, 2, 4].map(|step| linear.at(step)), [0.5, 1.0, 1.0, 0.5]);
    let cosine = params(&json!({"schedule": "cosine", "learning_rate": 1.0})).schedule(4);
    assert_eq!([0, 2].map(|step| cosine.at(step)), [1.0, 0.5]);
}

#[test]
fn a_loaded_adapter_must_agree_with_what_is_given() {
    let loaded = LoraConfig::new(16).alpha(8.0).rslora(true).targets(["v_proj", "q_proj"]).last_layers(1);
    let checked = |json| agree(&params(&json), &loaded, &trunk()).map_err(|error| error.to_string());
    assert_eq!(checked(json!({})), Ok(()));
    let same = json!({"rank": 16, "alpha": 8, "rslora": true, "dropout": 0, "targets": ["q_proj", "v_proj"], "layers": [3]});
    assert_eq!(checked(same), Ok(()), "order and form do not count");
    for (json, expected) in [
        (json!({"rank": 8}), "rank is 8, but the adapter in init_adapter has 16"),
        (json!({"alpha": 16}), "alpha is 16.0, but the adapter in init_adapter has 8.0"),
        (json!({"rslora": false}), "rslora is false, but the adapter in init_adapter has true"),
        (json!({"dropout": 0.5}), "dropout is 0.5, but the adapter in init_adapter has 0.0"),
        (json!({"targets": ["q_proj"]}), r#"targets is {"q_proj"}, but the adapter in init_adapter has {"q_proj", "v_proj"}"#),
        (json!({"layers": "all"}), "layers is [0, 1, 2, 3], but the adapter in init_adapter has [3]"),
    ] {
        assert!(checked(json.clone()).is_err_and(|text| text.starts_with(expected)), "{json}");
    }
}
