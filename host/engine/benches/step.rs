//! A whole training step of SmolLM2-135M's shape with random weights, through the engine, on two threads: LoRA of rank 8 on q and v, 2
//! sequences of 96 rows; all rows labelled, and the last 62 of each, which is what prompts of the Jargon File leave.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a measurement fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nodus_engine::{Engine, Options};
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::{HostTensor, philox, uniform};
use nodus_protocol::{
    AdamW, AdapterSlot, Architecture, Batch, Command, JobSlot, LayerSelection, LoraConfig, ModelConfig, Module, Normalisation, Reply,
    Sequence,
};

const ROWS: usize = 96;
const SEQUENCES: u32 = 2;

/// Small random weights of the shapes that the configuration asks for.
fn weights(model: &ModelConfig) -> BTreeMap<String, HostTensor> {
    let noise = |key: u64, len: usize, scale: f32| -> Vec<f32> {
        let four = |i: usize| philox(key, [i as u32, 0, 0, 0]).map(|bits| (uniform(bits) - 0.5) * scale);
        (0..len.div_ceil(4)).flat_map(four).take(len).collect()
    };
    let mut tensors = BTreeMap::new();
    let mut add = |name: String, values: Vec<f32>, shape: Vec<usize>| {
        drop(tensors.insert(name, HostTensor::from_f32(&values, shape).unwrap()));
    };
    let (hidden, vocabulary) = (model.hidden_size, model.vocab_size);
    add("model.embed_tokens.weight".into(), noise(0, vocabulary * hidden, 0.1), vec![vocabulary, hidden]);
    add("model.norm.weight".into(), vec![1.0; hidden], vec![hidden]);
    for layer in 0..model.num_hidden_layers {
        for name in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("model.layers.{layer}.{name}.weight"), vec![1.0; hidden], vec![hidden]);
        }
        for (number, module) in (1..).zip(Module::ALL) {
            let (inputs, outputs) = (model.module_in(module), model.module_out(module));
            let name = format!("model.layers.{layer}.{}.weight", module.path());
            add(name, noise(layer as u64 * 16 + number, inputs * outputs, 0.1), vec![outputs, inputs]);
        }
    }
    tensors
}

fn smollm2() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: 64,
        vocab_size: 49_152,
        max_position_embeddings: 8192,
        rms_norm_eps: 1e-5,
        rope_theta: 100_000.0,
        rope_scaling: None,
        sliding_window: None,
        tie_word_embeddings: true,
        qkv_bias: false,
        eos_token_id: None,
        bos_token_id: None,
    }
}

fn batch(model: &ModelConfig, labelled: usize) -> Batch {
    let sequence = |number: u32| {
        let tokens = (0..=ROWS as u32).map(|i| (number * 1000 + i * 37) % 49_152).collect::<Vec<_>>();
        let weights = (0..ROWS).map(|i| if i + labelled >= ROWS { 1.0 } else { 0.0 }).collect();
        let (inputs, targets): (Vec<u32>, Vec<u32>) = tokens.windows(2).map(|pair| (pair[0], pair[1])).unzip();
        Arc::new(Sequence::new(model, inputs, targets, weights).unwrap())
    };
    Batch { sequences: (0..SEQUENCES).map(sequence).collect() }
}

fn step(criterion: &mut Criterion) {
    let model = smollm2();
    let mut engine = Engine::new(CpuDevice::new(2).unwrap(), Options::default());
    let trunk = engine.add_trunk(&model, &weights(&model)).unwrap();
    let slot = AdapterSlot { job: JobSlot(0), index: 0 };
    let config = LoraConfig {
        rank: 8,
        alpha: 16.0,
        rslora: false,
        dropout: 0.0,
        targets: vec![Module::QProj, Module::VProj],
        layers: LayerSelection::All,
        overrides: Vec::new(),
    };
    engine.execute(Command::CreateAdapter { slot, trunk, config, seed: 0, cohort: None }).unwrap();
    let optimiser = AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: None,
        normalisation: Normalisation::WeightSum,
    };
    let mut group = criterion.benchmark_group("step of SmolLM2-135M, r=8 on q and v, 2x96");
    group.sample_size(10).measurement_time(Duration::from_secs(10)).throughput(Throughput::Elements(u64::from(SEQUENCES) * ROWS as u64));
    for labelled in [ROWS, 62] {
        let batch = batch(&model, labelled);
        group.bench_function(format!("{labelled} of {ROWS} labelled"), |b| {
            b.iter(|| {
                let reply = engine.execute(Command::TrainStep { slot, batch: batch.clone(), optimiser });
                assert!(matches!(reply, Ok(Reply::Step(_))), "{reply:?}");
            });
        });
    }
}

criterion_group!(benches, step);
criterion_main!(benches);
