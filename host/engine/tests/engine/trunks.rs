//! Loading a trunk: every tensor is checked by name and shape.

use nodus_engine::{Engine, Options, TrunkError};
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::{DType, HostTensor};
use nodus_protocol::Architecture;

use crate::support::{TRUNK, all_linear, batch, create, done, forward_backward, losses, model, slot, tensors};

fn load(architecture: Architecture, change: impl FnOnce(&mut std::collections::BTreeMap<String, HostTensor>)) -> Result<(), TrunkError> {
    let model = model(architecture);
    let mut tensors = tensors(&model);
    change(&mut tensors);
    Engine::new(CpuDevice::new(1).unwrap(), Options::default()).add_trunk(&model, &tensors).map(drop)
}

#[test]
fn a_missing_tensor_is_named_with_its_shape() {
    let cases = [
        (Architecture::Llama, "lm_head.weight", "[50, 24]"),
        (Architecture::Llama, "model.layers.2.self_attn.k_proj.weight", "[16, 24]"),
        (Architecture::Qwen2, "model.layers.0.self_attn.v_proj.bias", "[16]"),
        (Architecture::Qwen3, "model.layers.3.self_attn.q_norm.weight", "[8]"),
        (Architecture::Mistral, "model.norm.weight", "[24]"),
    ];
    for (architecture, name, shape) in cases {
        let refused = load(architecture, |tensors| drop(tensors.remove(name))).unwrap_err().to_string();
        assert_eq!(refused, format!("tensor `{name}` is missing, expected one of shape {shape}"));
    }
}

#[test]
fn tensors_that_an_architecture_does_not_have_are_not_asked_for() {
    load(Architecture::Qwen2, |tensors| drop(tensors.remove("lm_head.weight"))).unwrap();
    load(Architecture::Llama, |tensors| tensors.retain(|name, _| !name.contains("bias") && !name.contains("q_norm"))).unwrap();
}

#[test]
fn a_wrong_shape_is_named_with_both() {
    let name = "model.layers.1.mlp.down_proj.weight";
    let turned = HostTensor::from_f32(&[0.0; 24 * 40], vec![40, 24]).unwrap();
    let refused = load(Architecture::Llama, |tensors| drop(tensors.insert(name.into(), turned))).unwrap_err().to_string();
    assert_eq!(refused, format!("tensor `{name}` has shape [40, 24], expected [24, 40]"));
}

#[test]
fn sizes_that_contradict_each_other_are_refused() {
    let mut odd = model(Architecture::Llama);
    odd.num_key_value_heads = 3;
    let mut engine = Engine::new(CpuDevice::new(1).unwrap(), Options::default());
    let refused = engine.add_trunk(&odd, &tensors(&odd)).unwrap_err().to_string();
    assert_eq!(refused, "config: num_key_value_heads is 3, expected a divisor of num_attention_heads, 4");
}

#[test]
fn a_random_trunk_is_a_function_of_its_seed() {
    let loss = |dtype, seed| {
        let model = model(Architecture::Qwen3);
        let mut engine = Engine::new(CpuDevice::new(1).unwrap(), Options::default());
        assert_eq!(engine.add_random_trunk(&model, dtype, seed).unwrap(), TRUNK);
        done(engine.execute(create(slot(0), all_linear(), None)));
        losses(engine.execute(forward_backward(slot(0), &batch(&model, 1, &[9]))))[0].loss_sum
    };
    let first = loss(DType::BF16, 1);
    assert!(first.is_finite());
    assert_eq!(first.to_bits(), loss(DType::BF16, 1).to_bits());
    assert_ne!(first.to_bits(), loss(DType::BF16, 2).to_bits());
    assert_ne!(first.to_bits(), loss(DType::F32, 1).to_bits());
}
