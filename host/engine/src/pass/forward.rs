//! The forward pass, half a layer at a time.
//!
//! Never keeps what no backward pass will read.

use std::rc::Rc;

use nodus_kernels::{Device, DeviceError, LoraOut, Use};
use nodus_protocol::Module;

use super::memory::Keep;
use super::{AttentionTape, Buffer, Inner, LayerTape, Member, MlpTape, Pass, Projected, Together, lora_rows};
use crate::rows::{Level, View};

/// The residual stream after a layer, and the tapes of its attention and its MLP.
type Layer<D> = (Buffer<D>, Option<Box<AttentionTape<D>>>, Box<MlpTape<D>>);

impl<D: Device> Pass<'_, '_, D> {
    /// Embedding and all layers: the residual stream at the top, and one tape a layer that the backward pass reaches, bottom up.
    pub(super) fn forward(&mut self, keep: &[Keep]) -> Result<(Buffer<D>, Vec<LayerTape<D>>), DeviceError> {
        let map = self.map;
        let lowest = &map.level(0).0.all.rows;
        let mut residual = self.activation(lowest, self.trunk.config.hidden_size)?;
        if map.first_half() == 0 {
            self.device.embed(lowest, &map.tokens, &self.trunk.embed, &mut residual)?;
        }
        let mut tapes = Vec::new();
        for (layer, keep) in keep.iter().enumerate().skip(map.first_half() / 2) {
            let input = Rc::new(self.join(2 * layer, residual)?);
            let (out, attention, mlp) = self.layer(layer, &input, matches!(keep, Keep::Whole { .. }))?;
            match keep {
                Keep::Nothing => {}
                Keep::Input => tapes.push(LayerTape::Input(input)),
                Keep::Whole { attention: kept } => tapes.push(LayerTape::Whole(attention.filter(|_| *kept), mlp)),
            }
            residual = out;
        }
        Ok((residual, tapes))
    }

    /// A layer on what [`Pass::join`] made of the residual stream: the stream after it, and the tapes of its halves. There is none of the
    /// attention where all rows come in above it, and less in that of the MLP where it is not to be kept.
    pub(super) fn layer(&mut self, layer: usize, input: &Rc<Buffer<D>>, is_kept: bool) -> Result<Layer<D>, DeviceError> {
        let (middle, attention) = if 2 * layer < self.map.first_half() {
            let none = &self.map.level(2 * layer).0.all.rows;
            (self.activation(none, self.trunk.config.hidden_size)?, None)
        } else {
            let (middle, tape) = self.attention(layer, input)?;
            (middle, Some(Box::new(tape)))
        };
        let middle = self.join(2 * layer + 1, middle)?;
        let (out, mlp) = self.mlp(layer, &Rc::new(middle), is_kept)?;
        Ok((out, attention, Box::new(mlp)))
    }

