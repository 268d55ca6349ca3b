//! Reference runs of transformers and PEFT (tests/golden, made by make_golden.py): losses, gradients and final adapters.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use nodus_engine::{Engine, Options};
use nodus_kernels::cuda::Precision;
use nodus_kernels::{Device, HostTensor};
use nodus_protocol::{
    AdamW, AdapterWeights, Architecture, Batch, Command, LayerSelection, LoraConfig, ModelConfig, Module, ModuleWeights, Normalisation,
    Sequence,
};
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::devices::{Cpu, Cuda, Devices};
use crate::support::{TRUNK, done, losses, slot, step, weights};

const RUNS: [&str; 9] =
    ["llama-qv", "llama-all", "llama-qv-rslora", "qwen2-qv", "qwen2-all", "qwen3-qv", "qwen3-all", "mistral-qv", "mistral-all"];

#[derive(Deserialize)]
struct Run {
    model: String,
    target_modules: Vec<String>,
    r: u32,
    lora_alpha: f32,
    use_rslora: bool,
    lr: f32,
    betas: [f32; 2],
    eps: f32,
    weight_decay: f32,
    loss: Vec<f32>,
    grad_norm: Vec<f32>,
}

#[derive(Deserialize)]
struct Config {
    model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    rope_parameters: RopeParameters,
    sliding_window: Option<usize>,
    tie_word_embeddings: bool,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: f64,
}

/// `NODUS_GOLDEN` names the folder where the repository is elsewhere.
#[expect(clippy::disallowed_methods, reason = "a test has no main to hand it the environment")]
fn path(name: &str) -> PathBuf {
    let golden = std::env::var_os("NODUS_GOLDEN").map(PathBuf::from);
    golden.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")).join(name)
}

#[expect(clippy::disallowed_methods, reason = "a test reads the repository's golden files")]
fn read(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn json<T: for<'a> Deserialize<'a>>(name: &str) -> T {
    serde_json::from_slice(&read(name)).unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn tensors(name: &str) -> BTreeMap<String, (Vec<f32>, Vec<usize>)> {
    let bytes = read(name);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, view)| (name, (floats(view.data()), view.shape().to_vec()))).collect()
}

fn model(name: &str) -> ModelConfig {
    let config: Config = json(&format!("models/{name}/config.json"));
    let architecture = match config.model_type.as_str() {
        "llama" => Architecture::Llama,
        "mistral" => Architecture::Mistral,
        "qwen2" => Architecture::Qwen2,
        "qwen3" => Architecture::Qwen3,
        other => panic!("{other}"),
    };
    ModelConfig {
        architecture,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        head_dim: config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads),
        vocab_size: config.vocab_size,
        max_position_embeddings: config.max_position_embeddings,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.rope_parameters.rope_theta,
        rope_scaling: None,
        sliding_window: config.sliding_window,
        qkv_bias: architecture == Architecture::Qwen2,
        tie_word_embeddings: config.tie_word_embeddings,
        eos_token_id: None,
        bos_token_id: None,
    }
}

/// An adapter file of PEFT in the engine's order.
fn adapter(file: &str, config: &LoraConfig, model: &ModelConfig) -> AdapterWeights {
    let tensors = tensors(file);
    let read = |(layer, module): (usize, Module)| {
        let part = |part: &str| tensors[&format!("base_model.model.model.layers.{layer}.{}.lora_{part}.weight", module.path())].0.clone();
        ModuleWeights { layer, module, rank: config.rank_of(layer, module) as usize, a: part("A"), b: part("B") }
    };
    let modules: Vec<_> = config.modules(model).map(read).collect();
    assert_eq!(2 * modules.len(), tensors.len(), "{file} has tensors that the configuration does not name");
    AdapterWeights { config: config.clone(), modules }
}

