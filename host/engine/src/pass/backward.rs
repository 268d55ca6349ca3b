//! The backward pass, half a layer at a time, from the top to each member's cut.
//!
//! Never computes a gradient that no adapter of a member needs.

use nodus_kernels::{Device, DeviceError, Layout};
use nodus_protocol::Module;

use super::forward::no_layer;
use super::{AttentionTape, Buffer, Inner, LayerTape, MlpTape, Pass, lora_grads};
use crate::rows::{Level, Stage, View};

/// One module on the way down.
struct Step<'x, D: Device> {
    layer: usize,
    module: Module,
    level: &'x Level,
    view: &'x View,
    /// The rows that need a gradient below the module's stage.
    below: Option<&'x Layout>,
    /// Gradient of what the module wrote.
    dy: &'x D::Buffer,
    /// What it read; absent where nobody carries it.
    x: Option<&'x D::Buffer>,
    inner: &'x Inner<D>,
}

impl<D: Device> Pass<'_, '_, D> {
    /// From the gradient of the residual stream at the top down to the lowest cut.
    pub(super) fn backward(&mut self, mut gradient: Buffer<D>, mut tapes: Vec<LayerTape<D>>) -> Result<(), DeviceError> {
        let layers = self.trunk.layers.len();
        for layer in (0..layers).rev() {
            let (attention, mlp) = match tapes.pop() {
                None => break,
                Some(LayerTape::Whole(attention, mlp)) => (attention, mlp),
                Some(LayerTape::Input(input)) => {
                    let (_, attention, mlp) = self.layer(layer, &input)?;
                    (attention, mlp)
                }
            };
            let last = layer + 1 == layers;
            self.mlp_backward(layer, &mlp, &mut gradient)?;
            drop(mlp);
            gradient = self.descend(2 * layer + 1, last, gradient)?;
            let Some(attention) = attention else { break };
            gradient = self.attention_backward(layer, &attention, gradient)?;
            gradient = self.descend(2 * layer, false, gradient)?;
        }
        Ok(())
    }

    /// Turns the gradient of what the MLP half wrote into that of what it read, for the rows that need it.
    fn mlp_backward(&mut self, layer: usize, tape: &MlpTape<D>, gradient: &mut Buffer<D>) -> Result<(), DeviceError> {
        let (trunk, map) = (self.trunk, self.map);
        let Some(weights) = trunk.layers.get(layer) else { return Err(no_layer(layer)) };
        let width = trunk.config.intermediate_size;
        let (level, _) = map.level(2 * layer + 1);
        let view = level.view(layer + 1 == trunk.layers.len());
        let [inner_gate, inner_up, inner_down] = &tape.inner;

        let stage = Stage::of(layer, Module::DownProj);
        let Some(rows) = map.at(stage, level, view) else { return Ok(()) };
        let below = map.below(stage, level, view);
        let product = match inner_down {
            None => None,
            Some(_) => {
                let mut product = self.activation(&view.rows, width)?;
                self.device.swiglu(&rows, &tape.gate, &tape.up, &mut product)?;
                Some(product)
            }
        };
        let x = product.as_deref();
        let down = Step { layer, module: Module::DownProj, level, view, below: below.as_ref(), dy: &**gradient, x, inner: inner_down };
        let dproduct = self.step(&down, None)?;
        drop(product);
        let (Some(rows), Some(dproduct)) = (below, dproduct) else { return Ok(()) };
        let (mut dgate, mut dup) = (self.activation(&view.rows, width)?, self.activation(&view.rows, width)?);
        self.device.swiglu_backward(&rows, &dproduct, &tape.gate, &tape.up, &mut dgate, &mut dup)?;
        drop(dproduct);

        let below = map.below(Stage::of(layer, Module::GateProj), level, view);
        let adapted = inner_gate.is_some() || inner_up.is_some();
        let x = if adapted { Some(self.norm(&rows, &tape.residual, &weights.post_norm)?) } else { None };
        let x = x.as_deref();
        let gate = Step { layer, module: Module::GateProj, level, view, below: below.as_ref(), dy: &*dgate, x, inner: inner_gate };
        let dx = self.step(&gate, None)?;
        let up = Step { module: Module::UpProj, dy: &*dup, inner: inner_up, ..gate };
        let dx = self.step(&up, dx)?;
        let (Some(rows), Some(dx)) = (below, dx) else { return Ok(()) };
        self.device.rms_norm_backward(&rows, 1, &dx, &tape.residual, &weights.post_norm, trunk.config.rms_norm_eps, gradient, true)
    }