    /// The attention half of a layer: the residual stream after it (the labelled rows alone in the last layer), and its tape.
    fn attention(&mut self, layer: usize, input: &Rc<Buffer<D>>) -> Result<(Buffer<D>, AttentionTape<D>), DeviceError> {
        let (trunk, map) = (self.trunk, self.map);
        let Some(weights) = trunk.layers.get(layer) else { return Err(no_layer(layer)) };
        let (hidden, shape) = (trunk.config.hidden_size, trunk.attention_shape());
        let last = layer + 1 == trunk.layers.len();
        let (level, below) = map.level(2 * layer);

        // What reads no adapter is computed before the fan-out: once for all members of a stream.
        let base = below.unwrap_or(level);
        let x = self.norm(&base.all.rows, input, &weights.input_norm)?;
        // In the last layer q has the labelled rows alone; where these are all there are, they are not copied.
        let narrows = last && !(base.is_all_labelled() && level.is_all_labelled());
        let x_q = if narrows { Some(self.gather(&base.labelled.rows, &base.narrow, hidden, &x)?) } else { None };
        let projected = self.project(layer, base, &x, last.then(|| x_q.as_ref().unwrap_or(&x)))?;
        let (queries, keys) = (level.view(last), &level.all);
        let (residual, x, x_q, mut projected) = match below {
            None => (input.clone(), x, x_q, projected),
            Some(_) => {
                let mut fanned_out = self.projected((&queries.rows, &keys.rows), last)?;
                let to = fanned_out.each_mut()?.into_iter().zip([Module::QProj, Module::KProj, Module::VProj]).zip([queries, keys, keys]);
                for (from, ((to, module), view)) in projected.each()?.into_iter().zip(to) {
                    let width = trunk.config.module_out(module);
                    self.device.gather(&view.rows, view.origin(), width, from, to)?;
                }
                let x_q = x_q.map(|x_q| self.fan_out(queries, hidden, &x_q)).transpose()?;
                (Rc::new(self.fan_out(keys, hidden, input)?), self.fan_out(keys, hidden, &x)?, x_q, fanned_out)
            }
        };

        let [q, k, v] = projected.each_mut()?;
        let [inner_q, inner_k, inner_v] = if last {
            let [inner_q] = self.lora(level, queries, layer, x_q.as_ref().unwrap_or(&x), [(Module::QProj, q)])?;
            let [inner_k, inner_v] = self.lora(level, keys, layer, &x, [(Module::KProj, k), (Module::VProj, v)])?;
            [inner_q, inner_k, inner_v]
        } else {
            self.lora(level, keys, layer, &x, [(Module::QProj, q), (Module::KProj, k), (Module::VProj, v)])?
        };
        let x = [&inner_q, &inner_k, &inner_v].iter().any(|inner| inner.is_some()).then_some((x, x_q));
        let [q, k, v] = projected.each_mut()?;
        let mut normed = None;
        if let Some((q_norm, k_norm)) = &weights.qk_norm {
            normed = Some((self.head_norm(queries, shape.heads, q, q_norm)?, self.head_norm(keys, shape.kv_heads, k, k_norm)?));
        }
        let (q, k) = match &mut normed {
            Some((q, k)) => (&mut **q, &mut **k),
            None => (q, k),
        };
        self.device.rope(&queries.rows, shape.heads, shape.head_dim, &trunk.rope, q, false)?;
        self.device.rope(&keys.rows, shape.kv_heads, shape.head_dim, &trunk.rope, k, false)?;
        let mut out = self.activation(&queries.rows, shape.heads * shape.head_dim)?;
        let mut lse = self.buffer(Use::State, &queries.rows, shape.heads)?;
        self.device.attention(&queries.rows, &keys.rows, shape, q, k, v, &mut out, &mut lse)?;

        let narrowed = if narrows { Some(self.gather(&queries.rows, &level.narrow, hidden, &residual)?) } else { None };
        let mut next = self.linear_onto(queries, &out, layer, Module::OProj, narrowed.as_ref().unwrap_or(&residual))?;
        let [inner_o] = self.lora(level, queries, layer, &out, [(Module::OProj, &mut *next)])?;
        Ok((next, AttentionTape { residual, x, projected, normed, out, lse, inner: [inner_q, inner_k, inner_v, inner_o] }))
    }

    /// The MLP half of a layer: the residual stream after it, and its tape.
    fn mlp(&mut self, layer: usize, input: &Rc<Buffer<D>>, is_kept: bool) -> Result<(Buffer<D>, MlpTape<D>), DeviceError> {
        let (trunk, map) = (self.trunk, self.map);
        let Some(weights) = trunk.layers.get(layer) else { return Err(no_layer(layer)) };
        let (hidden, width) = (trunk.config.hidden_size, trunk.config.intermediate_size);
        let last = layer + 1 == trunk.layers.len();
        let (level, below) = map.level(2 * layer + 1);

        let base = below.unwrap_or(level).view(last);
        let x = self.norm(&base.rows, input, &weights.post_norm)?;
        let names = [Module::GateProj, Module::UpProj];
        let plain = below.is_none() && !is_kept && names.iter().all(|module| self.width(level, layer, *module).is_none());
        if plain && weights.gate.bias.is_none() && weights.up.bias.is_none() {
            return self.mlp_in_one(layer, level, base, &x, input);
        }
        let gate_up = self.linear_together(base, &x, layer, &names)?;
        let view = level.view(last);
        let (residual, x, mut gate_up) = match below {
            None => (input.clone(), x, gate_up),
            Some(_) => {
                let mut fanned_out = self.together(&view.rows, &names)?;
                for (from, to) in gate_up.iter().zip(fanned_out.iter_mut()) {
                    self.device.gather(&view.rows, view.origin(), width, from, to)?;
                }
                (Rc::new(self.fan_out(view, hidden, input)?), self.fan_out(view, hidden, &x)?, fanned_out)
            }
        };

        let [gate, up] = &mut *gate_up else { return Err(no_layer(layer)) };
        let mut product = self.activation(&view.rows, width)?;
        let [inner_gate, inner_up] = self.lora_swiglu(level, view, layer, &x, [gate, up], &mut product)?;
        let x = (inner_gate.is_some() || inner_up.is_some()).then_some(x);
        let (next, inner_down) = self.down(layer, level, view, &product, &residual)?;
        let product = inner_down.is_some().then_some(product);
        Ok((next, MlpTape { residual, x, product, gate_up: Some(gate_up), inner: [inner_gate, inner_up, inner_down] }))
    }

