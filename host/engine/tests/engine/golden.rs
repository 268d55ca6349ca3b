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
    /// Of the same run with the base model in bfloat16.
    loss_bf16: Vec<f32>,
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
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Limits {
    /// Losses within 1e-5; gradients of the first step within 1e-5 of their tensor's norm, of the second, which follow from moved weights,
    /// within 1e-3; norms of gradients within 1e-4 of theirs; weights of the final adapter within 1e-4, beyond what the rounding of their first
    /// gradient has moved them.
    F32,
    /// Losses of the first ten steps within 2e-2; of the others, by which AdamW at a learning rate of 1e-2 has made much of any rounding, within
    /// what transformers and PEFT get from their own float32 losses in bfloat16 in the worst of these runs. Nothing else: where a gradient is
    /// small, rounding chooses the direction of a weight's first moves.
    Bf16,
}

/// Gradients of a step: each tensor within `limit` of its own norm.
fn check_gradients(name: &str, found: &AdapterWeights, expected: &AdapterWeights, limit: f64) {
    for (found, expected) in found.modules.iter().zip(&expected.modules) {
        for (part, found, expected) in [("A", &found.a, &expected.a), ("B", &found.b, &expected.b)] {
            let (off, size) = (norm(&difference(found, expected)), norm(expected));
            assert!(off <= limit * size, "{name}: layer {} {part}: {off} off, norm {size}", expected.len());
        }
    }
}

/// AdamW's move of a weight at step `t` whose only gradient that is not zero is that of this step, divided by the learning rate: about the gradient's sign,
/// but for gradients near eps, where an error of the gradient far below its tensor's norm shows.
fn first_move(gradient: f32, t: i32, optimiser: &AdamW) -> f64 {
    let (g, beta1, beta2) = (f64::from(gradient), f64::from(optimiser.beta1), f64::from(optimiser.beta2));
    let (m, v) = ((1.0 - beta1) * g / (1.0 - beta1.powi(t)), (1.0 - beta2) * g * g / (1.0 - beta2.powi(t)));
    m / (v.sqrt() + f64::from(optimiser.eps))
}

/// How far rounding of gradients alone has moved each weight: A's first gradient is that of step 1, since B is zero at step 0.
fn moved(gradients: &[[AdapterWeights; 2]; 2], optimiser: &AdamW) -> Vec<[Vec<f64>; 2]> {
    let apart = |found: &[f32], expected: &[f32], t| -> Vec<f64> {
        let apart = |(a, b): (&f32, &f32)| (first_move(*a, t, optimiser) - first_move(*b, t, optimiser)).abs();
        found.iter().zip(expected).map(apart).map(|x| x * f64::from(optimiser.learning_rate)).collect()
    };
    let [[found_b, expected_b], [found_a, expected_a]] = gradients;
    let a = found_a.modules.iter().zip(&expected_a.modules).map(|(found, expected)| apart(&found.a, &expected.a, 2));
    let b = found_b.modules.iter().zip(&expected_b.modules).map(|(found, expected)| apart(&found.b, &expected.b, 1));
    a.zip(b).map(|(a, b)| [a, b]).collect()
}

/// The largest difference of two adapters beyond what each weight may be moved, and where.
fn farthest(found: &AdapterWeights, expected: &AdapterWeights, moved: &[[Vec<f64>; 2]]) -> (f32, String) {
    let mut farthest = (0.0_f32, String::new());
    for ((found, expected), moved) in found.modules.iter().zip(&expected.modules).zip(moved) {
        for (part, a, b, moved) in [("A", &found.a, &expected.a, &moved[0]), ("B", &found.b, &expected.b, &moved[1])] {
            for (i, (x, moved)) in difference(a, b).into_iter().zip(moved).enumerate() {
                let beyond = (f64::from(x.abs()) - moved) as f32;
                if beyond > farthest.0 {
                    let place = format!(
                        "layers.{}.{} {part}[{i}], {x:e} off, of which its first gradient explains {moved:e}",
                        found.layer, found.module
                    );
                    farthest = (beyond, place);
                }
            }
        }
    }
    farthest
}

/// A reference run, and what it is run with.
struct Reference {
    name: &'static str,
    run: Run,
    model: ModelConfig,
    config: LoraConfig,
    optimiser: AdamW,
}

impl Reference {
    fn open(name: &'static str) -> Self {
        let run: Run = json(&format!("runs/{name}/loss.json"));
        let config = LoraConfig {
            rank: run.r,
            alpha: run.lora_alpha,
            rslora: run.use_rslora,
            dropout: 0.0,
            targets: run.target_modules.iter().map(|target| target.parse().unwrap()).collect(),
            layers: LayerSelection::All,
            overrides: Vec::new(),
        };
        let optimiser = AdamW {
            learning_rate: run.lr,
            beta1: run.betas[0],
            beta2: run.betas[1],
            eps: run.eps,
            weight_decay: run.weight_decay,
            max_grad_norm: None,
            normalisation: Normalisation::WeightSum,
        };
        Self { name, model: model(&run.model), run, config, optimiser }
    }

