//! How each operation is run: its operands, and what of it is kept.
//!
//! Never judges a result. Arrays that an operation assigns begin as random numbers too, so that a result left unwritten shows.

use super::Run;
use crate::{
    AdamWItem, AttentionShape, Device, DeviceError, Dropout, Layout, LoraGrads, LoraIn, LoraModule, LoraOut, LoraRows, LoraSite, Source,
    SwigluGrads, Use,
};

type Done = Result<(), DeviceError>;

const EPS: f32 = 1e-6;

fn tokens(rows: &Layout, vocabulary: usize) -> Vec<u32> {
    rows.positions().iter().map(|position| position.wrapping_mul(7919) % vocabulary as u32).collect()
}

pub(super) fn embed<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (width, vocabulary, rows) = (run.sizes.width(), run.sizes.vocabulary, &run.scene.rows);
    let table = run.weight(&[vocabulary, width], 1)?;
    let mut out = run.activations(width, 2)?;
    run.device.embed(rows, &tokens(rows, vocabulary), &table, &mut out)?;
    run.read_rows(&out, width)
}

/// Of rows, of heads, and of rows so wide that a device may go about them otherwise.
pub(super) fn norms<D: Device>(run: &mut Run<'_, D>) -> Done {
    let width = run.sizes.width();
    for (width, groups, accumulate) in [(width, 1, true), (width, run.sizes.attention.heads, true), (5 * width, 1, false)] {
        let rows = &run.scene.rows;
        let weight = run.weight(&[width / groups], 1)?;
        let (x, dy) = (run.activations(width, 2)?, run.activations(width, 3)?);
        let (mut out, mut dx) = (run.activations(width, 4)?, run.activations(width, 5)?);
        run.device.rms_norm(rows, groups, &x, &weight, EPS, &mut out)?;
        run.device.rms_norm_backward(rows, groups, &dy, &x, &weight, EPS, &mut dx, accumulate)?;
        run.read_rows(&out, width)?;
        run.read_rows(&dx, width)?;
    }
    Ok(())
}

pub(super) fn linear<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (inputs, outputs, rows) = (run.sizes.width(), run.sizes.kv_width() + 1, &run.scene.rows);
    let (weight, bias) = (run.weight(&[outputs, inputs], 1)?, run.weight(&[outputs], 2)?);
    let (x, dy) = (run.activations(inputs, 3)?, run.activations(outputs, 4)?);
    for seed in [5, 6] {
        let mut out = run.activations(outputs, seed)?;
        run.device.linear(rows, &x, &weight, (seed == 6).then_some(&bias), &mut out)?;
        run.read_rows(&out, outputs)?;
    }
    let (added, mut out) = (run.activations(outputs, 8)?, run.activations(outputs, 5)?);
    run.device.linear_add(rows, &x, &weight, &added, &mut out)?;
    run.read_rows(&out, outputs)?;
    for accumulate in [false, true] {
        let mut dx = run.activations(inputs, 7)?;
        run.device.linear_backward(rows, &dy, &weight, &mut dx, accumulate)?;
        run.read_rows(&dx, inputs)?;
    }
    Ok(())
}

