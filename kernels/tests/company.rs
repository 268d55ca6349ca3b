//! The exactness contract, operation by operation: a sequence's bits are the same alone, in company, beside NaN, wherever it stands, and on
//! any number of threads.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;

use common::{Sequence, World, blank, buffer, noise, read, weight};
use nodus_kernels::cpu::{CpuBuffer, CpuDevice};
use nodus_kernels::{AdamWItem, AttentionShape, Device, Dropout, Layout, LoraGrads, LoraIn, LoraModule, LoraOut, LoraRows, LoraSite, Use};

/// Results of one operation: for each sequence the bits of its rows, then those of its adapter.
type Bits = BTreeMap<u32, Vec<u32>>;

/// Collects what each sequence got.
#[derive(Default)]
struct Results(Bits);

impl Results {
    fn rows(&mut self, device: &mut CpuDevice, layout: &Layout, buffer: &CpuBuffer) {
        let data = read(device, buffer);
        for (i, segment) in layout.segments().iter().enumerate() {
            self.0.entry(segment.sequence).or_default().extend(common::segment(layout, i, &data).iter().map(|x| x.to_bits()));
        }
    }

    fn adapter(&mut self, device: &mut CpuDevice, id: u32, buffer: &CpuBuffer) {
        let data = read(device, buffer);
        self.0.entry(id).or_default().extend(data.iter().map(|x| x.to_bits()));
    }
}

fn rows(device: &mut CpuDevice, world: &World) -> Bits {
    let (mut results, layout, width) = (Results::default(), &world.all, 96);
    let [x, dy, up] = ["x", "dy", "up"].map(|name| world.field(layout, name, width)).map(|x| buffer(device, &x));
    let w = weight(device, &noise("norm", 0, 32), &[32]);
    let table = weight(device, &noise("table", 0, 50 * width), &[50, width]);
    let [mut a, mut b, mut c, mut d, mut e, mut f] = [(); 6].map(|()| blank(device, layout, width));
    device.embed(layout, &world.index(layout, "tokens", 50), &table, &mut a).unwrap();
    device.rms_norm(layout, 3, &x, &w, 1e-5, &mut b).unwrap();
    device.rms_norm_backward(layout, 3, &dy, &x, &w, 1e-5, &mut c, false).unwrap();
    device.swiglu(layout, &x, &up, &mut d).unwrap();
    device.swiglu_backward(layout, &dy, &x, &up, &mut e, &mut f).unwrap();
    for out in [&a, &b, &c, &d, &e, &f] {
        results.rows(device, layout, out);
    }
    device.rms_norm_backward(layout, 3, &dy, &x, &w, 1e-5, &mut b, true).unwrap();
    device.add(layout, &x, &mut d).unwrap();
    let angles = buffer(device, &noise("angles", 0, 200 * 32));
    device.rope(layout, 3, 32, &angles, &mut d, false).unwrap();
    let index: Vec<u32> = (0..layout.rows() as u32).collect();
    device.gather(layout, &index, width, &d, &mut e).unwrap();
    device.scatter_add(layout, &index, width, &e, &mut b).unwrap();
    for out in [&b, &d, &e] {
        results.rows(device, layout, out);
    }
    results.0
}

fn linear(device: &mut CpuDevice, world: &World) -> Bits {
    let (mut results, layout) = (Results::default(), &world.all);
    for (inputs, outputs) in [(64, 200), (600, 49)] {
        let (w, b) = (noise("weight", 0, inputs * outputs), noise("bias", 0, outputs));
        let (w, b) = (weight(device, &w, &[outputs, inputs]), weight(device, &b, &[outputs]));
        let (x, dy) = (world.field(layout, "x", inputs), world.field(layout, "dy", outputs));
        let (mut x, dy) = (buffer(device, &x), buffer(device, &dy));
        let mut out = blank(device, layout, outputs);
        device.linear(layout, &x, &w, Some(&b), &mut out).unwrap();
        device.linear_backward(layout, &dy, &w, &mut x, true).unwrap();
        results.rows(device, layout, &out);
        results.rows(device, layout, &x);
    }
    results.0
}

fn attention(device: &mut CpuDevice, world: &World) -> Bits {
    let (mut results, q_rows, kv_rows) = (Results::default(), &world.some, &world.all);
    for window in [None, Some(20)] {
        let shape = AttentionShape { heads: 6, kv_heads: 2, head_dim: 16, window };
        let [q, dout] = ["q", "dout"].map(|name| world.field(q_rows, name, 96)).map(|x| buffer(device, &x));
        let [k, v] = ["k", "v"].map(|name| world.field(kv_rows, name, 32)).map(|x| buffer(device, &x));
        let [mut out, mut dq] = [(); 2].map(|()| blank(device, q_rows, 96));
        let [mut dk, mut dv] = [(); 2].map(|()| blank(device, kv_rows, 32));
        let mut lse = blank(device, q_rows, 6);
        device.attention(q_rows, kv_rows, shape, &q, &k, &v, &mut out, &mut lse).unwrap();
        device.attention_backward(q_rows, kv_rows, shape, &q, &k, &v, &out, &lse, &dout, &mut dq, &mut dk, &mut dv).unwrap();
        for (layout, out) in [(q_rows, &out), (q_rows, &lse), (q_rows, &dq), (kv_rows, &dk), (kv_rows, &dv)] {
            results.rows(device, layout, out);
        }
    }
    results.0
}

