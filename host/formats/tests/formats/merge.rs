//! A merged model is a model, each of whose changed weights is W + s B A, rounded once.

use std::collections::BTreeSet;

use half::bf16;
use nodus_formats::merge::{FILE, Merged};
use nodus_formats::{hf, peft};
use nodus_kernels::{DType, HostTensor};

use crate::support::{copy, golden};

#[test]
fn a_merged_model_opens_and_differs_where_the_adapter_is() {
    let model = hf::open(&golden("models/llama")).unwrap();
    let adapter = peft::read(&golden("runs/llama-qv-rslora/final"), &model.config).unwrap();
    let dir = copy("models/llama");
    let merged = Merged::new(&model.tensors, &adapter).unwrap();
    let mut file = Vec::new();
    merged.write(&mut file).unwrap();
    assert_eq!(file.len() as u64, merged.bytes());
    dir.write(FILE, file).unwrap();
    let after = hf::open(&dir).unwrap();

    let changed: BTreeSet<String> =
        adapter.modules.iter().map(|module| format!("model.layers.{}.{}.weight", module.layer, module.module.path())).collect();
    let differs = |name: &&String| model.tensors[*name].bytes() != after.tensors[*name].bytes();
    assert_eq!(model.tensors.keys().filter(differs).cloned().collect::<BTreeSet<_>>(), changed);
    // One element by hand, in float64.
    let module = &adapter.modules[1];
    let name = format!("model.layers.{}.{}.weight", module.layer, module.module.path());
    let (row, column, columns) = (3, 5, model.tensors[&name].shape()[1]);
    let at = |tensor: &HostTensor| f32::from_le_bytes(tensor.bytes()[4 * (row * columns + column)..][..4].try_into().unwrap());
    let product: f64 =
        (0..module.rank).map(|rank| f64::from(module.b[row * module.rank + rank]) * f64::from(module.a[rank * columns + column])).sum();
    let scale = f64::from(adapter.config.scale_of(module.layer, module.module));
    let expected = f64::from(at(&model.tensors[&name])) + scale * product;
    assert!((f64::from(at(&after.tensors[&name])) - expected).abs() < 1e-6 && product != 0.0);
}

#[test]
fn a_model_of_sixteen_bits_stays_one() {
    let model = hf::open(&golden("models/llama")).unwrap();
    let adapter = peft::read(&golden("runs/llama-qv/final"), &model.config).unwrap();
    let narrow = |tensor: &HostTensor| {
        let dir = cap_tempfile::tempdir(cap_std::ambient_authority()).unwrap();
        let bytes: Vec<u8> =
            tensor.bytes().as_chunks::<4>().0.iter().flat_map(|word| bf16::from_f32(f32::from_le_bytes(*word)).to_le_bytes()).collect();
        dir.write("w", &bytes).unwrap();
        let file = nodus_kernels::Mapped::new(&dir.open("w").unwrap().into_std()).unwrap();
        HostTensor::mapped(&file, 0..bytes.len(), DType::BF16, tensor.shape().to_vec()).unwrap()
    };
    let mut tensors = model.tensors.clone();
    tensors.values_mut().for_each(|tensor| *tensor = narrow(tensor));
    let merged = Merged::new(&tensors, &adapter).unwrap();
    let dir = copy("models/llama");
    let mut file = Vec::new();
    merged.write(&mut file).unwrap();
    dir.write(FILE, file).unwrap();
    assert!(hf::open(&dir).unwrap().tensors.values().all(|tensor| tensor.dtype() == DType::BF16));
}

#[test]
fn an_adapter_of_another_model_is_refused() {
    let model = hf::open(&golden("models/llama")).unwrap();
    let adapter = peft::read(&golden("runs/llama-qv/final"), &model.config).unwrap();
    let mut tensors = model.tensors.clone();
    tensors.remove("model.layers.0.self_attn.q_proj.weight");
    let error = Merged::new(&tensors, &adapter).map(drop).unwrap_err();
    assert!(error.to_string().contains("model.layers.0.self_attn.q_proj.weight"), "{error}");
}