    /// Turns the gradient of what the attention half wrote into that of what it read, for the rows that need it.
    fn attention_backward(&mut self, layer: usize, tape: &AttentionTape<D>, gradient: Buffer<D>) -> Result<Buffer<D>, DeviceError> {
        let (trunk, map) = (self.trunk, self.map);
        let Some(weights) = trunk.layers.get(layer) else { return Err(no_layer(layer)) };
        let (hidden, eps) = (trunk.config.hidden_size, trunk.config.rms_norm_eps);
        let last = layer + 1 == trunk.layers.len();
        let (level, _) = map.level(2 * layer);
        let (queries, keys) = (level.view(last), &level.all);
        let [inner_q, inner_k, inner_v, inner_o] = &tape.inner;

        let below = map.below(Stage::of(layer, Module::OProj), level, queries);
        let (dy, x) = (&*gradient, Some(&*tape.out));
        let o = Step { layer, module: Module::OProj, level, view: queries, below: below.as_ref(), dy, x, inner: inner_o };
        let dout = self.step(&o, None)?;
        let stage = Stage::of(layer, Module::QProj);
        let (Some(q_rows), Some(dout), Some(k_rows)) = (below, dout, map.at(stage, level, keys)) else { return Ok(gradient) };
        let [dq, dk, dv] = self.inner_attention_backward((&q_rows, &k_rows), (queries, keys), weights.qk_norm.as_ref(), tape, &dout)?;
        drop(dout);

        let (below_q, below_k) = (map.below(stage, level, queries), map.below(stage, level, keys));
        let adapted = inner_q.is_some() || inner_k.is_some() || inner_v.is_some();
        let x = if adapted { Some(self.norm(&k_rows, &tape.residual, &weights.input_norm)?) } else { None };
        let x_q = match (&x, last) {
            (Some(x), true) => Some(self.gather(&q_rows, &level.narrow, hidden, x)?),
            _ => None,
        };
        let x = x.as_deref();
        let k = Step { layer, module: Module::KProj, level, view: keys, below: below_k.as_ref(), dy: &*dk, x, inner: inner_k };
        let dx = self.step(&k, None)?;
        let v = Step { module: Module::VProj, dy: &*dv, inner: inner_v, ..k };
        let dx = self.step(&v, dx)?;
        let x = x_q.as_deref().or(x);
        let q = Step { layer, module: Module::QProj, level, view: queries, below: below_q.as_ref(), dy: &*dq, x, inner: inner_q };
        let (dx, dx_q) = if last { (dx, self.step(&q, None)?) } else { (self.step(&q, dx)?, None) };
        let (Some(k_rows), Some(mut dx)) = (below_k, dx) else { return Ok(gradient) };

        let mut gradient = gradient;
        if let (Some(q_rows), Some(dx_q)) = (below_q.filter(|_| last), dx_q) {
            // The labelled rows join the others again.
            self.device.scatter_add(&q_rows, &level.narrow, hidden, &dx_q, &mut dx)?;
            let mut wide = self.activation(&keys.rows, hidden)?;
            self.device.rms_norm_backward(&k_rows, 1, &dx, &tape.residual, &weights.input_norm, eps, &mut wide, false)?;
            self.device.scatter_add(&q_rows, &level.narrow, hidden, &gradient, &mut wide)?;
            return Ok(wide);
        }
        self.device.rms_norm_backward(&k_rows, 1, &dx, &tape.residual, &weights.input_norm, eps, &mut gradient, true)?;
        Ok(gradient)
    }