fn head_loss(device: &mut CpuDevice, world: &World) -> Bits {
    let (mut results, layout, width, vocabulary) = (Results::default(), &world.some, 48, 700);
    let head = weight(device, &noise("head", 0, vocabulary * width), &[vocabulary, width]);
    let x = buffer(device, &world.field(layout, "x", width));
    let (targets, weights) = (world.index(layout, "targets", vocabulary), world.field(layout, "weights", 1));
    let (mut losses, mut dx) = (blank(device, layout, 1), blank(device, layout, width));
    device.head_loss(layout, &x, &head, &targets, &weights, &mut losses, Some(&mut dx)).unwrap();
    results.rows(device, layout, &losses);
    results.rows(device, layout, &dx);
    results.0
}

/// Every sequence has its own adapter; odd ones use dropout, and ranks differ.
fn lora(device: &mut CpuDevice, world: &World) -> Bits {
    let (mut results, layout, inputs, outputs, s_width) = (Results::default(), &world.all, 200, 250, 8);
    let [x, dx] = ["x", "dx"].map(|name| world.field(layout, name, inputs));
    let [y, dy] = ["y", "dy"].map(|name| world.field(layout, name, outputs));
    let [x, mut dx, mut y, dy] = [x, dx, y, dy].map(|x| buffer(device, &x));
    let mut s = blank(device, layout, s_width);
    let modules: Vec<_> = world.sequences.iter().map(|s| module(s, inputs, outputs)).collect();
    let params: Vec<_> = world.sequences.iter().map(|s| adapter(device, "params", s, inputs, outputs)).collect();
    let mut grads: Vec<_> = world.sequences.iter().map(|s| adapter(device, "grads", s, inputs, outputs)).collect();
    let site = |i: usize| Some(LoraSite { module: modules[i].0, dropout: modules[i].1 });
    let group = |i: usize| LoraRows { segments: i..i + 1, sites: vec![site(i)], params: &params[i] };
    let groups: Vec<_> = (0..params.len()).rev().map(group).collect();
    device.lora(layout, &groups, &x, &mut [LoraOut { s: &mut s, s_width, y: &mut y }]).unwrap();
    let mut groups: Vec<_> = grads.iter_mut().enumerate().map(|(i, grads)| LoraGrads { rows: group(i), grads, wants_dx: true }).collect();
    device.lora_backward(layout, &mut groups, &x, &[LoraIn { dy: &dy, s: &s, s_width }], Some(&mut dx)).unwrap();
    results.rows(device, layout, &y);
    results.rows(device, layout, &dx);
    for (sequence, grads) in world.sequences.iter().zip(&grads) {
        results.adapter(device, sequence.id, grads);
    }
    results.0
}

fn module(sequence: &Sequence, inputs: usize, outputs: usize) -> (LoraModule, Option<Dropout>) {
    let rank = 1 + sequence.id as usize % 8;
    let dropout = (sequence.id % 2 == 1).then_some(Dropout { key: 17, probability: 0.25 });
    (LoraModule { a: 0, b: rank * inputs, rank, inputs, outputs, scale: 2.0 }, dropout)
}

fn adapter(device: &mut CpuDevice, name: &str, sequence: &Sequence, inputs: usize, outputs: usize) -> CpuBuffer {
    let len = module(sequence, inputs, outputs).0.rank * (inputs + outputs);
    let data = if sequence.nan { vec![f32::NAN; len] } else { noise(name, u64::from(sequence.id), len) };
    buffer(device, &data)
}

fn adamw(device: &mut CpuDevice, world: &World) -> Bits {
    let mut results = Results::default();
    let mut norms = device.alloc(Use::State, world.sequences.len()).unwrap();
    let mut states: Vec<_> =
        world.sequences.iter().map(|s| ["params", "grads", "m", "v"].map(|name| adapter(device, name, s, 2000, 900 + s.rows))).collect();
    for [.., v] in &mut states {
        let squares: Vec<_> = read(device, v).iter().map(|x| x * x).collect();
        device.upload(&squares, v, 0).unwrap();
    }
    let mut items: Vec<_> = states.iter_mut().enumerate().map(|(i, state)| item(i, state.each_mut())).collect();
    device.adamw(&mut items, &mut norms).unwrap();
    let norms = read(device, &norms);
    for ((sequence, norm), state) in world.sequences.iter().zip(norms).zip(&states) {
        let norm = buffer(device, &[norm]);
        for buffer in state.iter().chain([&norm]) {
            results.adapter(device, sequence.id, buffer);
        }
    }
    results.0
}

