//! Every operation against the slow truth: forward against float64, backward against central differences of float64, with padding that is
//! poison.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::reference::{self, Attention};
use common::{
    POISON, Sequence, World, assert_close, assert_gradient, assert_padding_untouched, blank, buffer, noise, read, segment, weight, wide,
};
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::{
    AdamWItem, AttentionShape, Device, Dropout, Layout, LoraGrads, LoraIn, LoraModule, LoraOut, LoraRows, LoraSite, Use, philox, uniform,
};
use proptest::prelude::*;

const FORWARD: f64 = 2e-6;

/// One to three sequences, at times empty, at times longer than every chunk of every operation.
fn worlds(longest: usize) -> impl Strategy<Value = World> {
    let one = (prop_oneof![3 => 0..12_usize, 1 => 60..=longest], 1..4_usize, 0..1000_u32);
    (prop::collection::vec(one, 1..4), prop_oneof![Just(1_usize), Just(4)]).prop_map(|(sequences, align)| {
        let of = |(rows, stride, id): (usize, usize, u32)| Sequence { id, rows, stride, nan: false };
        World::new(&sequences.into_iter().map(of).collect::<Vec<_>>(), align)
    })
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() }
}

fn device() -> CpuDevice {
    CpuDevice::new(2).unwrap()
}

/// sum(c y)
fn weighed(c: &[f32], y: &[f64]) -> f64 {
    reference::dot(&wide(c), y)
}