/// Weights of three widths that are used together, and the operations that take what they write: each on arrays whose rows may stand beside
/// one another.
pub(super) fn together<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (shape, inputs, rows) = (run.sizes.attention, run.sizes.width(), &run.scene.rows);
    let widths = [run.sizes.kv_width(), run.sizes.kv_width(), run.sizes.width()];
    // Small, so that scores of attention are: it makes much of their rounding.
    let (mut weights, mut biases) = (Vec::new(), Vec::new());
    for (seed, outputs) in (1..).zip(widths) {
        weights.push(run.tensor(&[outputs, inputs], seed, 1.0 / 128.0)?);
        biases.push(run.tensor(&[outputs], seed + 3, 1.0 / 16.0)?);
    }
    let weights = run.device.load_together(&weights.iter().map(Source::Stored).collect::<Vec<_>>())?;
    let biases = run.device.load_together(&biases.iter().map(Source::Stored).collect::<Vec<_>>())?;
    let (x, mut dx) = (run.activations(inputs, 7)?, run.activations(inputs, 8)?);
    let mut outs = run.device.alloc_together(Use::Activation, rows.rows(), &widths)?;
    let pairs: Vec<_> = weights.iter().zip(&biases).map(|(weight, bias)| (weight, Some(bias))).collect();
    run.device.linear_together(rows, &x, &pairs, &mut outs)?;
    for (out, width) in outs.iter().zip(widths) {
        // A copy whose rows follow one another can be read.
        let mut copy = run.activations(width, 9)?;
        run.device.gather(rows, &itself(rows), width, out, &mut copy)?;
        run.read_rows(&copy, width)?;
    }
    let mut grads = run.device.alloc_together(Use::Activation, rows.rows(), &widths)?;
    let ([k, v, q], [dk, dv, dq]) = (outs.as_mut_slice(), grads.as_mut_slice()) else { return Ok(()) };
    if shape.head_dim.is_multiple_of(2) {
        let table = run.flat(1024 * shape.head_dim, Some(10), 1.0)?;
        run.device.rope(rows, shape.heads, shape.head_dim, &table, q, false)?;
        run.device.rope(rows, shape.kv_heads, shape.head_dim, &table, k, false)?;
    }
    let (mut out, dout) = (run.activations(inputs, 11)?, run.activations(inputs, 12)?);
    let mut lse = run.over(rows, Use::State, shape.heads, 13)?;
    run.device.attention(rows, rows, shape, q, k, v, &mut out, &mut lse)?;
    run.device.attention_backward(rows, rows, shape, q, k, v, &out, &lse, &dout, dq, dk, dv)?;
    let (weight, mut normed) = (run.weight(&[shape.head_dim], 15)?, run.activations(inputs, 16)?);
    run.device.rms_norm(rows, shape.heads, q, &weight, EPS, &mut normed)?;
    run.device.rms_norm_backward(rows, shape.heads, &dout, q, &weight, EPS, dq, true)?;
    run.read_rows(&out, inputs)?;
    run.read_rows(&normed, inputs)?;
    let parts: Vec<_> = grads.iter().zip(&weights).collect();
    run.device.linear_backward_together(rows, &parts, &mut dx)?;
    run.read_rows(&dx, inputs)
}

/// Each row from its own place.
fn itself(rows: &Layout) -> Vec<u32> {
    (0..rows.rows() as u32).collect()
}

pub(super) fn lora<D: Device>(run: &mut Run<'_, D>) -> Done {
    adapters(run, None)
}

pub(super) fn lora_dropout<D: Device>(run: &mut Run<'_, D>) -> Done {
    adapters(run, Some(Dropout { key: 0x1234_5678_9abc_def0, probability: 0.3 }))
}

/// Three adapters on two modules: those of the neighbours are NaN throughout, and carry one module each.
fn adapters<D: Device>(run: &mut Run<'_, D>, dropout: Option<Dropout>) -> Done {
    let (inputs, rank, scene) = (run.sizes.width(), run.sizes.rank, run.scene);
    let widths = [(run.sizes.kv_width() + 1, rank + 3), (inputs, rank + 1)];
    let mut at = 3;
    let sites = [(0, rank), (1, rank + 1)].map(|(number, rank)| {
        let module = LoraModule { a: at, b: at + rank * inputs, rank, inputs, outputs: widths[number].0, scale: 2.0 };
        at = module.b + rank * module.outputs;
        Some(LoraSite { module, dropout: dropout.map(|dropout| Dropout { key: dropout.key + number as u64, ..dropout }) })
    });
    let params = [run.flat(at, None, 1.0)?, run.flat(at, Some(1), 0.25)?, run.flat(at, None, 1.0)?];
    let mut grads = [run.flat(at, None, 1.0)?, run.flat(at, Some(2), 1.0)?, run.flat(at, None, 1.0)?];
    let (x, mut dx) = (run.activations(inputs, 3)?, run.activations(inputs, 6)?);
    let dy = [run.activations(widths[0].0, 4)?, run.activations(widths[1].0, 8)?];
    let mut y = [run.activations(widths[0].0, 5)?, run.activations(widths[1].0, 9)?];
    let mut s = [run.over(&scene.rows, Use::State, widths[0].1, 7)?, run.over(&scene.rows, Use::State, widths[1].1, 10)?];
    let segments = [0..scene.anchors.start, scene.anchors.clone(), scene.anchors.end..scene.rows.segments().len()];
    let carried = [vec![sites[0], None], sites.to_vec(), vec![None, sites[1]]];
    let groups = params.iter().zip(segments).zip(carried);
    let groups: Vec<_> = groups.map(|((params, segments), sites)| LoraRows { segments, sites, params }).collect();
    let mut out: Vec<_> = s.iter_mut().zip(&mut y).zip(widths).map(|((s, y), (_, s_width))| LoraOut { s, s_width, y }).collect();
    run.device.lora(&scene.rows, &groups, &x, &mut out)?;
    let mut groups: Vec<_> = groups.into_iter().zip(&mut grads).map(|(rows, grads)| LoraGrads { rows, grads, wants_dx: true }).collect();
    let read: Vec<_> = dy.iter().zip(&s).zip(widths).map(|((dy, s), (_, s_width))| LoraIn { dy, s, s_width }).collect();
    run.device.lora_backward(&scene.rows, &mut groups, &x, &read, Some(&mut dx))?;
    for ((s, y), (outputs, s_width)) in s.iter().zip(&y).zip(widths) {
        run.read_rows(s, s_width)?;
        run.read_rows(y, outputs)?;
    }
    run.read_rows(&dx, inputs)?;
    run.read(&grads[1], 0..at)
}