    /// The MLP half on x, the norm of its input, where nobody carries gate and up and no backward pass reads them.
    fn mlp_in_one(
        &mut self,
        layer: usize,
        level: &Level,
        view: &View,
        x: &D::Buffer,
        input: &Rc<Buffer<D>>,
    ) -> Result<(Buffer<D>, MlpTape<D>), DeviceError> {
        let trunk = self.trunk;
        let Some(weights) = trunk.layers.get(layer) else { return Err(no_layer(layer)) };
        let mut product = self.activation(&view.rows, trunk.config.intermediate_size)?;
        let mut between = self.together(&view.rows, &[Module::GateProj, Module::UpProj])?;
        let gate_up = [&weights.gate.weight, &weights.up.weight];
        self.device.linear_swiglu(&view.rows, x, gate_up, &mut between, &mut product)?;
        drop(between);
        let (next, inner_down) = self.down(layer, level, view, &product, input)?;
        Ok((next, MlpTape { residual: input.clone(), x: None, product: None, gate_up: None, inner: [None, None, inner_down] }))
    }

    /// Down with its adapters, on top of the residual stream.
    fn down(
        &mut self,
        layer: usize,
        level: &Level,
        view: &View,
        product: &D::Buffer,
        residual: &D::Buffer,
    ) -> Result<(Buffer<D>, Inner<D>), DeviceError> {
        let mut next = self.linear_onto(view, product, layer, Module::DownProj, residual)?;
        let [inner] = self.lora(level, view, layer, product, [(Module::DownProj, &mut *next)])?;
        Ok((next, inner))
    }

    /// Final norm, head and loss on the labelled rows: the loss of each, and where a member trains the gradient of the residual stream.
    pub(super) fn top(&mut self, residual: Buffer<D>) -> Result<(Buffer<D>, Option<Buffer<D>>), DeviceError> {
        let (trunk, map) = (self.trunk, self.map);
        let (level, _) = map.level(map.halves());
        let rows = &level.labelled.rows;
        let hidden = trunk.config.hidden_size;
        let x = self.norm(rows, &residual, &trunk.norm)?;
        let mut losses = self.buffer(Use::State, rows, 1)?;
        let (targets, weights) = (&map.targets, &map.weights);
        if let Some(rows) = map.top(level, false) {
            self.device.head_loss(&rows, &x, trunk.head(), targets, weights, &mut losses, None)?;
        }
        let Some(training) = map.top(level, true) else { return Ok((losses, None)) };
        let mut dx = self.activation(rows, hidden)?;
        self.device.head_loss(&training, &x, trunk.head(), targets, weights, &mut losses, Some(&mut *dx))?;
        let mut gradient = self.activation(rows, hidden)?;
        let eps = trunk.config.rms_norm_eps;
        self.device.rms_norm_backward(&training, 1, &dx, &residual, &trunk.norm, eps, &mut gradient, false)?;
        Ok((losses, Some(gradient)))
    }

    /// The frozen part of q, k and v; `x_q` is what q reads where it is apart: in the last layer.
    fn project(&mut self, layer: usize, level: &Level, x: &D::Buffer, x_q: Option<&Buffer<D>>) -> Result<Projected<D>, DeviceError> {
        let Some(x_q) = x_q else {
            let modules = [Module::KProj, Module::VProj, Module::QProj];
            return Ok(Projected { together: self.linear_together(&level.all, x, layer, &modules)?, apart: None });
        };
        let linear = {
            let trunk = self.trunk;
            &trunk.layers.get(layer).ok_or_else(|| no_layer(layer))?.q
        };
        let view = &level.labelled;
        let mut q = self.activation(&view.rows, self.trunk.config.module_out(Module::QProj))?;
        self.device.linear(&view.rows, x_q, &linear.weight, linear.bias.as_ref(), &mut q)?;
        let together = self.linear_together(&level.all, x, layer, &[Module::KProj, Module::VProj])?;
        Ok(Projected { together, apart: Some(q) })
    }

    /// The frozen part of modules that read the same x, and were loaded together, into new buffers.
    fn linear_together(&mut self, view: &View, x: &D::Buffer, layer: usize, modules: &[Module]) -> Result<Together<D>, DeviceError> {
        let trunk = self.trunk;
        let Some(weights) = trunk.layers.get(layer) else { return Err(no_layer(layer)) };
        let weights = modules.iter().map(|module| weights.linear(*module));
        let weights: Vec<_> = weights.map(|linear| (&linear.weight, linear.bias.as_ref())).collect();
        let mut outs = self.together(&view.rows, modules)?;
        self.device.linear_together(&view.rows, x, &weights, &mut outs)?;
        Ok(outs)
    }