    /// Attention, rotation and head norms: gradients of what q, k and v wrote.
    fn inner_attention_backward(
        &mut self,
        (q_rows, k_rows): (&Layout, &Layout),
        (queries, keys): (&View, &View),
        qk_norm: Option<&(D::Weight, D::Weight)>,
        tape: &AttentionTape<D>,
        dout: &D::Buffer,
    ) -> Result<[Buffer<D>; 3], DeviceError> {
        let trunk = self.trunk;
        let (shape, eps) = (trunk.attention_shape(), trunk.config.rms_norm_eps);
        let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let mut dq = self.activation(&queries.rows, q_width)?;
        let (mut dk, mut dv) = (self.activation(&keys.rows, kv_width)?, self.activation(&keys.rows, kv_width)?);
        let AttentionTape { q, k, v, out, lse, .. } = tape;
        self.device.attention_backward(q_rows, k_rows, shape, q, k, v, out, lse, dout, &mut dq, &mut dk, &mut dv)?;
        self.device.rope(q_rows, shape.heads, shape.head_dim, &trunk.rope, &mut dq, true)?;
        self.device.rope(k_rows, shape.kv_heads, shape.head_dim, &trunk.rope, &mut dk, true)?;
        if let (Some((q_norm, k_norm)), Some((q, k))) = (qk_norm, &tape.before_norm) {
            let mut dx = self.activation(&queries.rows, q_width)?;
            self.device.rms_norm_backward(q_rows, shape.heads, &dq, q, q_norm, eps, &mut dx, false)?;
            dq = dx;
            let mut dx = self.activation(&keys.rows, kv_width)?;
            self.device.rms_norm_backward(k_rows, shape.kv_heads, &dk, k, k_norm, eps, &mut dx, false)?;
            dk = dx;
        }
        Ok([dq, dk, dv])
    }

    /// One module: adapter gradients of the members that carry it and, on the rows `below`, the gradient of what it read, added to `dx`
    /// where one is given.
    fn step(&mut self, step: &Step<'_, D>, dx: Option<Buffer<D>>) -> Result<Option<Buffer<D>>, DeviceError> {
        let Step { layer, module, level, view, below, dy, x, inner } = *step;
        let trunk = self.trunk;
        let Some(weight) = trunk.layers.get(layer).map(|weights| &weights.linear(module).weight) else { return Err(no_layer(layer)) };
        let mut dx = match (below, dx) {
            (None, _) => None,
            (Some(rows), Some(mut dx)) => {
                self.device.linear_backward(rows, dy, weight, &mut dx, true)?;
                Some(dx)
            }
            (Some(rows), None) => {
                let mut dx = self.activation(&view.rows, trunk.config.module_in(module))?;
                self.device.linear_backward(rows, dy, weight, &mut dx, false)?;
                Some(dx)
            }
        };
        if let (Some((s, width)), Some(x)) = (inner, x) {
            let (map, stage) = (self.map, Stage::of(layer, module));
            let mut ending = lora_grads(self.members, level, (layer, module), |member| !map.continues_below(member, stage));
            if !ending.is_empty() {
                self.device.lora_backward(&view.rows, &mut ending, dy, x, s, *width, None)?;
            }
            let mut going_on = lora_grads(self.members, level, (layer, module), |member| map.continues_below(member, stage));
            if !going_on.is_empty() {
                self.device.lora_backward(&view.rows, &mut going_on, dy, x, s, *width, dx.as_deref_mut())?;
            }
        }
        Ok(dx)
    }

    /// Takes the gradient from the level of a half layer to the level below, where one begins there.
    fn descend(&mut self, half: usize, labelled: bool, gradient: Buffer<D>) -> Result<Buffer<D>, DeviceError> {
        let (map, hidden) = (self.map, self.trunk.config.hidden_size);
        let Some(below) = map.beneath(half) else { return Ok(gradient) };
        let Some(rows) = map.below(Stage::first_of(half), below, below.view(labelled)) else { return Ok(gradient) };
        self.gather(&rows, &Level::descent(&rows), hidden, &gradient)
    }
}