fn sum(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn embed_gather_scatter_add(world in worlds(150), width in 1..300_usize) {
        let (device, layout) = (&mut device(), &world.all);
        let table_data = noise("table", 0, 11 * width);
        let table = weight(device, &table_data, &[11, width]);
        let tokens = world.index(layout, "tokens", 11);
        let mut out = blank(device, layout, width);
        device.embed(layout, &tokens, &table, &mut out).unwrap();
        let out = read(device, &out);
        assert_padding_untouched(layout, &out);
        for (row, token) in tokens.iter().enumerate().filter(|(_, t)| **t != u32::MAX) {
            prop_assert_eq!(&out[row * width..(row + 1) * width], &table_data[*token as usize * width..(*token as usize + 1) * width]);
        }

        let mut index = vec![u32::MAX; world.some.rows()];
        for (some, all) in world.some.segments().iter().zip(layout.segments()) {
            let rows = some.start..some.start + some.rows;
            for (index, position) in index[rows.clone()].iter_mut().zip(&world.some.positions()[rows]) {
                *index = all.start as u32 + position;
            }
        }
        let x_data = world.field(layout, "x", width);
        let x = buffer(device, &x_data);
        let mut picked = blank(device, &world.some, width);
        device.gather(&world.some, &index, width, &x, &mut picked).unwrap();
        let picked_data = read(device, &picked);
        assert_padding_untouched(&world.some, &picked_data);
        let mut y = buffer(device, &x_data);
        device.scatter_add(&world.some, &index, width, &picked, &mut y).unwrap();
        let y = read(device, &y);
        assert_padding_untouched(layout, &y);
        for row in 0..layout.rows() {
            let factor = if index.contains(&(row as u32)) { 2.0 } else { 1.0 };
            for (y, x) in y[row * width..(row + 1) * width].iter().zip(&x_data[row * width..]) {
                prop_assert!(*y == factor * x || x.to_bits() == POISON);
            }
        }
    }

    #[test]
    fn rms_norm(world in worlds(70), groups in 1..4_usize, part in prop_oneof![1..40_usize, Just(600)], accumulate: bool) {
        let (device, layout, width) = (&mut device(), &world.all, groups * part);
        let w = noise("weight", 0, part);
        let (x, dy, before) = (world.field(layout, "x", width), world.field(layout, "dy", width), world.field(layout, "before", width));
        let loaded = weight(device, &w, &[part]);
        let (x_buffer, dy_buffer) = (buffer(device, &x), buffer(device, &dy));
        let mut out = blank(device, layout, width);
        device.rms_norm(layout, groups, &x_buffer, &loaded, 1e-3, &mut out).unwrap();
        let mut dx = if accumulate { buffer(device, &before) } else { blank(device, layout, width) };
        device.rms_norm_backward(layout, groups, &dy_buffer, &x_buffer, &loaded, 1e-3, &mut dx, accumulate).unwrap();
        let (out, dx) = (read(device, &out), read(device, &dx));
        assert_padding_untouched(layout, &out);
        assert_padding_untouched(layout, &dx);
        let truth = |x: &[f64]| reference::rms_norm(x, &wide(&w), 1e-3);
        for s in 0..layout.segments().len() {
            assert_close("out", segment(layout, s, &out), &truth(&wide(segment(layout, s, &x))), FORWARD);
            let c = segment(layout, s, &dy);
            let base = if accumulate { segment(layout, s, &before) } else { &[] };
            assert_gradient("dx", segment(layout, s, &x), segment(layout, s, &dx), |x| weighed(c, &truth(x)) + base.iter().zip(x).map(|(b, x)| f64::from(*b) * x).sum::<f64>());
        }
    }

    #[test]
    fn linear(world in worlds(150), inputs in 1..70_usize, outputs in prop_oneof![1..20_usize, 90..210_usize], biased: bool, accumulate: bool) {
        let (device, layout) = (&mut device(), &world.all);
        let (w, b) = (noise("weight", 0, outputs * inputs), noise("bias", 0, outputs));
        let (x, dy, before) = (world.field(layout, "x", inputs), world.field(layout, "dy", outputs), world.field(layout, "before", inputs));
        let (loaded, bias) = (weight(device, &w, &[outputs, inputs]), weight(device, &b, &[outputs]));
        let (x_buffer, dy_buffer) = (buffer(device, &x), buffer(device, &dy));
        let mut out = blank(device, layout, outputs);
        device.linear(layout, &x_buffer, &loaded, biased.then_some(&bias), &mut out).unwrap();
        let mut dx = if accumulate { buffer(device, &before) } else { blank(device, layout, inputs) };
        device.linear_backward(layout, &dy_buffer, &loaded, &mut dx, accumulate).unwrap();
        let (out, dx) = (read(device, &out), read(device, &dx));
        assert_padding_untouched(layout, &out);
        assert_padding_untouched(layout, &dx);
        let (w, b) = (wide(&w), wide(&b));
        let truth = |x: &[f64]| reference::linear(x, inputs, &w, biased.then_some(&b));
        for s in 0..layout.segments().len() {
            assert_close("out", segment(layout, s, &out), &truth(&wide(segment(layout, s, &x))), FORWARD);
            let c = segment(layout, s, &dy);
            let base = if accumulate { segment(layout, s, &before) } else { &[] };
            assert_gradient("dx", segment(layout, s, &x), segment(layout, s, &dx), |x| weighed(c, &truth(x)) + base.iter().zip(x).map(|(b, x)| f64::from(*b) * x).sum::<f64>());
        }
    }

    #[test]
    fn rope(world in worlds(60), heads in 1..4_usize, half in 1..20_usize) {
        let (device, layout, head_dim) = (&mut device(), &world.some, 2 * half);
        let angle = |position: u32, i: usize| f64::from(position) / 100_f64.powf(i as f64 / half as f64);
        let angles = |position: u32| (0..half).map(move |i| angle(position, i));
        let table: Vec<f32> =
            (0..150).flat_map(|p| angles(p).map(f64::cos).chain(angles(p).map(f64::sin)).collect::<Vec<_>>()).map(|x| x as f32).collect();
        let table = buffer(device, &table);
        let x = world.field(layout, "x", heads * head_dim);
        let mut rotated = buffer(device, &x);
        device.rope(layout, heads, head_dim, &table, &mut rotated, false).unwrap();
        let out = read(device, &rotated);
        device.rope(layout, heads, head_dim, &table, &mut rotated, true).unwrap();
        let back = read(device, &rotated);
        assert_padding_untouched(layout, &out);
        assert_padding_untouched(layout, &back);
        for (s, at) in layout.segments().iter().enumerate() {
            let x = wide(segment(layout, s, &x));
            let truth = reference::rope(&x, heads, head_dim, |r, i| angle(layout.positions()[at.start + r], i));
            assert_close("rotated", segment(layout, s, &out), &truth, FORWARD);
            assert_close("rotated back", segment(layout, s, &back), &x, FORWARD);
        }
    }

    #[test]
    fn swiglu_and_add(world in worlds(60), width in 1..50_usize) {
        let (device, layout) = (&mut device(), &world.all);
        let [gate, up, dy] = ["gate", "up", "dy"].map(|name| world.field(layout, name, width).iter().map(|x| x * 4.0).collect::<Vec<_>>());
        let [gate, up, dy] = [gate, up, dy].map(|x| x.iter().map(|x| if x.is_nan() { f32::from_bits(POISON) } else { *x }).collect::<Vec<_>>());
        let [g, u, d] = [&gate, &up, &dy].map(|x| buffer(device, x));
        let [mut out, mut dgate, mut dup] = [(); 3].map(|()| blank(device, layout, width));
        device.swiglu(layout, &g, &u, &mut out).unwrap();
        device.swiglu_backward(layout, &d, &g, &u, &mut dgate, &mut dup).unwrap();
        let mut total = buffer(device, &up);
        device.add(layout, &g, &mut total).unwrap();
        let [out, dgate, dup, total] = [&out, &dgate, &dup, &total].map(|x| read(device, x));
        for written in [&out, &dgate, &dup, &total] {
            assert_padding_untouched(layout, written);
        }
        for s in 0..layout.segments().len() {
            let [gate, up, c] = [&gate, &up, &dy].map(|x| segment(layout, s, x));
            assert_close("out", segment(layout, s, &out), &reference::swiglu(&wide(gate), &wide(up)), FORWARD);
            assert_gradient("dgate", gate, segment(layout, s, &dgate), |x| weighed(c, &reference::swiglu(x, &wide(up))));
            assert_gradient("dup", up, segment(layout, s, &dup), |x| weighed(c, &reference::swiglu(&wide(gate), x)));
            prop_assert_eq!(segment(layout, s, &total), sum(gate, up));
        }
    }

    #[test]
    fn attention(world in worlds(140), kv_heads in 1..3_usize, group in 1..4_usize, head_dim in 1..20_usize, window in prop::option::of(1..90_usize)) {
        let (device, heads) = (&mut device(), kv_heads * group);
        let (q_rows, kv_rows) = (&world.some, &world.all);
        let shape = AttentionShape { heads, kv_heads, head_dim, window };
        let [q, dout] = ["q", "dout"].map(|name| world.field(q_rows, name, heads * head_dim));
        let [k, v] = ["k", "v"].map(|name| world.field(kv_rows, name, kv_heads * head_dim));
        let [qb, kb, vb, doutb] = [&q, &k, &v, &dout].map(|x| buffer(device, x));
        let [mut out, mut dq] = [(); 2].map(|()| blank(device, q_rows, heads * head_dim));
        let [mut dk, mut dv] = [(); 2].map(|()| blank(device, kv_rows, kv_heads * head_dim));
        let mut lse = blank(device, q_rows, heads);
        device.attention(q_rows, kv_rows, shape, &qb, &kb, &vb, &mut out, &mut lse).unwrap();
        device.attention_backward(q_rows, kv_rows, shape, &qb, &kb, &vb, &out, &lse, &doutb, &mut dq, &mut dk, &mut dv).unwrap();
        let [out, lse, dq, dk, dv] = [&out, &lse, &dq, &dk, &dv].map(|x| read(device, x));
        for (layout, written) in [(q_rows, &out), (q_rows, &lse), (q_rows, &dq), (kv_rows, &dk), (kv_rows, &dv)] {
            assert_padding_untouched(layout, written);
        }
        for (s, at) in q_rows.segments().iter().enumerate() {
            let positions = q_rows.positions()[at.start..at.start + at.rows].iter().map(|p| *p as usize).collect();
            let truth = Attention { heads, kv_heads, head_dim, window, positions };
            let ([q, c], [k, v]) = ([&q, &dout].map(|x| segment(q_rows, s, x)), [&k, &v].map(|x| segment(kv_rows, s, x)));
            let [qw, kw, vw] = [q, k, v].map(wide);
            let (want_out, want_lse) = truth.run(&qw, &kw, &vw);
            assert_close("out", segment(q_rows, s, &out), &want_out, FORWARD);
            assert_close("lse", segment(q_rows, s, &lse), &want_lse, FORWARD);
            assert_gradient("dq", q, segment(q_rows, s, &dq), |x| weighed(c, &truth.run(x, &kw, &vw).0));
            assert_gradient("dk", k, segment(kv_rows, s, &dk), |x| weighed(c, &truth.run(&qw, x, &vw).0));
            assert_gradient("dv", v, segment(kv_rows, s, &dv), |x| weighed(c, &truth.run(&qw, &kw, x).0));
        }
    }

    #[test]
    fn head_loss(world in worlds(140), width in 1..20_usize, vocabulary in prop_oneof![1..10_usize, 500..1200_usize], zero in 1..4_usize) {
        let (device, layout) = (&mut device(), &world.some);
        let head = noise("head", 0, vocabulary * width);
        let x = world.field(layout, "x", width);
        let targets = world.index(layout, "targets", vocabulary);
        let weights: Vec<_> = world.field(layout, "weights", 1).iter().enumerate().map(|(i, w)| if i % zero == 0 { 0.0 } else { w + 1.0 }).collect();
        let (xb, loaded) = (buffer(device, &x), weight(device, &head, &[vocabulary, width]));
        let (mut losses, mut alone, mut dx) = (blank(device, layout, 1), blank(device, layout, 1), blank(device, layout, width));
        device.head_loss(layout, &xb, &loaded, &targets, &weights, &mut alone, None).unwrap();
        device.head_loss(layout, &xb, &loaded, &targets, &weights, &mut losses, Some(&mut dx)).unwrap();
        let [losses, alone, dx] = [&losses, &alone, &dx].map(|x| read(device, x));
        prop_assert!(losses.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits()), "the loss depends on whether a gradient is wanted");
        assert_padding_untouched(layout, &losses);
        assert_padding_untouched(layout, &dx);
        let head = wide(&head);
        for (s, at) in layout.segments().iter().enumerate() {
            let rows = at.start..at.start + at.rows;
            let truth = |x: &[f64]| reference::losses(x, width, &head, &targets[rows.clone()]);
            assert_close("losses", segment(layout, s, &losses), &truth(&wide(segment(layout, s, &x))), FORWARD);
            assert_gradient("dx", segment(layout, s, &x), segment(layout, s, &dx), |x| weighed(&weights[rows.clone()], &truth(x)));
        }
    }

    #[test]
    fn lora(world in worlds(150), inputs in prop_oneof![1..30_usize, 190..210_usize], outputs in prop_oneof![1..30_usize, 190..210_usize], rank in 1..9_usize, probability in prop::option::of(0.1..0.9_f32), a_first: bool) {
        let (device, layout) = (&mut device(), &world.all);
        let (a_len, b_len) = (rank * inputs, outputs * rank);
        let (a, b) = if a_first { (3, 3 + a_len) } else { (b_len + 1, 0) };
        let module = LoraModule { a, b, rank, inputs, outputs, scale: 1.5 };
        let dropout = probability.map(|probability| Dropout { key: 99, probability });
        let params = noise("params", 0, a_len + b_len + 3);
        let grads_before = noise("grads", 0, params.len());
        let s_width = rank + 2;
        let [x, dx_before] = ["x", "dx"].map(|name| world.field(layout, name, inputs));
        let [y_before, dy] = ["y", "dy"].map(|name| world.field(layout, name, outputs));
        let [xb, pb, dyb] = [&x, &params, &dy].map(|x| buffer(device, x));
        let [mut y, mut dx, mut grads] = [&y_before, &dx_before, &grads_before].map(|x| buffer(device, x));
        let mut s = blank(device, layout, s_width);
        let rows = || LoraRows { segments: 0..layout.segments().len(), sites: vec![Some(LoraSite { module, dropout })], params: &pb };
        device.lora(layout, &[rows()], &xb, &mut [LoraOut { s: &mut s, s_width, y: &mut y }]).unwrap();
        let mut groups = [LoraGrads { rows: rows(), grads: &mut grads, wants_dx: true }];
        device.lora_backward(layout, &mut groups, &xb, &[LoraIn { dy: &dyb, s: &s, s_width }], Some(&mut dx)).unwrap();
        let [y, dx, grads, s] = [&y, &dx, &grads, &s].map(|x| read(device, x));
        for written in [&y, &dx, &s] {
            assert_padding_untouched(layout, written);
        }
        let keep = |s: usize| keep(layout, s, inputs, dropout);
        let truth = |s: usize, x: &[f64], params: &[f64]| reference::lora(x, inputs, &params[a..a + a_len], &params[b..b + b_len], 1.5, &keep(s));
        let params_wide = wide(&params);
        for s in 0..layout.segments().len() {
            let (x, c) = (segment(layout, s, &x), segment(layout, s, &dy));
            let base = wide(segment(layout, s, &y_before));
            let want: Vec<_> = truth(s, &wide(x), &params_wide).iter().zip(base).map(|(y, base)| y + base).collect();
            assert_close("y", segment(layout, s, &y), &want, FORWARD);
            let base = wide(segment(layout, s, &dx_before));
            assert_gradient("dx", x, segment(layout, s, &dx), |x| weighed(c, &truth(s, x, &params_wide)) + reference::dot(&base, x));
        }
        let base = wide(&grads_before);
        assert_gradient("grads", &params, &grads, |params| {
            let of = |s: usize| weighed(segment(layout, s, &dy), &truth(s, &wide(segment(layout, s, &x)), params));
            reference::dot(&base, params) + (0..layout.segments().len()).map(of).sum::<f64>()
        });
    }

    #[test]
    fn adamw(len in prop_oneof![0..40_usize, Just(40_000)], steps in 1..4_u64, clip in prop::option::of(0.01..2.0_f32), decay in prop_oneof![Just(0.0), Just(0.1_f32)]) {
        let device = &mut device();
        let start = noise("params", 0, len);
        let [mut params, mut grads, mut m, mut v] = [(); 4].map(|()| device.alloc(Use::State, len).unwrap());
        device.upload(&start, &mut params, 0).unwrap();
        let mut norms = device.alloc(Use::State, 3).unwrap();
        let mut truth = (wide(&start), vec![0.0; len], vec![0.0; len]);
        for step in 1..=steps {
            let g = noise("grads", step, len);
            device.upload(&g, &mut grads, 0).unwrap();
            let item = AdamWItem {
                params: &mut params, grads: &mut grads, moment1: &mut m, moment2: &mut v, divisor: 7.0, max_grad_norm: clip,
                learning_rate: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-6, weight_decay: decay, step, norm_index: 1,
            };
            device.adamw(&mut [item], &mut norms).unwrap();
            let g: Vec<_> = g.iter().map(|g| f64::from(*g) / 7.0).collect();
            let norm = reference::dot(&g, &g).sqrt();
            assert_close("norms", &read(device, &norms), &[0.0, norm, 0.0], 1e-6);
            let factor = clip.map_or(1.0, |clip| (f64::from(clip) / (norm + 1e-6)).min(1.0));
            for (i, g) in g.iter().enumerate() {
                let (p, m, v) = (&mut truth.0[i], &mut truth.1[i], &mut truth.2[i]);
                let g = g * factor;
                *p -= 0.01 * f64::from(decay) * *p;
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.99 * *v + 0.01 * g * g;
                *p -= 0.01 / (1.0 - 0.9_f64.powi(step as i32)) * *m / (v.sqrt() / (1.0 - 0.99_f64.powi(step as i32)).sqrt() + 1e-6);
            }
        }
        assert_close("params", &read(device, &params), &truth.0, FORWARD);
        assert_close("moment1", &read(device, &m), &truth.1, FORWARD);
        assert_close("moment2", &read(device, &v), &truth.2, FORWARD);
        prop_assert!(read(device, &grads).iter().all(|g| g.to_bits() == 0));
    }
}