    fn adapter(&self, file: &str) -> AdapterWeights {
        adapter(&format!("runs/{}/{file}.safetensors", self.name), &self.config, &self.model)
    }

    fn engine<D: Device>(&self, device: D) -> Engine<D> {
        let trunk = tensors(&format!("models/{}/model.safetensors", self.run.model));
        let trunk = trunk.into_iter().map(|(name, (data, shape))| (name, HostTensor::from_f32(&data, shape).unwrap())).collect();
        let mut engine = Engine::new(device, Options::default());
        engine.add_trunk(&self.model, &trunk).unwrap();
        let init = Arc::new(self.adapter("init/adapter_model"));
        done(engine.execute(Command::LoadAdapter { slot: slot(0), trunk: TRUNK, weights: init, seed: 0, cohort: None }));
        engine
    }

    /// Accumulates a step's gradient; its mean.
    fn gradient<D: Device>(engine: &mut Engine<D>, batch: &Batch) -> AdapterWeights {
        let sums = losses(engine.execute(Command::ForwardBackward { slot: slot(0), batch: batch.clone() }));
        let weight_sum: f64 = sums.iter().map(|s| s.weight_sum).sum();
        let mut gradient = engine.gradients(slot(0)).unwrap();
        let values = gradient.modules.iter_mut().flat_map(|module| module.a.iter_mut().chain(&mut module.b));
        values.for_each(|g| *g = (f64::from(*g) / weight_sum) as f32);
        gradient
    }

    /// Runs it: how far the losses of its first ten steps, of its last ten, and its final adapter were off; in words what is too far.
    fn check<D: Device>(&self, device: D, limits: Limits) -> (D, String, Vec<String>) {
        let Self { name, run, model, optimiser, .. } = self;
        let (mut engine, batches) = (self.engine(device), batches(model));
        let (mut worst, mut faults, mut gradients) = ([0.0_f32; 2], Vec::new(), Vec::new());
        assert_eq!(run.loss.len(), batches.len());
        for (i, batch) in batches.iter().enumerate() {
            let gradient = Self::gradient(&mut engine, batch);
            if i < 2 {
                gradients.push([gradient, self.adapter(&format!("grads_step{i}"))]);
            }
            let report = step(engine.execute(Command::OptimStep { slot: slot(0), optimiser: *optimiser }));
            let (off, norm_off) = ((report.loss - run.loss[i]).abs(), (report.grad_norm / run.grad_norm[i] - 1.0).abs());
            let late = usize::from(i >= 10);
            worst[late] = worst[late].max(off);
            if off > limits.loss(late) {
                faults.push(format!("{name}, step {i}: loss {} instead of {}", report.loss, run.loss[i]));
            }
            if limits == Limits::F32 && norm_off > 1e-4 {
                faults.push(format!("{name}, step {i}: gradient norm {} instead of {}", report.grad_norm, run.grad_norm[i]));
            }
        }
        let gradients: [[AdapterWeights; 2]; 2] = gradients.try_into().unwrap();
        let found = weights(engine.execute(Command::Export { slot: slot(0) }));
        let (off, place) = farthest(&found, &self.adapter("final/adapter_model"), &moved(&gradients, optimiser));
        if limits == Limits::F32 {
            for ([found, expected], limit) in gradients.iter().zip([1e-5, 1e-3]) {
                check_gradients(name, found, expected, limit);
            }
            if off > 1e-4 {
                faults.push(format!("{name}: the final adapter is {off:e} off at {place}"));
            }
        }
        let told = format!("{name}: losses within {:.1e}, then {:.1e}; final adapter within {off:.1e} at {place}", worst[0], worst[1]);
        (engine.into_device(), told, faults)
    }
}

impl Limits {
    /// Of losses, in the first ten steps or in the others.
    fn loss(self, late: usize) -> f32 {
        match (self, late) {
            (Self::F32, _) => 1e-5,
            (Self::Bf16, 0) => 2e-2,
            (Self::Bf16, _) => RUNS.iter().map(|name| drift(&json(&format!("runs/{name}/loss.json")))).fold(0.0, f32::max),
        }
    }
}

/// How far the reference's own losses in bfloat16 are from those in float32.
fn drift(run: &Run) -> f32 {
    run.loss_bf16.iter().zip(&run.loss).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn check_all(devices: &impl Devices, limits: Limits) {
    let mut faults = Vec::new();
    for name in RUNS {
        let (device, told, found) = Reference::open(name).check(devices.open(2), limits);
        devices.give_back(device);
        println!("{told}");
        faults.extend(found);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
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
