//! The backward pass, half a layer at a time, from the top to each member's cut.
//!
//! Never computes a gradient that no adapter of a member needs.

use nodus_kernels::{Device, DeviceError, Layout, LoraIn, SwigluGrads};
use nodus_protocol::Module;

use super::forward::no_layer;
use super::{AttentionTape, Buffer, Inner, LayerTape, MlpTape, Pass, Projected, lora_grads};
use crate::rows::{Level, Stage, View};

/// Modules that read the same x, on the way down.
struct Step<'x, D: Device, const N: usize> {
    layer: usize,
    level: &'x Level,
    view: &'x View,
    /// The rows that need a gradient below the modules' stage.
    below: Option<&'x Layout>,
    /// What they read; absent where nobody carries them.
    x: Option<&'x D::Buffer>,
    modules: [Down<'x, D>; N],
}

/// One of them: the gradient of what it wrote, and what its adapters left.
#[derive(Clone, Copy)]
struct Down<'x, D: Device> {
    module: Module,
    dy: &'x D::Buffer,
    inner: &'x Inner<D>,
}

/// Modules that somebody carries, their stage, what their adapters read, and x.
type Carried<'x, D> = (Vec<Module>, Stage, Vec<LoraIn<'x, <D as Device>::Buffer>>, &'x <D as Device>::Buffer);

