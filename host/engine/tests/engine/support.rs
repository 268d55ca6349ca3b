//! Small trunks, batches and commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodus_engine::{Engine, Options};
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::{Device, HostTensor, philox, uniform};
use nodus_protocol::{
    AdamW, AdapterSlot, AdapterWeights, Architecture, Batch, Command, EngineError, JobSlot, LayerSelection, LoraConfig, ModelConfig,
    Module, Normalisation, Reply, Sequence, SequenceLoss, StepReport, TrunkSlot,
};

pub(crate) const TRUNK: TrunkSlot = TrunkSlot(0);

/// Four layers, small enough for hundreds of passes.
pub(crate) fn model(architecture: Architecture) -> ModelConfig {
    ModelConfig {
        architecture,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        vocab_size: 50,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        rope_scaling: None,
        sliding_window: (architecture == Architecture::Mistral).then_some(5),
        qkv_bias: architecture == Architecture::Qwen2,
        tie_word_embeddings: architecture == Architecture::Qwen2,
        eos_token_id: None,
        bos_token_id: None,
    }
}

/// Numbers in +-1 by counter.
pub(crate) fn noise(key: u64, len: usize) -> Vec<f32> {
    (0..len as u32).map(|i| 2.0 * uniform(philox(key, [i, 0, 0, 0])[0]) - 1.0).collect()
}

/// Every tensor that the architecture needs, random.
pub(crate) fn tensors(model: &ModelConfig) -> BTreeMap<String, HostTensor> {
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![model.vocab_size, model.hidden_size]),
        ("model.norm.weight".into(), vec![model.hidden_size]),
        ("lm_head.weight".into(), vec![model.vocab_size, model.hidden_size]),
    ];
    for layer in 0..model.num_hidden_layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        for module in Module::ALL {
            shapes.push((name(&format!("{}.weight", module.path())), vec![model.module_out(module), model.module_in(module)]));
            shapes.push((name(&format!("{}.bias", module.path())), vec![model.module_out(module)]));
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            shapes.push((name(&format!("{norm}.weight")), vec![model.hidden_size]));
        }
        for norm in ["self_attn.q_norm", "self_attn.k_norm"] {
            shapes.push((name(&format!("{norm}.weight")), vec![model.head_dim]));
        }
    }
    let fill = |(i, (name, shape)): (usize, (String, Vec<usize>))| {
        let mut data = noise(i as u64, shape.iter().product());
        let (scale, shift) = match (name.contains("norm"), shape.len()) {
            (true, _) => (0.2, 1.0),
            (false, 1) => (0.1, 0.0),
            (false, _) => (0.3, 0.0),
        };
        data.iter_mut().for_each(|x| *x = *x * scale + shift);
        (name, HostTensor::from_f32(&data, shape).unwrap())
    };
    shapes.into_iter().enumerate().map(fill).collect()
}

pub(crate) fn engine_with<D: Device>(model: &ModelConfig, device: D, options: Options) -> Engine<D> {
    let mut engine = Engine::new(device, options);
    assert_eq!(engine.add_trunk(model, &tensors(model)).unwrap(), TRUNK);
    engine
}

pub(crate) fn engine(model: &ModelConfig) -> Engine<CpuDevice> {
    engine_with(model, CpuDevice::new(1).unwrap(), Options::default())
}

pub(crate) fn slot(job: u32) -> AdapterSlot {
    AdapterSlot { job: JobSlot(job), index: 0 }
}

pub(crate) fn lora(rank: u32, targets: &[Module], layers: LayerSelection) -> LoraConfig {
    LoraConfig { rank, alpha: 8.0, rslora: false, dropout: 0.0, targets: targets.into(), layers, overrides: Vec::new() }
}

pub(crate) fn all_linear() -> LoraConfig {
    lora(4, &Module::ALL, LayerSelection::All)
}

pub(crate) fn adamw() -> AdamW {
    AdamW {
        learning_rate: 0.02,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        max_grad_norm: None,
        normalisation: Normalisation::WeightSum,
    }
}

