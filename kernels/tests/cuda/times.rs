//! Times of single operations at the shapes of a 0.5B and of a 1.1B model. Run by hand: `cargo test ... times -- --ignored --nocapture`.

use nodus_kernels::cuda::{CudaBuffer, CudaDevice, Precision};
use nodus_kernels::{AdamWItem, AttentionShape, Device, DeviceError, HostTensor, Layout, LoraGrads, LoraModule, LoraRows, Use};

use super::open;

struct Model {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    vocabulary: usize,
    shape: AttentionShape,
}

const MODELS: [Model; 2] = [
    Model {
        name: "0.5B",
        hidden: 896,
        intermediate: 4864,
        vocabulary: 151_936,
        shape: AttentionShape { heads: 14, kv_heads: 2, head_dim: 64, window: None },
    },
    Model {
        name: "1.1B",
        hidden: 2048,
        intermediate: 5632,
        vocabulary: 32_000,
        shape: AttentionShape { heads: 32, kv_heads: 4, head_dim: 64, window: None },
    },
];

const RANK: usize = 8;

/// Median microseconds on the card of one call, from batches of 5.
fn micros(device: &mut CudaDevice, mut work: impl FnMut(&mut CudaDevice) -> Result<(), DeviceError>) -> f32 {
    work(device).unwrap();
    let mut times: Vec<f32> =
        (0..9).map(|_| device.milliseconds(|device| (0..5).try_for_each(|_| work(device))).unwrap() * 200.0).collect();
    times.sort_by(f32::total_cmp);
    times[4]
}

fn activations(device: &mut CudaDevice, rows: usize, width: usize, key: u64) -> CudaBuffer {
    let mut buffer = device.alloc(Use::Activation, rows * width).unwrap();
    device.fill_uniform(&mut buffer, key, 1.0).unwrap();
    buffer
}

/// Prints one line: microseconds, and the rate by a count of operations or of bytes.
fn line(model: &str, load: &str, name: &str, micros: f32, operations: f64, bytes: f64) {
    let (tera, giga) = (operations / f64::from(micros) / 1e6, bytes / f64::from(micros) / 1e3);
    println!("{model} {load:<8} {name:<28} {micros:>9.1} us {tera:>7.1} TFLOP/s {giga:>7.0} GB/s");
}

fn products(device: &mut CudaDevice, model: &Model, load: &str, layout: &Layout) {
    let rows = layout.rows();
    let kv = model.shape.kv_heads * model.shape.head_dim;
    for (outputs, inputs) in
        [(model.hidden, model.hidden), (kv, model.hidden), (model.intermediate, model.hidden), (model.hidden, model.intermediate)]
    {
        let weight = device.random_weight(outputs, inputs, 1, 0.05).unwrap();
        let (x, mut y) = (activations(device, rows, inputs, 2), activations(device, rows, outputs, 3));
        let mut dx = activations(device, rows, inputs, 4);
        let (work, bytes) =
            (2.0 * rows as f64 * outputs as f64 * inputs as f64, 2.0 * (outputs * inputs + rows * (outputs + inputs)) as f64);
        let forward = micros(device, |device| device.linear(layout, &x, &weight, None, &mut y));
        line(model.name, load, &format!("linear {inputs} -> {outputs}"), forward, work, bytes);
        let backward = micros(device, |device| device.linear_backward(layout, &y, &weight, &mut dx, false));
        line(model.name, load, &format!("linear_backward {outputs} -> {inputs}"), backward, work, bytes);
    }
}

fn streams(device: &mut CudaDevice, model: &Model, load: &str, layout: &Layout) {
    let (rows, hidden, shape) = (layout.rows(), model.hidden, model.shape);
    let bytes = |arrays: usize, width: usize| 2.0 * (arrays * rows * width) as f64;
    let norm = device.load(&HostTensor::from_f32(&vec![1.0; hidden], vec![hidden]).unwrap()).unwrap();
    let (x, mut y) = (activations(device, rows, hidden, 1), activations(device, rows, hidden, 2));
    let time = micros(device, |device| device.rms_norm(layout, 1, &x, &norm, 1e-6, &mut y));
    line(model.name, load, "rms_norm", time, 0.0, bytes(2, hidden));
    let dy = activations(device, rows, hidden, 3);
    let time = micros(device, |device| device.rms_norm_backward(layout, 1, &dy, &x, &norm, 1e-6, &mut y, true));
    line(model.name, load, "rms_norm_backward", time, 0.0, bytes(4, hidden));
    let time = micros(device, |device| device.add(layout, &x, &mut y));
    line(model.name, load, "add", time, 0.0, bytes(3, hidden));
    let table = device.alloc(Use::State, 4096 * shape.head_dim).unwrap();
    let time = micros(device, |device| device.rope(layout, shape.heads, shape.head_dim, &table, &mut y, false));
    line(model.name, load, "rope (q)", time, 0.0, bytes(2, shape.heads * shape.head_dim));
    let wide: Vec<_> = (0..6).map(|key| activations(device, rows, model.intermediate, key)).collect();
    let Ok([gate, up, dy, mut out, mut dgate, mut dup]) = <[_; 6]>::try_from(wide) else { return };
    let time = micros(device, |device| device.swiglu(layout, &gate, &up, &mut out));
    line(model.name, load, "swiglu", time, 0.0, bytes(3, model.intermediate));
    let time = micros(device, |device| device.swiglu_backward(layout, &dy, &gate, &up, &mut dgate, &mut dup));
    line(model.name, load, "swiglu_backward", time, 0.0, bytes(5, model.intermediate));
}