/// What dropout multiplies the features of a segment with.
fn keep(layout: &Layout, segment: usize, width: usize, dropout: Option<Dropout>) -> Vec<f64> {
    let at = layout.segments()[segment];
    let of = |row: usize, feature: usize| {
        dropout.map_or(1.0, |Dropout { key, probability }| {
            let word = philox(key, [feature as u32 / 4, layout.positions()[row], at.sequence, 0])[feature % 4];
            if uniform(word) >= probability { 1.0 / (1.0 - f64::from(probability)) } else { 0.0 }
        })
    };
    (at.start..at.start + at.rows)
        .flat_map(|row| (0..width).map(move |feature| (row, feature)))
        .map(|(row, feature)| of(row, feature))
        .collect()
}

/// Ones through an adapter that copies: what is left of them is the mask.
#[test]
fn dropout_drops_at_its_rate_and_keeps_the_mean() {
    let device = &mut device();
    let (rows, width) = (500, 40);
    let layout = World::new(&[Sequence { id: 3, rows, stride: 1, nan: false }], 1).all;
    let module = LoraModule { a: 0, b: width * width, rank: width, inputs: width, outputs: width, scale: 1.0 };
    let identity: Vec<_> = (0..2 * width * width).map(|i| if i % (width * width) % (width + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let (params, x) = (buffer(device, &identity), buffer(device, &vec![1.0; rows * width]));
    for probability in [0.05, 0.3, 0.9] {
        let [mut s, mut y] = [(); 2].map(|()| device.alloc(Use::Activation, rows * width).unwrap());
        let dropout = Some(Dropout { key: 5, probability });
        let rows = LoraRows { segments: 0..1, sites: vec![Some(LoraSite { module, dropout })], params: &params };
        device.lora(&layout, &[rows], &x, &mut [LoraOut { s: &mut s, s_width: width, y: &mut y }]).unwrap();
        let y = read(device, &y);
        let n = y.len() as f64;
        let rate = y.iter().filter(|y| **y == 0.0).count() as f64 / n;
        let p = f64::from(probability);
        let deviation = (p * (1.0 - p) / n).sqrt();
        assert!((rate - p).abs() < 4.0 * deviation, "{rate} for {p}");
        assert!(y.iter().all(|y| *y == 0.0 || *y == 1.0 / (1.0 - probability)));
    }
}

#[test]
fn copies_move_those_elements_alone() {
    let device = &mut device();
    let (from, mut to) = (buffer(device, &[1.0, 2.0, 3.0, 4.0]), buffer(device, &[0.0; 5]));
    device.copy(&from, 1, &mut to, 2, 2).unwrap();
    assert_eq!(read(device, &to), [0.0, 0.0, 2.0, 3.0, 0.0]);
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
        let device = &mut device();
        let start = noise("p", 0, 100);
        let mut g = noise("g", 0, 100);
        g[50] = bad;
        g[51] = bad;
        let [mut params, mut grads, mut m, mut v] = [&start, &g, &start, &start].map(|x| buffer(device, x));
        let mut norms = device.alloc(Use::State, 1).unwrap();
        let item = AdamWItem {
            params: &mut params,
            grads: &mut grads,
            moment1: &mut m,
            moment2: &mut v,
            divisor: 1.0,
            max_grad_norm: Some(1.0),
            learning_rate: 0.1,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 1,
            norm_index: 0,
        };
        device.adamw(&mut [item], &mut norms).unwrap();
        assert!(!read(device, &norms)[0].is_finite());
        assert_eq!([&params, &m, &v].map(|x| read(device, x)), [(); 3].map(|()| start.clone()));
        assert!(read(device, &grads).iter().zip(&g).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}