/// A sequence of so many rows; every third row from the second on has no label.
pub(crate) fn sequence(model: &ModelConfig, key: u64, rows: usize) -> Arc<Sequence> {
    let ids: Vec<u32> = (0..=rows as u32).map(|i| philox(key, [i, 1, 0, 0])[0] % model.vocab_size as u32).collect();
    let weights = (0..rows).map(|i| if i % 3 == 1 { 0.0 } else { 1.0 }).collect();
    Arc::new(Sequence::new(model, ids[..rows].into(), ids[1..].into(), weights).unwrap())
}

/// The same sequence with one weight for every row.
pub(crate) fn weighted(model: &ModelConfig, sequence: &Sequence, weight: f32) -> Arc<Sequence> {
    let weights = vec![weight; sequence.rows()];
    Arc::new(Sequence::new(model, sequence.tokens().into(), sequence.targets().into(), weights).unwrap())
}

/// Sequences of these lengths.
pub(crate) fn batch(model: &ModelConfig, key: u64, lengths: &[usize]) -> Batch {
    Batch { sequences: lengths.iter().enumerate().map(|(i, rows)| sequence(model, key * 100 + i as u64, *rows)).collect() }
}

pub(crate) fn create(slot: AdapterSlot, config: LoraConfig, cohort: Option<u64>) -> Command {
    Command::CreateAdapter { slot, trunk: TRUNK, config, seed: 7, cohort }
}

pub(crate) fn train(slot: AdapterSlot, batch: &Batch) -> Command {
    Command::TrainStep { slot, batch: batch.clone(), optimiser: adamw() }
}

pub(crate) fn forward_backward(slot: AdapterSlot, batch: &Batch) -> Command {
    Command::ForwardBackward { slot, batch: batch.clone() }
}

pub(crate) fn evaluate(slot: AdapterSlot, batch: &Batch) -> Command {
    Command::Evaluate { slot, batch: batch.clone(), first: 0 }
}

pub(crate) fn optim_step(slot: AdapterSlot) -> Command {
    Command::OptimStep { slot, optimiser: adamw() }
}

pub(crate) fn done(reply: Result<Reply, EngineError>) {
    assert!(matches!(reply, Ok(Reply::Done)), "{reply:?}");
}

pub(crate) fn step(reply: Result<Reply, EngineError>) -> StepReport {
    match reply {
        Ok(Reply::Step(report)) => report,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn losses(reply: Result<Reply, EngineError>) -> Vec<SequenceLoss> {
    match reply {
        Ok(Reply::Loss(losses)) => losses,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn weights(reply: Result<Reply, EngineError>) -> AdapterWeights {
    match reply {
        Ok(Reply::Weights(weights)) => *weights,
        other => panic!("{other:?}"),
    }
}

/// A reply as text in which floats are bits: equal texts are equal bits.
pub(crate) fn bits(reply: &Result<Reply, EngineError>) -> String {
    match reply {
        Ok(Reply::Step(r)) => {
            format!(
                "step {} {:x} {:x} {:x} {:x} {} {}",
                r.step,
                r.loss.to_bits(),
                r.grad_norm.to_bits(),
                r.sums.loss_sum.to_bits(),
                r.sums.weight_sum.to_bits(),
                r.sums.labelled,
                r.sums.sequences
            )
        }
        Ok(Reply::Loss(losses)) => {
            losses.iter().map(|l| format!("{:x}/{:x}/{} ", l.loss_sum.to_bits(), l.weight_sum.to_bits(), l.labelled)).collect()
        }
        Ok(Reply::Weights(weights)) => {
            let values = weights.modules.iter().flat_map(|m| m.a.iter().chain(&m.b));
            values.map(|value| format!("{:08x}", value.to_bits())).collect()
        }
        other => format!("{other:?}"),
    }
}

pub(crate) fn llama() -> ModelConfig {
    model(Architecture::Llama)
}

pub(crate) fn flat(weights: &AdapterWeights) -> Vec<f32> {
    weights.modules.iter().flat_map(|m| m.a.iter().chain(&m.b).copied()).collect()
}

pub(crate) fn error(reply: Result<Reply, EngineError>) -> EngineError {
    reply.expect_err("the command should fail")
}

pub(crate) fn relative(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    off / norm(&mut b.iter().map(|x| f64::from(*x)))
}