fn attention(device: &mut CudaDevice, model: &Model, load: &str, layout: &Layout) {
    let (rows, shape) = (layout.rows(), model.shape);
    let (width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let [q, dout, mut out, mut dq] = [1, 2, 3, 4].map(|key| activations(device, rows, width, key));
    let [k, v, mut dk, mut dv] = [5, 6, 7, 8].map(|key| activations(device, rows, kv_width, key));
    let mut lse = device.alloc(Use::State, rows * shape.heads).unwrap();
    let squares: f64 = layout.segments().iter().map(|segment| (segment.rows * segment.rows) as f64).sum();
    // Two products forward over half the square; five backward at least.
    let work = 2.0 * squares * width as f64;
    let time = micros(device, |device| device.attention(layout, layout, shape, &q, &k, &v, &mut out, &mut lse));
    line(model.name, load, "attention", time, work, 0.0);
    let time =
        micros(device, |device| device.attention_backward(layout, layout, shape, &q, &k, &v, &out, &lse, &dout, &mut dq, &mut dk, &mut dv));
    line(model.name, load, "attention_backward", time, 2.5 * work, 0.0);
}

fn adapters(device: &mut CudaDevice, model: &Model, load: &str, layout: &Layout) {
    let (rows, count) = (layout.rows(), layout.segments().len());
    for (inputs, outputs) in [(model.hidden, model.hidden), (model.hidden, model.intermediate), (model.intermediate, model.hidden)] {
        let module = LoraModule { a: 0, b: RANK * inputs, rank: RANK, inputs, outputs, scale: 2.0 };
        let len = RANK * (inputs + outputs);
        let params: Vec<_> = (0..count).map(|_| device.alloc(Use::State, len).unwrap()).collect();
        let mut grads: Vec<_> = (0..count).map(|_| device.alloc(Use::State, len).unwrap()).collect();
        let (x, mut y) = (activations(device, rows, inputs, 1), activations(device, rows, outputs, 2));
        let (dy, mut dx) = (activations(device, rows, outputs, 3), activations(device, rows, inputs, 4));
        let mut s = device.alloc(Use::State, rows * RANK).unwrap();
        let group = |i: usize, params| LoraRows { segments: i..i + 1, module, dropout: None, params };
        let bytes = 2.0 * (rows * (inputs + 2 * outputs)) as f64;
        let groups: Vec<_> = params.iter().enumerate().map(|(i, params)| group(i, params)).collect();
        let time = micros(device, |device| device.lora(layout, &groups, &x, &mut s, RANK, &mut y));
        line(model.name, load, &format!("lora {inputs} -> {outputs}"), time, 0.0, bytes);
        let mut groups: Vec<_> =
            params.iter().zip(&mut grads).enumerate().map(|(i, (params, grads))| LoraGrads { rows: group(i, params), grads }).collect();
        let time = micros(device, |device| device.lora_backward(layout, &mut groups, &dy, &x, &s, RANK, Some(&mut dx)));
        line(
            model.name,
            load,
            &format!("lora_backward {inputs} -> {outputs}"),
            time,
            0.0,
            2.0 * (rows * (2 * outputs + 3 * inputs)) as f64,
        );
    }
}

fn head(device: &mut CudaDevice, model: &Model, load: &str, layout: &Layout) {
    let rows = layout.rows();
    let weight = device.random_weight(model.vocabulary, model.hidden, 1, 0.02).unwrap();
    let (x, mut dx) = (activations(device, rows, model.hidden, 2), activations(device, rows, model.hidden, 3));
    let mut losses = device.alloc(Use::State, rows).unwrap();
    let (targets, weights) = (vec![7; rows], vec![1.0; rows]);
    let work = 2.0 * (rows * model.vocabulary) as f64 * model.hidden as f64;
    let time = micros(device, |device| device.head_loss(layout, &x, &weight, &targets, &weights, &mut losses, None));
    line(model.name, load, "head_loss, loss alone", time, work, 0.0);
    let time = micros(device, |device| device.head_loss(layout, &x, &weight, &targets, &weights, &mut losses, Some(&mut dx)));
    line(model.name, load, "head_loss, with gradient", time, 2.0 * work, 0.0);
}

fn optimiser(device: &mut CudaDevice, load: &str, adapters: usize) {
    let len = 4_399_104; // r = 8 on all linear layers of the 0.5B model
    let mut arrays: Vec<_> = (0..adapters).map(|_| [(); 4].map(|()| device.alloc(Use::State, len).unwrap())).collect();
    let mut norms = device.alloc(Use::State, adapters).unwrap();
    let mut items: Vec<_> = arrays
        .iter_mut()
        .enumerate()
        .map(|(norm_index, [params, grads, moment1, moment2])| AdamWItem {
            params,
            grads,
            moment1,
            moment2,
            divisor: 1.0,
            max_grad_norm: None,
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            step: 1,
            norm_index,
        })
        .collect();
    let time = micros(device, |device| device.adamw(&mut items, &mut norms));
    line("0.5B", load, "adamw", time, 0.0, 36.0 * (len * adapters) as f64);
}

#[test]
#[ignore = "a measurement, not a check"]
fn times() {
    let Some(mut device) = open("times", Precision::Bf16) else { return };
    let positions: Vec<u32> = (0..4096).collect();
    for model in &MODELS {
        for (load, sequences, length) in [("1x128", 1, 128), ("16x128", 16, 128), ("4x512", 4, 512), ("64x512", 64, 512)] {
            let layout = Layout::new((0..sequences).map(|i| (i, &positions[..length])), device.row_align());
            products(&mut device, model, load, &layout);
            streams(&mut device, model, load, &layout);
            attention(&mut device, model, load, &layout);
            adapters(&mut device, model, load, &layout);
            head(&mut device, model, load, &layout);
        }
    }
    optimiser(&mut device, "1", 1);
    optimiser(&mut device, "16", 16);
}
