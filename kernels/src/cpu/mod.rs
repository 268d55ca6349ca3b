//! The CPU device: the readable truth, in float32.
//!
//! Work is split over segments, heads, groups, row chunks of one segment and column ranges whose sizes are constants of the operation;
//! never by the number of threads, of rows beside, or of segments, and never over a reduction. One product covers rows of one sequence
//! only. So the bits of a row are a function of its sequence and of the device class.

mod adamw;
mod attention;
mod buffer;
mod check;
mod class;
mod head;
mod linear;
mod lora;
mod math;
mod matrix;
mod rows;
mod weight;
mod workers;

pub use buffer::CpuBuffer;
pub use weight::CpuWeight;

use buffer::Budget;
use check::{check_attention, check_index, check_module, matrix, read, width, write};
use matrix::{Mat, Write};
use workers::{Scratch, Workers};

use crate::{AdamWItem, AttentionShape, Device, DeviceError, HostTensor, Layout, LoraGrads, LoraIn, LoraModule, LoraOut, LoraRows, Use};

/// A CPU with some threads.
#[derive(Debug)]
pub struct CpuDevice {
    workers: Workers,
    budget: Budget,
    /// Working memory that more than one thread reads: inputs turned around, logits, gradients of low-rank products.
    shared: [Scratch; 2],
}

impl CpuDevice {
    /// A device that computes on `threads` threads, the calling one among them, without a bound on its buffers.
    ///
    /// # Errors
    /// Where `threads` is 0 or the system gives no threads.
    pub fn new(threads: usize) -> Result<Self, DeviceError> {
        Self::with_memory_limit(threads, u64::MAX)
    }

    /// The same, whose buffers hold at most `limit_bytes` at once.
    ///
    /// # Errors
    /// As [`CpuDevice::new`].
    pub fn with_memory_limit(threads: usize, limit_bytes: u64) -> Result<Self, DeviceError> {
        let workers = Workers::new(threads)?;
        Ok(Self { workers, budget: Budget::new(limit_bytes), shared: Default::default() })
    }
}

/// The module of a call, as the first group that has a site on it says.
fn module_of<'a>(mut groups: impl Iterator<Item = &'a LoraRows<'a, CpuBuffer>>, number: usize) -> Option<LoraModule> {
    groups.find_map(|group| group.sites[number].map(|site| site.module))
}

impl Device for CpuDevice {
    type Buffer = CpuBuffer;
    type Weight = CpuWeight;

    fn class(&self, _: &[(usize, usize)]) -> Vec<(String, String)> {
        class::class()
    }

    fn row_align(&self) -> usize {
        1
    }

    fn allocated_bytes(&self) -> u64 {
        self.budget.used()
    }

    fn free_bytes(&self) -> u64 {
        self.budget.free()
    }

    fn bound(&mut self, bytes: u64) -> Result<(), DeviceError> {
        // Nothing is kept for later.
        self.budget.bound(bytes);
        Ok(())
    }

    fn load(&mut self, tensor: &HostTensor) -> Result<CpuWeight, DeviceError> {
        Ok(CpuWeight::load(tensor))
    }

    fn alloc(&mut self, _usage: Use, len: usize) -> Result<CpuBuffer, DeviceError> {
        self.budget.alloc(len)
    }

    fn len(&self, buffer: &CpuBuffer) -> usize {
        buffer.data.len()
    }