    /// The frozen part of a module without a bias, on top of other rows, into a new buffer.
    fn linear_onto(
        &mut self,
        view: &View,
        x: &D::Buffer,
        layer: usize,
        module: Module,
        added: &D::Buffer,
    ) -> Result<Buffer<D>, DeviceError> {
        let trunk = self.trunk;
        let Some(linear) = trunk.layers.get(layer).map(|weights| weights.linear(module)) else { return Err(no_layer(layer)) };
        let mut out = self.activation(&view.rows, trunk.config.module_out(module))?;
        self.device.linear_add(&view.rows, x, &linear.weight, added, &mut out)?;
        Ok(out)
    }

    /// Adds the members' adapters to what each of some modules that read the same x wrote.
    fn lora<const N: usize>(
        &mut self,
        level: &Level,
        view: &View,
        layer: usize,
        x: &D::Buffer,
        modules: [(Module, &mut D::Buffer); N],
    ) -> Result<[Inner<D>; N], DeviceError> {
        let (mut names, mut inner, mut ys) = (Vec::with_capacity(N), [const { None }; N], Vec::with_capacity(N));
        for ((module, y), inner) in modules.into_iter().zip(&mut inner) {
            *inner = self.inner(level, view, layer, module)?;
            if inner.is_some() {
                names.push(module);
                ys.push(y);
            }
        }
        let groups = lora_rows(self.members, level, layer, &names);
        let carried = inner.iter_mut().flatten().zip(ys);
        let mut out: Vec<_> = carried.map(|((s, s_width), y)| LoraOut { s: &mut **s, s_width: *s_width, y }).collect();
        self.device.lora(&view.rows, &groups, x, &mut out)?;
        Ok(inner)
    }

    /// The same of gate and up, and what SwiGLU makes of them.
    fn lora_swiglu(
        &mut self,
        level: &Level,
        view: &View,
        layer: usize,
        x: &D::Buffer,
        [gate, up]: [&mut D::Buffer; 2],
        product: &mut D::Buffer,
    ) -> Result<[Inner<D>; 2], DeviceError> {
        let names = [Module::GateProj, Module::UpProj];
        if names.iter().any(|module| self.width(level, layer, *module).is_none()) {
            let inner = self.lora(level, view, layer, x, [(names[0], &mut *gate), (names[1], &mut *up)])?;
            self.device.swiglu(&view.rows, gate, up, product)?;
            return Ok(inner);
        }
        let mut inner = [self.inner(level, view, layer, names[0])?, self.inner(level, view, layer, names[1])?];
        let [Some((s_gate, width_gate)), Some((s_up, width_up))] = &mut inner else { return Err(no_layer(layer)) };
        let groups = lora_rows(self.members, level, layer, &names);
        let gate = LoraOut { s: &mut **s_gate, s_width: *width_gate, y: gate };
        let up = LoraOut { s: &mut **s_up, s_width: *width_up, y: up };
        self.device.lora_swiglu(&view.rows, &groups, x, [gate, up], product)?;
        Ok(inner)
    }

    /// How wide the s of a module is: as the largest rank of those who carry it and whose rows are here.
    fn width(&self, level: &Level, layer: usize, module: Module) -> Option<usize> {
        let here = |(number, member): (usize, &Member<'_, D>)| {
            let site = member.adapter.sites.get(layer, module)?;
            (!level.segments(number).is_empty()).then_some(site.rank)
        };
        self.members.iter().enumerate().filter_map(here).max()
    }

    /// Room for it.
    fn inner(&mut self, level: &Level, view: &View, layer: usize, module: Module) -> Result<Inner<D>, DeviceError> {
        let Some(width) = self.width(level, layer, module) else { return Ok(None) };
        Ok(Some((self.pool.take(self.device, Use::State, view.rows.rows() * width)?, width)))
    }

    fn head_norm(&mut self, view: &View, heads: usize, x: &D::Buffer, weight: &D::Weight) -> Result<Buffer<D>, DeviceError> {
        let config = &{ self.trunk }.config;
        let mut out = self.activation(&view.rows, heads * config.head_dim)?;
        self.device.rms_norm(&view.rows, heads, x, weight, config.rms_norm_eps, &mut out)?;
        Ok(out)
    }

    /// Rows of the level below, copied to where they go on.
    fn fan_out(&mut self, view: &View, width: usize, x: &D::Buffer) -> Result<Buffer<D>, DeviceError> {
        self.gather(&view.rows, view.origin(), width, x)
    }
}

/// A defect: the row map and the trunk disagree.
pub(super) fn no_layer(layer: usize) -> DeviceError {
    DeviceError::Failed(format!("the trunk has no layer {layer}"))
}