pub(super) fn rope<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (width, shape) = (run.sizes.width(), run.sizes.attention);
    let half = shape.head_dim / 2 * 2;
    if half != shape.head_dim {
        // An odd head has no rotation; the operation refuses it.
        run.results.push(vec![0.0]);
        return Ok(());
    }
    let table = run.flat(1024 * half, Some(1), 1.0)?;
    for inverse in [false, true] {
        let mut x = run.activations(width, 2)?;
        run.device.rope(&run.scene.rows, shape.heads, shape.head_dim, &table, &mut x, inverse)?;
        run.read_rows(&x, width)?;
    }
    Ok(())
}

/// For all rows and for the labelled ones, with the sizes' window and without.
pub(super) fn attention<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (width, kv_width, scene) = (run.sizes.width(), run.sizes.kv_width(), run.scene);
    let windows = [None, run.sizes.attention.window];
    for (q_rows, window) in [&scene.rows, &scene.labelled].into_iter().flat_map(|rows| windows.map(|window| (rows, window))) {
        let shape = AttentionShape { window, ..run.sizes.attention };
        let (kv_rows, usage) = (&scene.rows, Use::Activation);
        let (q, k, v) = (run.over(q_rows, usage, width, 1)?, run.activations(kv_width, 2)?, run.activations(kv_width, 3)?);
        let (mut out, dout) = (run.over(q_rows, usage, width, 4)?, run.over(q_rows, usage, width, 5)?);
        let mut lse = run.over(q_rows, Use::State, shape.heads, 6)?;
        let (mut dq, mut dk, mut dv) = (run.over(q_rows, usage, width, 7)?, run.activations(kv_width, 8)?, run.activations(kv_width, 9)?);
        run.device.attention(q_rows, kv_rows, shape, &q, &k, &v, &mut out, &mut lse)?;
        run.device.attention_backward(q_rows, kv_rows, shape, &q, &k, &v, &out, &lse, &dout, &mut dq, &mut dk, &mut dv)?;
        run.read_over(q_rows, &out, width)?;
        run.read_over(q_rows, &lse, shape.heads)?;
        run.read_over(q_rows, &dq, width)?;
        run.read_rows(&dk, kv_width)?;
        run.read_rows(&dv, kv_width)?;
    }
    Ok(())
}

/// On arrays of their own, on arrays whose rows may stand beside one another, and with adapters around it.
pub(super) fn swiglu<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (width, rows) = (run.sizes.width() + 3, &run.scene.rows);
    for width in [width, width.next_multiple_of(8)] {
        let (dy, gate, up) = (run.activations(width, 1)?, run.activations(width, 2)?, run.activations(width, 3)?);
        let (mut out, mut dgate, mut dup) = (run.activations(width, 4)?, run.activations(width, 5)?, run.activations(width, 6)?);
        run.device.swiglu(rows, &gate, &up, &mut out)?;
        run.device.swiglu_backward(rows, &dy, &gate, &up, &mut dgate, &mut dup)?;
        run.read_rows(&out, width)?;
        run.read_rows(&dgate, width)?;
        run.read_rows(&dup, width)?;

        let mut beside = run.device.alloc_together(Use::Activation, rows.rows(), &[width, width])?;
        let mut gradients = run.device.alloc_together(Use::Activation, rows.rows(), &[width, width])?;
        for (from, to) in [&gate, &up].into_iter().zip(&mut beside) {
            run.device.gather(rows, &itself(rows), width, from, to)?;
        }
        let ([gate, up], [dgate, dup]) = (beside.as_slice(), gradients.as_mut_slice()) else { return Ok(()) };
        run.device.swiglu(rows, gate, up, &mut out)?;
        run.device.swiglu_backward(rows, &dy, gate, up, dgate, dup)?;
        run.read_rows(&out, width)?;
        for gradient in &gradients {
            run.device.gather(rows, &itself(rows), width, gradient, &mut out)?;
            run.read_rows(&out, width)?;
        }
    }
    swiglu_of_product(run)?;
    swiglu_of_adapters(run)
}

