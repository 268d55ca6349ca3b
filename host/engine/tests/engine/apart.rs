//! A CPU device that says of itself that its memory is apart from the host's, and aligns segments: what a card does, as far as the engine
//! can see.

use nodus_kernels::cpu::{CpuBuffer, CpuDevice, CpuWeight};
use nodus_kernels::{AdamWItem, AttentionShape, Device, DeviceError, HostTensor, Layout, LoraGrads, LoraIn, LoraOut, LoraRows, Use};

type Done = Result<(), DeviceError>;
type Buffer = CpuBuffer;
type Weight = CpuWeight;

/// Rows to which its segments are aligned.
pub(crate) const ALIGN: usize = 8;

pub(crate) struct Apart {
    pub(crate) inner: CpuDevice,
    /// Whether the first number that SwiGLU gives depends on how many rows it is given: a breach of the contract.
    pub(crate) leaks: bool,
    /// Whether it says so.
    pub(crate) owns_up: bool,
    /// How often it zeroed what passes left.
    pub(crate) forgot: u32,
}

impl Apart {
    pub(crate) fn new(inner: CpuDevice) -> Self {
        Self { inner, leaks: false, owns_up: false, forgot: 0 }
    }

    fn leak(&mut self, rows: &Layout, out: &mut Buffer) -> Done {
        let (mut first, Some(segment)) = ([0.0], rows.segments().first()) else { return Ok(()) };
        let at = segment.start * (self.inner.len(out) / rows.rows());
        self.inner.download(out, at, &mut first)?;
        self.inner.upload(&[first[0] + rows.rows() as f32 * 1e-3], out, at)
    }
}

#[rustfmt::skip]
impl Device for Apart {
    type Buffer = Buffer;
    type Weight = Weight;

    fn has_separate_memory(&self) -> bool { true }
    fn row_align(&self) -> usize { ALIGN }
    fn forget_passes(&mut self) -> Done { self.forgot += 1; Ok(()) }
    fn unproven(&self) -> Vec<String> { if self.owns_up { vec!["swiglu".into()] } else { Vec::new() } }

    fn class(&self, matrices: &[(usize, usize)]) -> Vec<(String, String)> { self.inner.class(matrices) }
    fn allocated_bytes(&self) -> u64 { self.inner.allocated_bytes() }
    fn free_bytes(&self) -> u64 { self.inner.free_bytes() }
    fn bound(&mut self, bytes: u64) -> Done { self.inner.bound(bytes) }
    fn load(&mut self, tensor: &HostTensor) -> Result<Weight, DeviceError> { self.inner.load(tensor) }
    fn alloc(&mut self, usage: Use, len: usize) -> Result<Buffer, DeviceError> { self.inner.alloc(usage, len) }
    fn len(&self, buffer: &Buffer) -> usize { self.inner.len(buffer) }
    fn upload(&mut self, data: &[f32], buffer: &mut Buffer, offset: usize) -> Done { self.inner.upload(data, buffer, offset) }
    fn download(&mut self, buffer: &Buffer, offset: usize, data: &mut [f32]) -> Done { self.inner.download(buffer, offset, data) }
    fn embed(&mut self, rows: &Layout, tokens: &[u32], table: &Weight, out: &mut Buffer) -> Done { self.inner.embed(rows, tokens, table, out) }
    fn rms_norm(&mut self, rows: &Layout, groups: usize, x: &Buffer, weight: &Weight, eps: f32, out: &mut Buffer) -> Done { self.inner.rms_norm(rows, groups, x, weight, eps, out) }
    fn rms_norm_backward(&mut self, rows: &Layout, groups: usize, dy: &Buffer, x: &Buffer, weight: &Weight, eps: f32, dx: &mut Buffer, accumulate: bool) -> Done { self.inner.rms_norm_backward(rows, groups, dy, x, weight, eps, dx, accumulate) }
    fn linear(&mut self, rows: &Layout, x: &Buffer, weight: &Weight, bias: Option<&Weight>, out: &mut Buffer) -> Done { self.inner.linear(rows, x, weight, bias, out) }
    fn linear_backward(&mut self, rows: &Layout, dy: &Buffer, weight: &Weight, dx: &mut Buffer, accumulate: bool) -> Done { self.inner.linear_backward(rows, dy, weight, dx, accumulate) }
    fn lora(&mut self, rows: &Layout, groups: &[LoraRows<'_, Buffer>], x: &Buffer, modules: &mut [LoraOut<'_, Buffer>]) -> Done { self.inner.lora(rows, groups, x, modules) }
    fn lora_backward(&mut self, rows: &Layout, groups: &mut [LoraGrads<'_, Buffer>], x: &Buffer, modules: &[LoraIn<'_, Buffer>], dx: Option<&mut Buffer>) -> Done { self.inner.lora_backward(rows, groups, x, modules, dx) }
    fn rope(&mut self, rows: &Layout, heads: usize, head_dim: usize, table: &Buffer, x: &mut Buffer, inverse: bool) -> Done { self.inner.rope(rows, heads, head_dim, table, x, inverse) }
    fn attention(&mut self, q_rows: &Layout, kv_rows: &Layout, shape: AttentionShape, q: &Buffer, k: &Buffer, v: &Buffer, out: &mut Buffer, lse: &mut Buffer) -> Done { self.inner.attention(q_rows, kv_rows, shape, q, k, v, out, lse) }
    fn attention_backward(&mut self, q_rows: &Layout, kv_rows: &Layout, shape: AttentionShape, q: &Buffer, k: &Buffer, v: &Buffer, out: &Buffer, lse: &Buffer, dout: &Buffer, dq: &mut Buffer, dk: &mut Buffer, dv: &mut Buffer) -> Done { self.inner.attention_backward(q_rows, kv_rows, shape, q, k, v, out, lse, dout, dq, dk, dv) }
    fn swiglu(&mut self, rows: &Layout, gate: &Buffer, up: &Buffer, out: &mut Buffer) -> Done {
        self.inner.swiglu(rows, gate, up, out)?;
        if self.leaks { self.leak(rows, out) } else { Ok(()) }
    }
    fn swiglu_backward(&mut self, rows: &Layout, dy: &Buffer, gate: &Buffer, up: &Buffer, dgate: &mut Buffer, dup: &mut Buffer) -> Done { self.inner.swiglu_backward(rows, dy, gate, up, dgate, dup) }
    fn add(&mut self, rows: &Layout, x: &Buffer, y: &mut Buffer) -> Done { self.inner.add(rows, x, y) }
    fn gather(&mut self, rows: &Layout, index: &[u32], width: usize, x: &Buffer, out: &mut Buffer) -> Done { self.inner.gather(rows, index, width, x, out) }
    fn scatter_add(&mut self, rows: &Layout, index: &[u32], width: usize, x: &Buffer, y: &mut Buffer) -> Done { self.inner.scatter_add(rows, index, width, x, y) }
    fn head_loss(&mut self, rows: &Layout, x: &Buffer, head: &Weight, targets: &[u32], weights: &[f32], losses: &mut Buffer, dx: Option<&mut Buffer>) -> Done { self.inner.head_loss(rows, x, head, targets, weights, losses, dx) }
    fn adamw(&mut self, items: &mut [AdamWItem<'_, Buffer>], norms: &mut Buffer) -> Done { self.inner.adamw(items, norms) }
}