    fn upload(&mut self, data: &[f32], buffer: &mut CpuBuffer, offset: usize) -> Result<(), DeviceError> {
        buffer.data[offset..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn download(&mut self, buffer: &CpuBuffer, offset: usize, data: &mut [f32]) -> Result<(), DeviceError> {
        data.copy_from_slice(&buffer.data[offset..][..data.len()]);
        Ok(())
    }

    fn copy(&mut self, from: &CpuBuffer, from_offset: usize, to: &mut CpuBuffer, to_offset: usize, len: usize) -> Result<(), DeviceError> {
        to.data[to_offset..][..len].copy_from_slice(&from.data[from_offset..][..len]);
        Ok(())
    }

    fn embed(&mut self, rows: &Layout, tokens: &[u32], table: &CpuWeight, out: &mut CpuBuffer) -> Result<(), DeviceError> {
        let (vocabulary, width) = table.matrix();
        check_index("tokens", rows, tokens, vocabulary);
        rows::embed(&self.workers, rows, tokens, matrix(table), write("out", out, rows.rows(), width));
        Ok(())
    }

    fn rms_norm(
        &mut self,
        rows: &Layout,
        groups: usize,
        x: &CpuBuffer,
        weight: &CpuWeight,
        eps: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let (n, weight) = (rows.rows(), weight.vector());
        let width = groups * weight.len();
        rows::rms_norm(&self.workers, rows, read("x", x, n, width), weight, eps, write("out", out, n, width));
        Ok(())
    }

    fn rms_norm_backward(
        &mut self,
        rows: &Layout,
        groups: usize,
        dy: &CpuBuffer,
        x: &CpuBuffer,
        weight: &CpuWeight,
        eps: f32,
        dx: &mut CpuBuffer,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let (n, weight) = (rows.rows(), weight.vector());
        let width = groups * weight.len();
        let (dy, x, dx) = (read("dy", dy, n, width), read("x", x, n, width), write("dx", dx, n, width));
        rows::rms_norm_backward(&self.workers, rows, dy, x, weight, eps, dx, accumulate);
        Ok(())
    }

    fn linear(
        &mut self,
        rows: &Layout,
        x: &CpuBuffer,
        weight: &CpuWeight,
        bias: Option<&CpuWeight>,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let (outputs, inputs) = weight.matrix();
        let bias = bias.map(CpuWeight::vector);
        assert!(bias.is_none_or(|bias| bias.len() == outputs), "a bias of {outputs} elements was expected");
        let (x, out) = (read("x", x, rows.rows(), inputs), write("out", out, rows.rows(), outputs));
        linear::linear(&self.workers, &mut self.shared[0], rows, x, matrix(weight), bias, out);
        Ok(())
    }

    fn linear_backward(
        &mut self,
        rows: &Layout,
        dy: &CpuBuffer,
        weight: &CpuWeight,
        dx: &mut CpuBuffer,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        let (outputs, inputs) = weight.matrix();
        let (dy, dx) = (read("dy", dy, rows.rows(), outputs), write("dx", dx, rows.rows(), inputs));
        linear::linear_backward(&self.workers, rows, dy, matrix(weight), dx, Write::accumulate(accumulate));
        Ok(())
    }

    fn lora(
        &mut self,
        rows: &Layout,
        groups: &[LoraRows<'_, CpuBuffer>],
        x: &CpuBuffer,
        modules: &mut [LoraOut<'_, CpuBuffer>],
    ) -> Result<(), DeviceError> {
        let n = rows.rows();
        for (number, LoraOut { s, s_width, y }) in modules.iter_mut().enumerate() {
            // Widths are the modules', not the buffers': a pass without rows has buffers without elements.
            let Some(LoraModule { inputs, outputs, .. }) = module_of(groups.iter(), number) else { continue };
            groups.iter().for_each(|group| check_module(rows, group, number, (inputs, outputs), *s_width));
            let (x, s, y) = (read("x", x, n, inputs), write("s", s, n, *s_width), write("y", y, n, outputs));
            lora::forward(&self.workers, rows, groups, number, x, s, y);
        }
        Ok(())
    }

    fn lora_backward(
        &mut self,
        rows: &Layout,
        groups: &mut [LoraGrads<'_, CpuBuffer>],
        x: &CpuBuffer,
        modules: &[LoraIn<'_, CpuBuffer>],
        mut dx: Option<&mut CpuBuffer>,
    ) -> Result<(), DeviceError> {
        let n = rows.rows();
        for (number, LoraIn { dy, s, s_width }) in modules.iter().enumerate() {
            let module = module_of(groups.iter().map(|group| &group.rows), number);
            let Some(LoraModule { inputs, outputs, .. }) = module else { continue };
            for group in &*groups {
                check_module(rows, &group.rows, number, (inputs, outputs), *s_width);
                assert!(group.grads.data.len() == group.rows.params.data.len(), "gradients are not laid out as their parameters");
            }
            let (dy, x, s) = (read("dy", dy, n, outputs), read("x", x, n, inputs), read("s", s, n, *s_width));
            let [ds] = self.shared[0].take([n * s_width]);
            let dx = dx.as_deref_mut().map(|dx| write("dx", dx, n, inputs));
            lora::backward(&self.workers, rows, groups, number, dy, x, s, ds, dx);
        }
        Ok(())
    }

    fn rope(
        &mut self,
        rows: &Layout,
        heads: usize,
        head_dim: usize,
        table: &CpuBuffer,
        x: &mut CpuBuffer,
        inverse: bool,
    ) -> Result<(), DeviceError> {
        assert!(head_dim > 0 && head_dim.is_multiple_of(2), "a head of width {head_dim} has no halves");
        assert!(table.data.len().is_multiple_of(head_dim), "the table has {} elements, no multiple of {head_dim}", table.data.len());
        let positions = table.data.len() / head_dim;
        for row in rows::live(rows) {
            let position = rows.positions()[row];
            assert!((position as usize) < positions, "position {position} is not in the table of {positions}");
        }
        let (table, x) = (Mat::new(&table.data, positions, head_dim), write("x", x, rows.rows(), heads * head_dim));
        rows::rope(&self.workers, rows, head_dim, table, x, inverse);
        Ok(())
    }

    fn attention(
        &mut self,
        q_rows: &Layout,
        kv_rows: &Layout,
        shape: AttentionShape,
        q: &CpuBuffer,
        k: &CpuBuffer,
        v: &CpuBuffer,
        out: &mut CpuBuffer,
        lse: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        check_attention(q_rows, kv_rows, shape);
        let (q_n, kv_n) = (q_rows.rows(), kv_rows.rows());
        let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (q, k, v) = (read("q", q, q_n, q_width), read("k", k, kv_n, kv_width), read("v", v, kv_n, kv_width));
        let operands = attention::Operands { q_rows, kv_rows, shape, q, k, v };
        attention::forward(&self.workers, operands, write("out", out, q_n, q_width), write("lse", lse, q_n, shape.heads));
        Ok(())
    }

    fn attention_backward(
        &mut self,
        q_rows: &Layout,
        kv_rows: &Layout,
        shape: AttentionShape,
        q: &CpuBuffer,
        k: &CpuBuffer,
        v: &CpuBuffer,
        out: &CpuBuffer,
        lse: &CpuBuffer,
        dout: &CpuBuffer,
        dq: &mut CpuBuffer,
        dk: &mut CpuBuffer,
        dv: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        check_attention(q_rows, kv_rows, shape);
        let (q_n, kv_n) = (q_rows.rows(), kv_rows.rows());
        let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (q, k, v) = (read("q", q, q_n, q_width), read("k", k, kv_n, kv_width), read("v", v, kv_n, kv_width));
        let (out, dout, lse) = (read("out", out, q_n, q_width), read("dout", dout, q_n, q_width), read("lse", lse, q_n, shape.heads));
        let (dq, dk, dv) = (write("dq", dq, q_n, q_width), write("dk", dk, kv_n, kv_width), write("dv", dv, kv_n, kv_width));
        let operands = attention::Operands { q_rows, kv_rows, shape, q, k, v };
        attention::backward(&self.workers, operands, attention::Saved { out, lse, dout }, dq, dk, dv);
        Ok(())
    }

    fn swiglu(&mut self, rows: &Layout, gate: &CpuBuffer, up: &CpuBuffer, out: &mut CpuBuffer) -> Result<(), DeviceError> {
        let (n, width) = (rows.rows(), width("gate", gate, rows));
        let (gate, up, out) = (read("gate", gate, n, width), read("up", up, n, width), write("out", out, n, width));
        rows::swiglu(&self.workers, rows, gate, up, out);
        Ok(())
    }

    fn swiglu_backward(
        &mut self,
        rows: &Layout,
        dy: &CpuBuffer,
        gate: &CpuBuffer,
        up: &CpuBuffer,
        dgate: &mut CpuBuffer,
        dup: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let (n, width) = (rows.rows(), width("gate", gate, rows));
        let (dy, gate, up) = (read("dy", dy, n, width), read("gate", gate, n, width), read("up", up, n, width));
        let (dgate, dup) = (write("dgate", dgate, n, width), write("dup", dup, n, width));
        rows::swiglu_backward(&self.workers, rows, dy, gate, up, dgate, dup);
        Ok(())
    }

    fn add(&mut self, rows: &Layout, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<(), DeviceError> {
        let (n, width) = (rows.rows(), width("x", x, rows));
        rows::add(&self.workers, rows, read("x", x, n, width), write("y", y, n, width));
        Ok(())
    }

    fn gather(&mut self, rows: &Layout, index: &[u32], width: usize, x: &CpuBuffer, out: &mut CpuBuffer) -> Result<(), DeviceError> {
        let source = x.data.len().checked_div(width).unwrap_or_default();
        check_index("index", rows, index, source);
        rows::gather(&self.workers, rows, index, read("x", x, source, width), write("out", out, rows.rows(), width));
        Ok(())
    }

    fn scatter_add(&mut self, rows: &Layout, index: &[u32], width: usize, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<(), DeviceError> {
        let target = y.data.len().checked_div(width).unwrap_or_default();
        check_index("index", rows, index, target);
        rows::scatter_add(&self.workers, rows, index, read("x", x, rows.rows(), width), write("y", y, target, width));
        Ok(())
    }

    fn head_loss(
        &mut self,
        rows: &Layout,
        x: &CpuBuffer,
        head: &CpuWeight,
        targets: &[u32],
        weights: &[f32],
        losses: &mut CpuBuffer,
        dx: Option<&mut CpuBuffer>,
    ) -> Result<(), DeviceError> {
        let (n, (vocabulary, width)) = (rows.rows(), head.matrix());
        check_index("targets", rows, targets, vocabulary);
        assert!(weights.len() == n, "weights has {} entries; one for each of {n} rows was expected", weights.len());
        let (x, losses) = (read("x", x, n, width), write("losses", losses, n, 1));
        let dx = dx.map(|dx| write("dx", dx, n, width));
        head::head_loss(&self.workers, &mut self.shared, rows, x, matrix(head), targets, weights, losses, dx);
        Ok(())
    }

    fn adamw(&mut self, items: &mut [AdamWItem<'_, CpuBuffer>], norms: &mut CpuBuffer) -> Result<(), DeviceError> {
        for item in &*items {
            let len = item.params.data.len();
            let equal = [&item.grads, &item.moment1, &item.moment2].iter().all(|other| other.data.len() == len);
            assert!(equal, "gradient or moments are not laid out as their {len} parameters");
        }
        adamw::step(&self.workers, items, &mut norms.data);
        Ok(())
    }
}