/// Gate and up as one product, of which SwiGLU alone is read.
fn swiglu_of_product<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (inputs, rows) = (run.sizes.width(), &run.scene.rows);
    let width = (inputs + 3).next_multiple_of(8);
    let (gate, up) = (run.tensor(&[width, inputs], 1, 0.25)?, run.tensor(&[width, inputs], 2, 0.25)?);
    let weights = run.device.load_together(&[Source::Stored(&gate), Source::Stored(&up)])?;
    let (x, mut out) = (run.activations(inputs, 3)?, run.activations(width, 4)?);
    let mut between = run.device.alloc_together(Use::Activation, rows.rows(), &[width, width])?;
    run.device.linear_swiglu(rows, &x, [&weights[0], &weights[1]], &mut between, &mut out)?;
    run.read_rows(&out, width)
}

/// Gate and up carry adapters, and so does what reads their product; the neighbours before carry none, those after carry NaN on gate and down.
fn swiglu_of_adapters<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (inputs, rank, scene) = (run.sizes.width(), run.sizes.rank, run.scene);
    let (rows, width) = (&scene.rows, (inputs + 3).next_multiple_of(8));
    let site = |a: usize, rank: usize, inputs: usize, outputs: usize| {
        let module = LoraModule { a, b: a + rank * inputs, rank, inputs, outputs, scale: 2.0 };
        Some(LoraSite { module, dropout: None })
    };
    let (gate, up, down) =
        (site(0, rank, inputs, width), site(rank * (inputs + width), rank + 1, inputs, width), site(0, rank, width, inputs));
    let len = (2 * rank + 1) * (inputs + width);
    let params = [run.flat(len, Some(1), 0.25)?, run.flat(len, None, 1.0)?];
    let mut grads = [run.flat(len, Some(2), 1.0)?, run.flat(len, None, 1.0)?];
    let segments = [scene.anchors.clone(), scene.anchors.end..rows.segments().len()];
    let of = |sites: [Vec<Option<LoraSite>>; 2]| {
        let groups = params.iter().zip(segments.clone()).zip(sites);
        groups.map(|((params, segments), sites)| LoraRows { segments, sites, params }).collect::<Vec<_>>()
    };
    let x = run.activations(inputs, 3)?;
    let mut gate_up = run.device.alloc_together(Use::Activation, rows.rows(), &[width, width])?;
    for (to, seed) in gate_up.iter_mut().zip([4, 5]) {
        let from = run.activations(width, seed)?;
        run.device.gather(rows, &itself(rows), width, &from, to)?;
    }
    let mut s = [run.over(rows, Use::State, rank, 6)?, run.over(rows, Use::State, rank + 1, 7)?, run.over(rows, Use::State, rank, 8)?];
    let (mut out, [s_gate, s_up, s_down]) = (run.activations(width, 9)?, s.each_mut());
    let [to_gate, to_up] = gate_up.as_mut_slice() else { return Ok(()) };
    let modules = [LoraOut { s: s_gate, s_width: rank, y: to_gate }, LoraOut { s: s_up, s_width: rank + 1, y: to_up }];
    run.device.lora_swiglu(rows, &of([vec![gate, up], vec![gate, None]]), &x, modules, &mut out)?;
    run.read_rows(&out, width)?;
    let (mut y, dy, mut dx) = (run.activations(inputs, 10)?, run.activations(inputs, 11)?, run.activations(width, 12)?);
    let mut gradients = run.device.alloc_together(Use::Activation, rows.rows(), &[width, width])?;
    let read = of([vec![down], vec![down]]);
    run.device.lora(rows, &read, &out, &mut [LoraOut { s: s_down, s_width: rank, y: &mut y }])?;
    let mut groups: Vec<_> = read.into_iter().zip(&mut grads).map(|(rows, grads)| LoraGrads { rows, grads, wants_dx: true }).collect();
    let ([gate, up], [dgate, dup]) = (gate_up.as_slice(), gradients.as_mut_slice()) else { return Ok(()) };
    let swiglu = SwigluGrads { rows, gate, up, dgate, dup };
    run.device.lora_backward_swiglu(rows, &mut groups, &out, &[LoraIn { dy: &dy, s: s_down, s_width: rank }], &mut dx, swiglu)?;
    for array in gate_up.iter().chain(&gradients) {
        run.device.gather(rows, &itself(rows), width, array, &mut out)?;
        run.read_rows(&out, width)?;
    }
    run.read(&grads[0], 0..len)
}