impl<'x, D: Device, const N: usize> Step<'x, D, N> {
    /// None where nobody carries any.
    fn carried(&self) -> Option<Carried<'x, D>> {
        let carried = self.modules.iter().filter_map(|down| Some((down.module, down.dy, down.inner.as_ref()?)));
        let (names, read): (Vec<Module>, Vec<_>) =
            carried.map(|(module, dy, (s, s_width))| (module, LoraIn { dy, s: &**s, s_width: *s_width })).unzip();
        let stage = Stage::of(self.layer, *names.first()?);
        Some((names, stage, read, self.x?))
    }
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
                    let (_, attention, mlp) = self.layer(layer, &input, true)?;
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
        let (level, _) = map.level(2 * layer + 1);
        let view = level.view(layer + 1 == trunk.layers.len());
        let [inner_gate, inner_up, inner_down] = &tape.inner;
        let Some([gate, up]) = tape.gate_up.as_deref() else { return Err(no_layer(layer)) };

        let stage = Stage::of(layer, Module::DownProj);
        if map.at(stage, level, view).is_none() {
            return Ok(());
        }
        let below = map.below(stage, level, view);
        let x = tape.product.as_deref();
        let modules = [Down { module: Module::DownProj, dy: &**gradient, inner: inner_down }];
        let step = Step { layer, level, view, below: below.as_ref(), x, modules };
        let mut dproduct = self.frozen(&step)?;
        let (Some(rows), Some(dx)) = (&below, &mut dproduct) else { return self.adapters(&step, None) };
        let mut dgate_up = self.together(&view.rows, &[Module::GateProj, Module::UpProj])?;
        let [dgate, dup] = &mut *dgate_up else { return Err(no_layer(layer)) };
        self.adapters_swiglu(&step, dx, SwigluGrads { rows, gate, up, dgate: &mut *dgate, dup: &mut *dup })?;
        drop(dproduct);

        let below = map.below(Stage::of(layer, Module::GateProj), level, view);
        let gate = Down { module: Module::GateProj, dy: &*dgate, inner: inner_gate };
        let up = Down { module: Module::UpProj, dy: &*dup, inner: inner_up };
        let dx = self.step(Step { layer, level, view, below: below.as_ref(), x: tape.x.as_deref(), modules: [gate, up] })?;
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
        let modules = [Down { module: Module::OProj, dy: &*gradient, inner: inner_o }];
        let dout = self.step(Step { layer, level, view: queries, below: below.as_ref(), x: Some(&*tape.out), modules })?;
        let stage = Stage::of(layer, Module::QProj);
        let (Some(q_rows), Some(dout), Some(k_rows)) = (below, dout, map.at(stage, level, keys)) else { return Ok(gradient) };
        let projected = self.inner_attention_backward((&q_rows, &k_rows), (queries, keys), weights.qk_norm.as_ref(), tape, &dout)?;
        let [dq, dk, dv] = projected.each()?;
        drop(dout);

        let (below_q, below_k) = (map.below(stage, level, queries), map.below(stage, level, keys));
        let x = tape.x.as_ref().map(|(x, _)| &**x);
        let k = Down { module: Module::KProj, dy: dk, inner: inner_k };
        let v = Down { module: Module::VProj, dy: dv, inner: inner_v };
        let q = Down { module: Module::QProj, dy: dq, inner: inner_q };
        let (dx, dx_q) = if last {
            let dx = self.step(Step { layer, level, view: keys, below: below_k.as_ref(), x, modules: [k, v] })?;
            let x = tape.x.as_ref().map(|(x, x_q)| x_q.as_deref().unwrap_or(x));
            (dx, self.step(Step { layer, level, view: queries, below: below_q.as_ref(), x, modules: [q] })?)
        } else {
            (self.step(Step { layer, level, view: keys, below: below_k.as_ref(), x, modules: [k, v, q] })?, None)
        };
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
    ) -> Result<Projected<D>, DeviceError> {
        let trunk = self.trunk;
        let (shape, eps) = (trunk.attention_shape(), trunk.config.rms_norm_eps);
        let AttentionTape { projected, normed, out, lse, .. } = tape;
        let mut gradients = self.projected((&queries.rows, &keys.rows), projected.apart.is_some())?;
        let [dq, dk, dv] = gradients.each_mut()?;
        let [raw_q, raw_k, v] = projected.each()?;
        let (Some((q_norm, k_norm)), Some((q, k))) = (qk_norm, normed) else {
            self.device.attention_backward(q_rows, k_rows, shape, raw_q, raw_k, v, out, lse, dout, dq, dk, dv)?;
            self.device.rope(q_rows, shape.heads, shape.head_dim, &trunk.rope, dq, true)?;
            self.device.rope(k_rows, shape.kv_heads, shape.head_dim, &trunk.rope, dk, true)?;
            return Ok(gradients);
        };
        let mut normed_dq = self.activation(&queries.rows, shape.heads * shape.head_dim)?;
        let mut normed_dk = self.activation(&keys.rows, shape.kv_heads * shape.head_dim)?;
        self.device.attention_backward(q_rows, k_rows, shape, q, k, v, out, lse, dout, &mut normed_dq, &mut normed_dk, dv)?;
        self.device.rope(q_rows, shape.heads, shape.head_dim, &trunk.rope, &mut normed_dq, true)?;
        self.device.rope(k_rows, shape.kv_heads, shape.head_dim, &trunk.rope, &mut normed_dk, true)?;
        self.device.rms_norm_backward(q_rows, shape.heads, &normed_dq, raw_q, q_norm, eps, dq, false)?;
        self.device.rms_norm_backward(k_rows, shape.kv_heads, &normed_dk, raw_k, k_norm, eps, dk, false)?;
        Ok(gradients)
    }

    /// Adapter gradients of the members that carry the modules and, on the rows `below`, the gradient of what these read.
    fn step<const N: usize>(&mut self, step: Step<'_, D, N>) -> Result<Option<Buffer<D>>, DeviceError> {
        let mut dx = self.frozen(&step)?;
        self.adapters(&step, dx.as_deref_mut())?;
        Ok(dx)
    }

    /// On the rows `below`, the frozen part of the gradient of what the modules read.
    fn frozen<const N: usize>(&mut self, step: &Step<'_, D, N>) -> Result<Option<Buffer<D>>, DeviceError> {
        let Step { layer, view, below, modules, .. } = step;
        let trunk = self.trunk;
        let Some(weights) = trunk.layers.get(*layer) else { return Err(no_layer(*layer)) };
        let (Some(rows), Some(first)) = (below, modules.first()) else { return Ok(None) };
        let mut dx = self.activation(&view.rows, trunk.config.module_in(first.module))?;
        let parts: Vec<_> = modules.iter().map(|down| (down.dy, &weights.linear(down.module).weight)).collect();
        self.device.linear_backward_together(rows, &parts, &mut dx)?;
        Ok(Some(dx))
    }

    /// Adapter gradients of the members that carry the modules; what their adapters add to dx is added.
    fn adapters<const N: usize>(&mut self, step: &Step<'_, D, N>, dx: Option<&mut D::Buffer>) -> Result<(), DeviceError> {
        let Step { layer, level, view, .. } = step;
        let Some((names, stage, read, x)) = step.carried() else { return Ok(()) };
        let map = self.map;
        let mut groups = lora_grads(self.members, level, (*layer, &names), |member| map.continues_below(member, stage));
        self.device.lora_backward(&view.rows, &mut groups, x, &read, dx)
    }

    /// The same, and from dx what SwiGLU's backward makes of it.
    fn adapters_swiglu(
        &mut self,
        step: &Step<'_, D, 1>,
        dx: &mut D::Buffer,
        swiglu: SwigluGrads<'_, D::Buffer>,
    ) -> Result<(), DeviceError> {
        let Step { layer, level, view, .. } = step;
        let Some((names, stage, read, x)) = step.carried() else {
            let SwigluGrads { rows, gate, up, dgate, dup } = swiglu;
            return self.device.swiglu_backward(rows, dx, gate, up, dgate, dup);
        };
        let map = self.map;
        let mut groups = lora_grads(self.members, level, (*layer, &names), |member| map.continues_below(member, stage));
        self.device.lora_backward_swiglu(&view.rows, &mut groups, x, &read, dx, swiglu)
    }

    /// Takes the gradient from the level of a half layer to the level below, where one begins there.
    fn descend(&mut self, half: usize, labelled: bool, gradient: Buffer<D>) -> Result<Buffer<D>, DeviceError> {
        let (map, hidden) = (self.map, self.trunk.config.hidden_size);
        let Some(below) = map.beneath(half) else { return Ok(gradient) };
        let Some(rows) = map.below(Stage::first_of(half), below, below.view(labelled)) else { return Ok(gradient) };
        self.gather(&rows, &Level::descent(&rows), hidden, &gradient)
    }
}
