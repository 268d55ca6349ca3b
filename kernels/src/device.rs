//! What the engine asks of a device: buffers and operations on rows.
//!
//! Rules for every operation of every device (DESIGN, exactness contract): a row's bits depend on that row's sequence
//! alone, never on how many rows stand beside it, where it stands, or how many threads there are; reductions over a sequence run over its
//! rows only, in a fixed order; several sequences are added in segment order. Padding rows are neither read nor written. An operation says
//! whether it assigns (=) or accumulates (+=).

use crate::{
    AdamWItem, AttentionShape, DType, DeviceError, HostTensor, Layout, LoraGrads, LoraIn, LoraOut, LoraRows, Numbers, SharedWeights,
    Source, SwigluGrads, Use,
};

/// A device: memory and the operations of a decoder with LoRA. Buffers are row-major; a buffer "of width w" over a layout holds
/// `layout.rows() * w` elements. Panics only where a caller breaks a stated shape.
pub trait Device: Send + 'static {
    /// An array on the device. Its memory is zeroed before it is handed out and zeroed again when it is dropped; that of a pass may hold what
    /// passes left since [`Device::forget_passes`].
    type Buffer: Send + 'static;
    /// A frozen weight on the device, in the type it is stored in.
    type Weight: Send + 'static;

    /// What makes the bits of work with weight matrices of these sizes (outputs and inputs): names and values, for the receipt's device
    /// class. The same names and values promise the same bits.
    fn class(&self, matrices: &[(usize, usize)]) -> Vec<(String, String)>;

    /// Names of what is planned here and not shown to keep the rule that a row's bits depend on its own sequence alone. While there is
    /// any, a pass may hold one job only: then what it is beside is always the same.
    fn unproven(&self) -> Vec<String> {
        Vec::new()
    }

    /// Each segment starts at a multiple of this many rows.
    fn row_align(&self) -> usize;

    /// Bytes of all live buffers (not weights).
    fn allocated_bytes(&self) -> u64;

    /// Bytes that may still be allocated.
    fn free_bytes(&self) -> u64;

    /// Buffers take no more than so many bytes from now on. Those that live stay; memory that is kept for later beyond it goes back.
    fn bound(&mut self, bytes: u64) -> Result<(), DeviceError>;

    /// Takes a frozen weight: a matrix (out x in) or a vector.
    fn load(&mut self, tensor: &HostTensor) -> Result<Self::Weight, DeviceError>;

    /// A frozen weight of random numbers: bit for bit [`HostTensor::random`], loaded. A device that can make them itself should.
    fn random(&mut self, shape: &[usize], dtype: DType, numbers: Numbers) -> Result<Self::Weight, DeviceError> {
        let too_large = DeviceError::OutOfMemory { needed_bytes: u64::MAX, free_bytes: self.free_bytes() };
        self.load(&HostTensor::random(shape, dtype, numbers).ok_or(too_large)?)
    }

    /// Weights of one number of inputs that rows go through together: [`Device::linear_together`] and its backward may make one product of them all.
    /// They are used all together, in this order, and in no other way.
    fn load_together(&mut self, parts: &[Source<'_>]) -> Result<Vec<Self::Weight>, DeviceError> {
        let load = |part: &Source<'_>| match *part {
            Source::Stored(tensor) => self.load(tensor),
            Source::Random { shape, dtype, numbers } => self.random(shape, dtype, numbers),
        };
        parts.iter().map(load).collect()
    }

    /// All weights are loaded: from here on they are only read. What other processes on this device can be handed, where it was made for that.
    fn share_weights(&mut self) -> Result<Option<SharedWeights>, DeviceError> {
        Ok(None)
    }

    /// A zeroed buffer of so many elements.
    fn alloc(&mut self, usage: Use, len: usize) -> Result<Self::Buffer, DeviceError>;

    /// A zeroed buffer of each of these widths over so many rows, for what weights that were loaded together write or whose gradient they read. Rows
    /// of such buffers may stand beside one another: only operations on rows take them.
    fn alloc_together(&mut self, usage: Use, rows: usize, widths: &[usize]) -> Result<Vec<Self::Buffer>, DeviceError> {
        widths.iter().map(|width| self.alloc(usage, rows * width)).collect()
    }

    /// Number of elements.
    fn len(&self, buffer: &Self::Buffer) -> usize;

    /// Copies from the host to elements `offset..`. =
    fn upload(&mut self, data: &[f32], buffer: &mut Self::Buffer, offset: usize) -> Result<(), DeviceError>;

    /// Copies elements `offset..` to the host; waits for everything before it. =
    fn download(&mut self, buffer: &Self::Buffer, offset: usize, data: &mut [f32]) -> Result<(), DeviceError>;

    /// Whether its memory is apart from the host's, so that moving rows to the host makes room here.
    fn has_separate_memory(&self) -> bool {
        false
    }

    /// Copies `len` elements from `from_offset..` of one buffer to `to_offset..` of another of the same use. A device that can do it
    /// without the host should. =
    fn copy(
        &mut self,
        from: &Self::Buffer,
        from_offset: usize,
        to: &mut Self::Buffer,
        to_offset: usize,
        len: usize,
    ) -> Result<(), DeviceError> {
        let mut host = vec![0.0; len];
        self.download(from, from_offset, &mut host)?;
        self.upload(&host, to, to_offset)
    }

    /// A pass begins: until it ends, buffers that are allocated are dropped before the next begins, and hold anything until they are written; operations
    /// may be carried out late, together, but as if in order. A pass that was left open, because it failed, ends here.
    fn begin_pass(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The pass ends: every operation is under way, and the buffers allocated since its beginning are not read any more.
    fn end_pass(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Zeroes what passes left in memory: between two passes, the first of which had rows that the second may not see the least of.
    fn forget_passes(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Marks this point of the pass, once a pass, for [`Device::pass_ns`].
    fn mark(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Nanoseconds that the device itself took for the last pass: up to its mark (0 without one), and from there to the first wait for its results. None
    /// where the host's clock says as much.
    fn pass_ns(&mut self) -> Result<Option<(u64, u64)>, DeviceError> {
        Ok(None)
    }

    /// out\[r\] = table\[tokens\[r\]\]. `tokens` has one entry a buffer row. =
    fn embed(&mut self, rows: &Layout, tokens: &[u32], table: &Self::Weight, out: &mut Self::Buffer) -> Result<(), DeviceError>;

    /// RMS norm of each of `groups` equal parts of a row (1 for the residual stream, the head count for q and k norms):
    /// out = x / sqrt(mean(x^2) + eps) * weight. =
    fn rms_norm(
        &mut self,
        rows: &Layout,
        groups: usize,
        x: &Self::Buffer,
        weight: &Self::Weight,
        eps: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// dx of `rms_norm`. `accumulate` chooses += over =.
    #[expect(clippy::too_many_arguments, reason = "one argument an operand")]
    fn rms_norm_backward(
        &mut self,
        rows: &Layout,
        groups: usize,
        dy: &Self::Buffer,
        x: &Self::Buffer,
        weight: &Self::Weight,
        eps: f32,
        dx: &mut Self::Buffer,
        accumulate: bool,
    ) -> Result<(), DeviceError>;

    /// out = x W^T + bias; W is out x in. =
    fn linear(
        &mut self,
        rows: &Layout,
        x: &Self::Buffer,
        weight: &Self::Weight,
        bias: Option<&Self::Weight>,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// out = x W^T + added, row by row. =
    fn linear_add(
        &mut self,
        rows: &Layout,
        x: &Self::Buffer,
        weight: &Self::Weight,
        added: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        self.linear(rows, x, weight, None, out)?;
        self.add(rows, added, out)
    }

    /// dx of `linear`: dy W. `accumulate` chooses += over =.
    fn linear_backward(
        &mut self,
        rows: &Layout,
        dy: &Self::Buffer,
        weight: &Self::Weight,
        dx: &mut Self::Buffer,
        accumulate: bool,
    ) -> Result<(), DeviceError>;

    /// `linear` with each of some weights that were loaded together, into buffers that were allocated together. =
    fn linear_together(
        &mut self,
        rows: &Layout,
        x: &Self::Buffer,
        weights: &[(&Self::Weight, Option<&Self::Weight>)],
        outs: &mut [Self::Buffer],
    ) -> Result<(), DeviceError> {
        weights.iter().zip(outs).try_for_each(|((weight, bias), out)| self.linear(rows, x, weight, *bias, out))
    }

    /// dx of `linear_together`: the sum of each dy W, in order. =
    fn linear_backward_together(
        &mut self,
        rows: &Layout,
        parts: &[(&Self::Buffer, &Self::Weight)],
        dx: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        let mut parts = parts.iter().enumerate();
        parts.try_for_each(|(number, (dy, weight))| self.linear_backward(rows, dy, weight, dx, number > 0))
    }

    /// `linear_together` of gate and up without biases, then `swiglu` of them, for whoever does not read the two: what they hold then is not said. =
    fn linear_swiglu(
        &mut self,
        rows: &Layout,
        x: &Self::Buffer,
        weights: [&Self::Weight; 2],
        gate_up: &mut [Self::Buffer],
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        self.linear_together(rows, x, &weights.map(|weight| (weight, None)), gate_up)?;
        self.swiglu(rows, &gate_up[0], &gate_up[1], out)
    }

    /// LoRA on up to three modules that read the same x: for the rows of each group, and each module on which it has a site,
    /// s = dropout(x) A^T (=), y += scale s B^T. Groups do not overlap; rows in no group, and modules without a site, are untouched.
    fn lora(
        &mut self,
        rows: &Layout,
        groups: &[LoraRows<'_, Self::Buffer>],
        x: &Self::Buffer,
        modules: &mut [LoraOut<'_, Self::Buffer>],
    ) -> Result<(), DeviceError>;

    /// Backward of `lora` with its saved x and s: per group and module ds = scale dy B; dB += scale dy^T s; dA += ds^T dropout(x); and, where dx
    /// is given and the group wants it, dx += dropout'(ds A). Several sequences of one adapter are added in segment order.
    fn lora_backward(
        &mut self,
        rows: &Layout,
        groups: &mut [LoraGrads<'_, Self::Buffer>],
        x: &Self::Buffer,
        modules: &[LoraIn<'_, Self::Buffer>],
        dx: Option<&mut Self::Buffer>,
    ) -> Result<(), DeviceError>;

    /// `lora` on gate and up, then `swiglu` of what they are then, for all rows. =
    fn lora_swiglu(
        &mut self,
        rows: &Layout,
        groups: &[LoraRows<'_, Self::Buffer>],
        x: &Self::Buffer,
        mut modules: [LoraOut<'_, Self::Buffer>; 2],
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        self.lora(rows, groups, x, &mut modules)?;
        let [gate, up] = &modules;
        self.swiglu(rows, gate.y, up.y, out)
    }

    /// `lora_backward` of modules that read what `swiglu` wrote, onto dx, then `swiglu_backward` of dx. What dx holds afterwards is not said. =
    fn lora_backward_swiglu(
        &mut self,
        rows: &Layout,
        groups: &mut [LoraGrads<'_, Self::Buffer>],
        x: &Self::Buffer,
        modules: &[LoraIn<'_, Self::Buffer>],
        dx: &mut Self::Buffer,
        swiglu: SwigluGrads<'_, Self::Buffer>,
    ) -> Result<(), DeviceError> {
        self.lora_backward(rows, groups, x, modules, Some(&mut *dx))?;
        let SwigluGrads { rows, gate, up, dgate, dup } = swiglu;
        self.swiglu_backward(rows, dx, gate, up, dgate, dup)
    }

    /// Rotates each head of each row in place by its row's position, Llama's half-split form: with h = head_dim / 2,
    /// (x\[i\], x\[i+h\]) = (x\[i\] cos - x\[i+h\] sin, x\[i+h\] cos + x\[i\] sin). `table` (`State`) holds for each position h cosines, then h sines.
    /// `inverse` rotates back: the backward pass.
    fn rope(
        &mut self,
        rows: &Layout,
        heads: usize,
        head_dim: usize,
        table: &Self::Buffer,
        x: &mut Self::Buffer,
        inverse: bool,
    ) -> Result<(), DeviceError>;

    /// Causal attention within each sequence: the row of `q` at position p sees the rows of `k`, `v` at positions up to p (within the window).
    /// Segment i of `q_rows` belongs to segment i of `kv_rows`; a key segment has every position of its sequence, a query segment perhaps only some.
    /// out (width heads * head_dim) =; `lse` (`State`, width heads) = the log of the sum of exponentials of the scaled scores.
    #[expect(clippy::too_many_arguments, reason = "one argument an operand")]
    fn attention(
        &mut self,
        q_rows: &Layout,
        kv_rows: &Layout,
        shape: AttentionShape,
        q: &Self::Buffer,
        k: &Self::Buffer,
        v: &Self::Buffer,
        out: &mut Self::Buffer,
        lse: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Gradients of `attention`. dq, dk, dv: =
    #[expect(clippy::too_many_arguments, reason = "one argument an operand")]
    fn attention_backward(
        &mut self,
        q_rows: &Layout,
        kv_rows: &Layout,
        shape: AttentionShape,
        q: &Self::Buffer,
        k: &Self::Buffer,
        v: &Self::Buffer,
        out: &Self::Buffer,
        lse: &Self::Buffer,
        dout: &Self::Buffer,
        dq: &mut Self::Buffer,
        dk: &mut Self::Buffer,
        dv: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// out = silu(gate) * up. =
    fn swiglu(&mut self, rows: &Layout, gate: &Self::Buffer, up: &Self::Buffer, out: &mut Self::Buffer) -> Result<(), DeviceError>;

    /// Gradients of `swiglu`. dgate, dup: =
    fn swiglu_backward(
        &mut self,
        rows: &Layout,
        dy: &Self::Buffer,
        gate: &Self::Buffer,
        up: &Self::Buffer,
        dgate: &mut Self::Buffer,
        dup: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// y += x, row by row.
    fn add(&mut self, rows: &Layout, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<(), DeviceError>;

    /// out\[r\] = x\[index\[r\]\] for each non-padding row r of `rows`; an index may repeat. `width` is of both. =
    fn gather(&mut self, rows: &Layout, index: &[u32], width: usize, x: &Self::Buffer, out: &mut Self::Buffer) -> Result<(), DeviceError>;

    /// y\[index\[r\]\] += x\[r\] for each non-padding row r of `rows`; no index repeats.
    fn scatter_add(
        &mut self,
        rows: &Layout,
        index: &[u32],
        width: usize,
        x: &Self::Buffer,
        y: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Head and loss in row chunks (the logits of all rows never exist at once): losses\[r\] (`State`) = lse(W x\[r\]) - (W x\[r\])\[targets\[r\]\], and where dx
    /// is wanted dx\[r\] = weights\[r\] (softmax(W x\[r\]) - onehot(targets\[r\])) W. `targets` and `weights` have one entry a buffer row. =
    #[expect(clippy::too_many_arguments, reason = "one argument an operand")]
    fn head_loss(
        &mut self,
        rows: &Layout,
        x: &Self::Buffer,
        head: &Self::Weight,
        targets: &[u32],
        weights: &[f32],
        losses: &mut Self::Buffer,
        dx: Option<&mut Self::Buffer>,
    ) -> Result<(), DeviceError>;

    /// One AdamW step of each item; see [`AdamWItem`]. `norms` is `State`.
    fn adamw(&mut self, items: &mut [AdamWItem<'_, Self::Buffer>], norms: &mut Self::Buffer) -> Result<(), DeviceError>;
}