/// Rows trade places inside their sequence; in activations and in float32.
pub(super) fn moves<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (width, rows) = (run.sizes.width(), &run.scene.rows);
    let mut index: Vec<u32> = (0..rows.rows() as u32).collect();
    for segment in rows.segments() {
        index[segment.start..segment.start + segment.rows].reverse();
    }
    for usage in [Use::Activation, Use::State] {
        let x = run.over(rows, usage, width, 1)?;
        let (mut y, mut gathered) = (run.over(rows, usage, width, 2)?, run.over(rows, usage, width, 3)?);
        let mut scattered = run.over(rows, usage, width, 4)?;
        run.device.add(rows, &x, &mut y)?;
        run.device.gather(rows, &index, width, &x, &mut gathered)?;
        run.device.scatter_add(rows, &index, width, &x, &mut scattered)?;
        run.read_rows(&y, width)?;
        run.read_rows(&gathered, width)?;
        run.read_rows(&scattered, width)?;
    }
    Ok(())
}

/// Of a vocabulary, and of some so large that a device may go about a row otherwise.
pub(super) fn head_loss<D: Device>(run: &mut Run<'_, D>) -> Done {
    let rows = &run.scene.labelled;
    for (width, vocabulary) in
        [(run.sizes.width(), run.sizes.vocabulary), (8, 32_003), (8, 50_003), (8, 66_203), (8, 140_003), (8, 170_003)]
    {
        let head = run.weight(&[vocabulary, width], 1)?;
        let x = run.over(rows, Use::Activation, width, 2)?;
        let (mut losses, mut dx) = (run.over(rows, Use::State, 1, 3)?, run.over(rows, Use::Activation, width, 4)?);
        let weights: Vec<f32> = rows.positions().iter().map(|position| if position % 5 == 0 { 0.0 } else { 0.5 }).collect();
        run.device.head_loss(rows, &x, &head, &tokens(rows, vocabulary), &weights, &mut losses, Some(&mut dx))?;
        run.read_over(rows, &losses, 1)?;
        run.read_over(rows, &dx, width)?;
    }
    Ok(())
}

/// One adapter for each sequence; those of the neighbours are NaN. The first is clipped, the second is not, and so on.
pub(super) fn adamw<D: Device>(run: &mut Run<'_, D>) -> Done {
    let (segments, anchors) = (run.scene.rows.segments(), run.scene.anchors.clone());
    let mut state = Vec::new();
    for (index, segment) in segments.iter().enumerate() {
        let anchor = anchors.contains(&index).then(|| (index - anchors.start) as u64 * 10);
        let len = 4096 + 17 * segment.rows;
        let mut arrays = Vec::new();
        for (seed, scale) in [(1, 1.0), (2, 1.0), (3, 0.125)] {
            arrays.push(run.flat(len, anchor.map(|anchor| anchor + seed), scale)?);
        }
        // The second moment is not negative.
        let mut moment2 = run.flat(len, None, 1.0)?;
        if let Some(anchor) = anchor {
            let data: Vec<f32> = super::numbers(run.seed(anchor + 4), len).into_iter().map(|value| value.abs() * 0.01).collect();
            run.device.upload(&data, &mut moment2, 0)?;
        }
        arrays.push(moment2);
        state.push(arrays);
    }
    let mut norms = run.flat(segments.len(), None, 1.0)?;
    let mut items = Vec::new();
    for (index, arrays) in state.iter_mut().enumerate() {
        let [params, grads, moment1, moment2] = arrays.as_mut_slice() else { continue };
        items.push(AdamWItem {
            params,
            grads,
            moment1,
            moment2,
            divisor: 3.0,
            max_grad_norm: (index % 2 == anchors.start % 2).then_some(0.5),
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 3,
            norm_index: index,
        });
    }
    run.device.adamw(&mut items, &mut norms)?;
    run.read(&norms, anchors.clone())?;
    for index in anchors {
        for buffer in &state[index] {
            let len = run.device.len(buffer);
            run.read(buffer, 0..len)?;
        }
    }
    Ok(())
}
