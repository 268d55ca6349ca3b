//! The `Device` trait of a card: memory here, each operation by the module of its name.
//!
//! Never computes.

use std::sync::Arc;

use super::device::{Beside, CudaBuffer, CudaDevice, CudaWeight, Element, convert};
use super::memory::Owner;
use super::{ROW_ALIGN, adamw, attention, gate_up, head, linear, lora, lora_swiglu, programs, rows, weights};
use crate::{
    AdamWItem, AttentionShape, DType, Device, DeviceError, HostTensor, Layout, LoraGrads, LoraIn, LoraOut, LoraRows, Numbers,
    SharedWeights, Source, SwigluGrads, Use,
};

impl Device for CudaDevice {
    type Buffer = CudaBuffer;
    type Weight = CudaWeight;

    fn class(&self, matrices: &[(usize, usize)]) -> Vec<(String, String)> {
        let properties = &self.gpu.properties;
        let (major, minor) = properties.capability;
        let nvrtc = self.kernels.compiler.version;
        let mut class = vec![("backend".to_owned(), "cuda".to_owned())];
        class.extend(self.plan.header.iter().cloned());
        class.extend(
            [
                ("compute-capability", format!("{major}.{minor}")),
                ("driver", format!("{}.{}", properties.driver / 1000, properties.driver % 1000 / 10)),
                ("nvrtc", format!("{}.{}", nvrtc.0, nvrtc.1)),
                ("architecture", self.kernels.compiler.architecture.clone()),
                ("kernels", programs::digest()),
                ("plan", self.plan.of(matrices).digest()),
                ("gate", self.verdict().map_or_else(|| "not run".to_owned(), |report| report.of(matrices).verdict())),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        class
    }

    fn unproven(&self) -> Vec<String> {
        CudaDevice::unproven(self)
    }

    fn row_align(&self) -> usize {
        ROW_ALIGN
    }

    fn allocated_bytes(&self) -> u64 {
        self.pool.buffer_bytes()
    }

    fn free_bytes(&self) -> u64 {
        self.pool.available_bytes(self.reserved_bytes())
    }

    fn bound(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.pool.bound(bytes)
    }

    fn load(&mut self, tensor: &HostTensor) -> Result<CudaWeight, DeviceError> {
        weights::load_one(self, Source::Stored(tensor))
    }

    fn random(&mut self, shape: &[usize], dtype: DType, numbers: Numbers) -> Result<CudaWeight, DeviceError> {
        weights::load_one(self, Source::Random { shape, dtype, numbers })
    }

    fn load_together(&mut self, parts: &[Source<'_>]) -> Result<Vec<CudaWeight>, DeviceError> {
        weights::load(self, parts)
    }

    fn share_weights(&mut self) -> Result<Option<SharedWeights>, DeviceError> {
        self.pool.close_shelf()
    }

    fn alloc(&mut self, usage: Use, len: usize) -> Result<CudaBuffer, DeviceError> {
        let element = self.element(usage);
        // How much is free takes the driver microseconds to say, and a pass allocates hundreds of times: it is asked where there is too little alone.
        let too_large = || DeviceError::OutOfMemory { needed_bytes: u64::MAX, free_bytes: self.free_bytes() };
        let needed = len.checked_mul(element.bytes()).ok_or_else(too_large)?;
        Ok(CudaBuffer { block: Arc::new(self.pool.alloc(needed, Owner::Buffer)?), element, len, beside: None })
    }

    fn alloc_together(&mut self, usage: Use, rows: usize, widths: &[usize]) -> Result<Vec<CudaBuffer>, DeviceError> {
        let pitch = widths.iter().sum();
        let all = self.alloc(usage, rows * pitch)?;
        let mut first = 0;
        let buffer = |width: &usize| {
            let beside = Some(Beside { first, pitch });
            first += width;
            CudaBuffer { block: Arc::clone(&all.block), element: all.element, len: rows * width, beside }
        };
        Ok(widths.iter().map(buffer).collect())
    }

    fn len(&self, buffer: &CudaBuffer) -> usize {
        buffer.len
    }

    fn upload(&mut self, data: &[f32], buffer: &mut CudaBuffer, offset: usize) -> Result<(), DeviceError> {
        assert!(offset + data.len() <= buffer.len, "{} elements at {offset} of {}", data.len(), buffer.len);
        let bytes = buffer.element.bytes();
        self.flush()?;
        self.staging.upload(buffer.whole(), offset * bytes, data.len() * bytes, |at, chunk| {
            let part = &data[at / bytes..(at + chunk.len()) / bytes];
            convert(bytemuck::cast_slice(part), DType::F32, chunk, buffer.element);
        })
    }

    fn download(&mut self, buffer: &CudaBuffer, offset: usize, data: &mut [f32]) -> Result<(), DeviceError> {
        assert!(offset + data.len() <= buffer.len, "{} elements at {offset} of {}", data.len(), buffer.len);
        let bytes = buffer.element.bytes();
        let dtype = if buffer.element == Element::F32 { DType::F32 } else { DType::BF16 };
        self.end_launching()?;
        self.staging.download(buffer.whole(), offset * bytes, data.len() * bytes, |at, chunk| {
            let part = &mut data[at / bytes..(at + chunk.len()) / bytes];
            convert(chunk, dtype, bytemuck::cast_slice_mut(part), Element::F32);
        })
    }

    fn has_separate_memory(&self) -> bool {
        true
    }

    fn copy(
        &mut self,
        from: &CudaBuffer,
        from_offset: usize,
        to: &mut CudaBuffer,
        to_offset: usize,
        len: usize,
    ) -> Result<(), DeviceError> {
        assert!(from.element == to.element, "buffers of different use");
        assert!(from_offset + len <= from.len && to_offset + len <= to.len, "{len} elements from {from_offset} to {to_offset}");
        let bytes = from.element.bytes();
        rows::copy(self, (from, from_offset * bytes), (to, to_offset * bytes), len * bytes)
    }

    fn begin_pass(&mut self) -> Result<(), DeviceError> {
        self.begin()
    }

    fn end_pass(&mut self) -> Result<(), DeviceError> {
        self.end()
    }

    fn forget_passes(&mut self) -> Result<(), DeviceError> {
        self.pool.forget_passes()
    }

    fn mark(&mut self) -> Result<(), DeviceError> {
        CudaDevice::mark(self)
    }

    fn pass_ns(&mut self) -> Result<Option<(u64, u64)>, DeviceError> {
        CudaDevice::pass_ns(self).map(Some)
    }

    fn embed(&mut self, rows: &Layout, tokens: &[u32], table: &CudaWeight, out: &mut CudaBuffer) -> Result<(), DeviceError> {
        rows::embed(self, rows, tokens, table, out)
    }

    fn rms_norm(
        &mut self,
        rows: &Layout,
        groups: usize,
        x: &CudaBuffer,
        weight: &CudaWeight,
        eps: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        rows::rms_norm(self, rows, groups, x, weight, eps, out)
    }

    fn rms_norm_backward(
        &mut self,
        rows: &Layout,
        groups: usize,
        dy: &CudaBuffer,
        x: &CudaBuffer,
        weight: &CudaWeight,
        eps: f32,
        dx: &mut CudaBuffer,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        rows::rms_norm_backward(self, rows, groups, dy, x, weight, eps, dx, accumulate)
    }

    fn linear(
        &mut self,
        rows: &Layout,
        x: &CudaBuffer,
        weight: &CudaWeight,
        bias: Option<&CudaWeight>,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        linear::linear(self, rows, x, weight, bias, None, out)
    }

    fn linear_add(
        &mut self,
        rows: &Layout,
        x: &CudaBuffer,
        weight: &CudaWeight,
        added: &CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        linear::linear(self, rows, x, weight, None, Some(added), out)
    }

    fn linear_backward(
        &mut self,
        rows: &Layout,
        dy: &CudaBuffer,
        weight: &CudaWeight,
        dx: &mut CudaBuffer,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        linear::linear_backward(self, rows, dy, weight, dx, accumulate)
    }

    fn linear_together(
        &mut self,
        rows: &Layout,
        x: &CudaBuffer,
        weights: &[(&CudaWeight, Option<&CudaWeight>)],
        outs: &mut [CudaBuffer],
    ) -> Result<(), DeviceError> {
        linear::linear_together(self, rows, x, weights, outs)
    }

    fn linear_backward_together(
        &mut self,
        rows: &Layout,
        parts: &[(&CudaBuffer, &CudaWeight)],
        dx: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        linear::linear_backward_together(self, rows, parts, dx)
    }

    fn linear_swiglu(
        &mut self,
        rows: &Layout,
        x: &CudaBuffer,
        weights: [&CudaWeight; 2],
        gate_up: &mut [CudaBuffer],
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        gate_up::linear_swiglu(self, rows, x, weights, gate_up, out)
    }

    fn lora(
        &mut self,
        rows: &Layout,
        groups: &[LoraRows<'_, CudaBuffer>],
        x: &CudaBuffer,
        modules: &mut [LoraOut<'_, CudaBuffer>],
    ) -> Result<(), DeviceError> {
        lora::lora(self, rows, groups, x, modules)
    }

    fn lora_backward(
        &mut self,
        rows: &Layout,
        groups: &mut [LoraGrads<'_, CudaBuffer>],
        x: &CudaBuffer,
        modules: &[LoraIn<'_, CudaBuffer>],
        dx: Option<&mut CudaBuffer>,
    ) -> Result<(), DeviceError> {
        lora::lora_backward(self, rows, groups, x, modules, dx)
    }

    fn lora_swiglu(
        &mut self,
        rows: &Layout,
        groups: &[LoraRows<'_, CudaBuffer>],
        x: &CudaBuffer,
        modules: [LoraOut<'_, CudaBuffer>; 2],
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        lora_swiglu::forward(self, rows, groups, x, modules, out)
    }

    fn lora_backward_swiglu(
        &mut self,
        rows: &Layout,
        groups: &mut [LoraGrads<'_, CudaBuffer>],
        x: &CudaBuffer,
        modules: &[LoraIn<'_, CudaBuffer>],
        dx: &mut CudaBuffer,
        swiglu: SwigluGrads<'_, CudaBuffer>,
    ) -> Result<(), DeviceError> {
        lora_swiglu::backward(self, rows, groups, x, modules, dx, swiglu)
    }

    fn rope(
        &mut self,
        rows: &Layout,
        heads: usize,
        head_dim: usize,
        table: &CudaBuffer,
        x: &mut CudaBuffer,
        inverse: bool,
    ) -> Result<(), DeviceError> {
        rows::rope(self, rows, heads, head_dim, table, x, inverse)
    }

    fn attention(
        &mut self,
        q_rows: &Layout,
        kv_rows: &Layout,
        shape: AttentionShape,
        q: &CudaBuffer,
        k: &CudaBuffer,
        v: &CudaBuffer,
        out: &mut CudaBuffer,
        lse: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        attention::forward(self, q_rows, kv_rows, shape, q, k, v, out, lse)
    }

    fn attention_backward(
        &mut self,
        q_rows: &Layout,
        kv_rows: &Layout,
        shape: AttentionShape,
        q: &CudaBuffer,
        k: &CudaBuffer,
        v: &CudaBuffer,
        out: &CudaBuffer,
        lse: &CudaBuffer,
        dout: &CudaBuffer,
        dq: &mut CudaBuffer,
        dk: &mut CudaBuffer,
        dv: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        attention::backward(self, q_rows, kv_rows, shape, [q, k, v], [out, lse, dout], [dq, dk, dv])
    }

    fn swiglu(&mut self, rows: &Layout, gate: &CudaBuffer, up: &CudaBuffer, out: &mut CudaBuffer) -> Result<(), DeviceError> {
        rows::swiglu(self, rows, gate, up, out)
    }

    fn swiglu_backward(
        &mut self,
        rows: &Layout,
        dy: &CudaBuffer,
        gate: &CudaBuffer,
        up: &CudaBuffer,
        dgate: &mut CudaBuffer,
        dup: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        rows::swiglu_backward(self, rows, dy, gate, up, dgate, dup)
    }

    fn add(&mut self, rows: &Layout, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<(), DeviceError> {
        rows::add(self, rows, x, y)
    }

    fn gather(&mut self, rows: &Layout, index: &[u32], width: usize, x: &CudaBuffer, out: &mut CudaBuffer) -> Result<(), DeviceError> {
        rows::gather(self, rows, index, width, x, out)
    }

    fn scatter_add(&mut self, rows: &Layout, index: &[u32], width: usize, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<(), DeviceError> {
        rows::scatter_add(self, rows, index, width, x, y)
    }

    fn head_loss(
        &mut self,
        rows: &Layout,
        x: &CudaBuffer,
        head: &CudaWeight,
        targets: &[u32],
        weights: &[f32],
        losses: &mut CudaBuffer,
        dx: Option<&mut CudaBuffer>,
    ) -> Result<(), DeviceError> {
        head::head_loss(self, rows, x, head, targets, weights, losses, dx)
    }

    fn adamw(&mut self, items: &mut [AdamWItem<'_, CudaBuffer>], norms: &mut CudaBuffer) -> Result<(), DeviceError> {
        adamw::adamw(self, items, norms)
    }
}
