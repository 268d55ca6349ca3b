//! What operations are told beside buffers: what a buffer is for, sizes, adapters, optimiser steps.
//!
//! Never holds a buffer of its own.

use crate::Layout;

/// What a buffer is for; the device chooses the element type by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Activations and their gradients, in the device's activation type.
    Activation,
    /// Adapter weights, gradients, moments, losses, norms, tables: float32.
    State,
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`. Query head h reads key head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// Width of a head. Scores are scaled by 1 / sqrt(head_dim).
    pub head_dim: usize,
    /// A row sees itself and this many keys less one before it; none: every key before it.
    pub window: Option<usize>,
}

/// Dropout on the input of one adapted module. Element (sequence, position, feature) is kept when
/// `uniform(philox(key, [feature / 4, position, sequence, 0])[feature % 4]) >= probability`, and is then divided by 1 - probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Key of the stream: a function of job seed, adapter, module and forward-backward count.
    pub key: u64,
    /// Probability of dropping, above 0 and below 1.
    pub probability: f32,
}

/// One adapted module inside an adapter's flat parameter buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraModule {
    /// Where A (rank x inputs, row-major) begins.
    pub a: usize,
    /// Where B (outputs x rank, row-major) begins.
    pub b: usize,
    /// Rank.
    pub rank: usize,
    /// Width read.
    pub inputs: usize,
    /// Width written.
    pub outputs: usize,
    /// s in y = W x + s B A x.
    pub scale: f32,
}

/// What an adapter has on one module of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraSite {
    /// The module.
    pub module: LoraModule,
    /// Dropout, while training with it.
    pub dropout: Option<Dropout>,
}

/// Some segments of a layout that belong to one adapter.
#[derive(Debug)]
pub struct LoraRows<'a, B> {
    /// First segment and one past the last.
    pub segments: std::ops::Range<usize>,
    /// What it has on each module of the call; none where it has nothing.
    pub sites: Vec<Option<LoraSite>>,
    /// The adapter's flat parameters (`State`).
    pub params: &'a B,
}

/// The same, with where the gradient goes.
#[derive(Debug)]
pub struct LoraGrads<'a, B> {
    /// Rows, modules, dropout, parameters.
    pub rows: LoraRows<'a, B>,
    /// The adapter's flat gradient (`State`), laid out as its parameters. +=
    pub grads: &'a mut B,
    /// Whether the gradient of what its rows read is wanted.
    pub wants_dx: bool,
}

/// What one module of a forward call writes.
#[derive(Debug)]
pub struct LoraOut<'a, B> {
    /// s (`State`): the first `rank` of `s_width` columns. =
    pub s: &'a mut B,
    /// Columns of s.
    pub s_width: usize,
    /// y, as wide as the module's outputs. +=
    pub y: &'a mut B,
}

/// What one module of a backward call reads.
#[derive(Debug)]
pub struct LoraIn<'a, B> {
    /// dy, as wide as the module's outputs.
    pub dy: &'a B,
    /// s of the forward call.
    pub s: &'a B,
    /// Columns of s.
    pub s_width: usize,
}

/// What the backward of SwiGLU reads and writes beside the gradient of what it wrote.
#[derive(Debug)]
pub struct SwigluGrads<'a, B> {
    /// The rows that need it, of the buffers' rows.
    pub rows: &'a Layout,
    /// What SwiGLU read.
    pub gate: &'a B,
    /// Likewise.
    pub up: &'a B,
    /// =
    pub dgate: &'a mut B,
    /// =
    pub dup: &'a mut B,
}

/// One adapter's AdamW step (Loshchilov and Hutter, 2019; torch.optim.AdamW's order of operations).
///
/// With g = grads / divisor and n = |g|: norms\[`norm_index`\] = n. Where n is not finite, nothing else happens. Otherwise g is scaled by
/// min(1, max_grad_norm / (n + 1e-6)) where a maximum is given (torch.nn.utils.clip_grad_norm_), then
/// p -= lr wd p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= (lr / (1 - b1^t)) m / (sqrt(v) / sqrt(1 - b2^t) + eps);
/// and grads = 0.
#[derive(Debug)]
pub struct AdamWItem<'a, B> {
    /// p
    pub params: &'a mut B,
    /// The accumulated gradient.
    pub grads: &'a mut B,
    /// m
    pub moment1: &'a mut B,
    /// v
    pub moment2: &'a mut B,
    /// What the gradient is divided by.
    pub divisor: f32,
    /// Clipping.
    pub max_grad_norm: Option<f32>,
    /// lr
    pub learning_rate: f32,
    /// b1
    pub beta1: f32,
    /// b2
    pub beta2: f32,
    /// eps
    pub eps: f32,
    /// wd
    pub weight_decay: f32,
    /// t, 1 at the first step.
    pub step: u64,
    /// Where the norm goes.
    pub norm_index: usize,
}