fn item<'a>(norm_index: usize, [params, grads, moment1, moment2]: [&'a mut CpuBuffer; 4]) -> AdamWItem<'a, CpuBuffer> {
    AdamWItem {
        params,
        grads,
        moment1,
        moment2,
        divisor: 3.0,
        max_grad_norm: Some(0.5),
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        step: 2,
        norm_index,
    }
}

/// An operation, run over a world.
type Operation = fn(&mut CpuDevice, &World) -> Bits;

const OPERATIONS: [(&str, Operation); 6] =
    [("rows", rows), ("linear", linear), ("attention", attention), ("head_loss", head_loss), ("lora", lora), ("adamw", adamw)];

const SEQUENCES: [Sequence; 5] = [
    Sequence { id: 1, rows: 70, stride: 1, nan: false },
    Sequence { id: 4, rows: 1, stride: 1, nan: false },
    Sequence { id: 7, rows: 150, stride: 2, nan: false },
    Sequence { id: 8, rows: 96, stride: 3, nan: false },
    Sequence { id: 9, rows: 13, stride: 1, nan: false },
];

fn run(operation: Operation, threads: usize, sequences: &[Sequence], align: usize) -> Bits {
    operation(&mut CpuDevice::new(threads).unwrap(), &World::new(sequences, align))
}

#[test]
fn company_changes_no_bit() {
    for (name, operation) in OPERATIONS {
        for chosen in SEQUENCES {
            let alone = run(operation, 1, &[chosen], 1);
            let nan = |s: Sequence| Sequence { nan: s.id != chosen.id, ..s };
            let mut turned = SEQUENCES;
            turned.reverse();
            let companies = [(SEQUENCES, 1), (turned, 4), (SEQUENCES.map(nan), 4), (turned.map(nan), 1)];
            for (i, (company, align)) in companies.into_iter().enumerate() {
                let together = run(operation, 2, &company, align);
                assert!(!alone[&chosen.id].is_empty());
                assert!(alone[&chosen.id] == together[&chosen.id], "{name}: sequence {} has other bits in company {i}", chosen.id);
            }
        }
    }
}

#[test]
fn threads_change_no_bit() {
    for (name, operation) in OPERATIONS {
        let one = run(operation, 1, &SEQUENCES, 1);
        for threads in [2, 3, 8] {
            assert!(run(operation, threads, &SEQUENCES, 1) == one, "{name}: other bits on {threads} threads");
        }
    }
}

/// A pass may have no rows at all, or sequences without any.
#[test]
fn sequences_without_rows_change_nothing() {
    let empty = |id| Sequence { id, rows: 0, stride: 1, nan: false };
    for (name, operation) in OPERATIONS {
        for world in [vec![], vec![empty(1)], vec![empty(2), empty(1)]] {
            run(operation, 2, &world, 1);
            run(operation, 2, &world, 4);
        }
        let chosen = SEQUENCES[0];
        let alone = run(operation, 1, &[chosen], 1);
        let among = run(operation, 2, &[empty(2), chosen, empty(3)], 4);
        assert!(alone[&chosen.id] == among[&chosen.id], "{name}: other bits beside sequences without rows");
    }
}

/// Sequences of one adapter are added in segment order: the gradient of two is the gradient of the second on top of the first's.
#[test]
fn sequences_of_one_adapter_add_in_order() {
    let (device, inputs, outputs) = (&mut CpuDevice::new(2).unwrap(), 200, 250);
    let pair = [SEQUENCES[2], SEQUENCES[3]];
    let (module, dropout) = module(&SEQUENCES[0], inputs, outputs);
    let params = adapter(device, "params", &SEQUENCES[0], inputs, outputs);
    let mut accumulate = |sequences: &[Sequence], grads: &mut CpuBuffer| {
        let world = World::new(sequences, 1);
        let [x, s, dy] = [("x", inputs), ("s", module.rank), ("dy", outputs)].map(|(name, width)| world.field(&world.all, name, width));
        let [x, s, dy] = [x, s, dy].map(|x| buffer(device, &x));
        let rows = LoraRows { segments: 0..sequences.len(), sites: vec![Some(LoraSite { module, dropout })], params: &params };
        let modules = [LoraIn { dy: &dy, s: &s, s_width: module.rank }];
        device.lora_backward(&world.all, &mut [LoraGrads { rows, grads, wants_dx: false }], &x, &modules, None).unwrap();
    };
    let len = module.rank * (inputs + outputs);
    let mut fresh = CpuDevice::new(1).unwrap();
    let [mut together, mut apart] = [(); 2].map(|()| fresh.alloc(Use::State, len).unwrap());
    accumulate(&pair, &mut together);
    accumulate(&pair[..1], &mut apart);
    accumulate(&pair[1..], &mut apart);
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(read(&mut fresh, &together)), bits(read(&mut fresh, &apart)));
}