/// Batch of every step: padding dropped, labels shifted once, label -100 has weight 0.
fn batches(model: &ModelConfig) -> Vec<Batch> {
    let bytes = read("data/tokens.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let list = |name: &str| -> Vec<i64> {
        file.tensor(name).unwrap().data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let (ids, labels, mask) = (list("input_ids"), list("labels"), list("attention_mask"));
    let shape = file.tensor("input_ids").unwrap().shape().to_vec();
    let (sequences, width) = (shape[1], shape[2]);
    let row = |at: usize| {
        let n = mask[at..at + width].iter().filter(|m| **m == 1).count();
        let ids: Vec<u32> = ids[at..at + n].iter().map(|id| u32::try_from(*id).unwrap()).collect();
        let weights = labels[at + 1..at + n].iter().map(|label| if *label == -100 { 0.0 } else { 1.0 }).collect();
        Arc::new(Sequence::new(model, ids[..n - 1].into(), ids[1..].into(), weights).unwrap())
    };
    (0..shape[0]).map(|s| Batch { sequences: (0..sequences).map(|b| row((s * sequences + b) * width)).collect() }).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

/// How far from the reference a run may be.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    loss: f32,
    /// Of the rest: the first gradient against its norm, norms of gradients against theirs, and weights of the final adapter. In bf16
    /// AdamW's first steps, which are a learning rate in a direction that rounding chooses where a gradient is small, leave nothing to hold
    /// weights to.
    rest: Option<(f64, f32, f32)>,
}

impl Limits {
    pub(crate) const F32: Self = Self { loss: 1e-5, rest: Some((1e-5, 1e-4, 1e-4)) };
    pub(crate) const BF16: Self = Self { loss: 2e-2, rest: None };
}

/// Step-0 gradients: each tensor within `limit` of its own norm.
fn check_gradients(name: &str, mut found: AdapterWeights, expected: &AdapterWeights, weight_sum: f64, limit: f64) {
    for (found, expected) in found.modules.iter_mut().zip(&expected.modules) {
        for (part, found, expected) in [("A", &mut found.a, &expected.a), ("B", &mut found.b, &expected.b)] {
            found.iter_mut().for_each(|g| *g = (f64::from(*g) / weight_sum) as f32);
            let (off, size) = (norm(&difference(found, expected)), norm(expected));
            assert!(off <= limit * size, "{name}: layer {} {part}: {off} off, norm {size}", expected.len());
        }
    }
}

/// The weights of A whose first gradient in the reference (at step 1, since B is zero at step 0) is below five times AdamW's eps. Their
/// first move lr g / (|g| + eps) is decided by rounding, so they are held to one learning rate, all others to 1e-4.
fn undecided_weights(gradients: &AdapterWeights, eps: f32) -> Vec<(usize, Module, usize)> {
    let of = |m: &ModuleWeights| -> Vec<_> {
        m.a.iter().enumerate().filter(|(_, g)| g.abs() < 5.0 * eps).map(|(i, _)| (m.layer, m.module, i)).collect()
    };
    gradients.modules.iter().flat_map(of).collect()
}

fn check<D: Device>(name: &str, device: D, limits: Limits) -> (f32, f32, D) {
    let run: Run = json(&format!("runs/{name}/loss.json"));
    let model = model(&run.model);
    let config = LoraConfig {
        rank: run.r,
        alpha: run.lora_alpha,
        rslora: run.use_rslora,
        dropout: 0.0,
        targets: run.target_modules.iter().map(|target| target.parse().unwrap()).collect(),
        layers: LayerSelection::All,
        overrides: Vec::new(),
    };
    let trunk = tensors(&format!("models/{}/model.safetensors", run.model));
    let trunk = trunk.into_iter().map(|(name, (data, shape))| (name, HostTensor::from_f32(&data, shape).unwrap())).collect();
    let mut engine = Engine::new(device, Options::default());
    engine.add_trunk(&model, &trunk).unwrap();
    let init = Arc::new(adapter(&format!("runs/{name}/init/adapter_model.safetensors"), &config, &model));
    done(engine.execute(Command::LoadAdapter { slot: slot(0), trunk: TRUNK, weights: init, seed: 0, cohort: None }));
    let optimiser = AdamW {
        learning_rate: run.lr,
        beta1: run.betas[0],
        beta2: run.betas[1],
        eps: run.eps,
        weight_decay: run.weight_decay,
        max_grad_norm: None,
        normalisation: Normalisation::WeightSum,
    };
    let (mut worst, batches) = (0.0_f32, batches(&model));
    let undecided = undecided_weights(&adapter(&format!("runs/{name}/grads_step1.safetensors"), &config, &model), run.eps);
    assert!(undecided.len() <= 1, "{name}: {undecided:?}");
    assert_eq!(run.loss.len(), batches.len());
    for (i, batch) in batches.iter().enumerate() {
        let sums = losses(engine.execute(Command::ForwardBackward { slot: slot(0), batch: batch.clone() }));
        let weight_sum = sums.iter().map(|s| s.weight_sum).sum();
        if let (0, Some((limit, ..))) = (i, limits.rest) {
            let expected = adapter(&format!("runs/{name}/grads_step0.safetensors"), &config, &model);
            check_gradients(name, engine.gradients(slot(0)).unwrap(), &expected, weight_sum, limit);
        }
        let report = step(engine.execute(Command::OptimStep { slot: slot(0), optimiser }));
        let (off, norm_off) = ((report.loss - run.loss[i]).abs(), (report.grad_norm / run.grad_norm[i] - 1.0).abs());
        worst = worst.max(off);
        assert!(off <= limits.loss, "{name}, step {i}: loss {} instead of {}", report.loss, run.loss[i]);
        assert!(
            limits.rest.is_none_or(|(_, limit, _)| norm_off <= limit),
            "{name}, step {i}: gradient norm {} instead of {}",
            report.grad_norm,
            run.grad_norm[i]
        );
    }
    let expected = adapter(&format!("runs/{name}/final/adapter_model.safetensors"), &config, &model);
    let found = weights(engine.execute(Command::Export { slot: slot(0) }));
    let (mut off, mut place) = (0.0_f32, String::new());
    for (found, expected) in found.modules.iter().zip(&expected.modules) {
        let undecided = |i: usize| undecided.contains(&(found.layer, found.module, i));
        let a = difference(&found.a, &expected.a).into_iter().enumerate();
        let a = a.map(|(i, x)| ("A", i, if undecided(i) { x.abs() / run.lr * 1e-4 } else { x.abs() }));
        let b = difference(&found.b, &expected.b).into_iter().enumerate().map(|(i, x)| ("B", i, x.abs()));
        for (part, i, x) in a.chain(b).filter(|(.., x)| *x > 0.0) {
            if x > off {
                (off, place) = (x, format!("layers.{}.{} {part}[{i}]", found.layer, found.module));
            }
        }
    }
    assert!(limits.rest.is_none_or(|(.., limit)| off <= limit), "{name}: final adapter is {off} off at {place}");
    (worst, off, engine.into_device())
}

fn check_all(devices: &impl Devices, limits: Limits) {
    for name in RUNS {
        let (loss, adapter, device) = check(name, devices.open(2), limits);
        devices.give_back(device);
        println!("{name}: losses within {loss:.1e}, final adapter within {adapter:.1e}");
    }
}

/// The same on a card, where there is one.
pub(crate) fn on_a_card(test: &str, precision: Precision, limits: Limits) {
    let models = ["llama", "qwen2", "qwen3", "mistral"].map(model).to_vec();
    if let Some(devices) = Cuda::new(test, precision, models) {
        check_all(&devices, limits);
    }
}

/// Loss scale, labels, padding, LoRA scale (also rsLoRA's): one error in any of them shows here.
#[test]
fn runs_agree_with_transformers_and_peft() {
    check_all(&Cpu, Limits::F32);
}
