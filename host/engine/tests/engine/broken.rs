//! A device that takes a trunk and then breaks at the first adapter.

use nodus_kernels::{AdamWItem, AttentionShape, Device, DeviceError, HostTensor, Layout, LoraGrads, LoraIn, LoraOut, LoraRows, Use};

type Done = Result<(), DeviceError>;

/// What it does from its second allocation on; the first holds the trunk's rope table.
pub(crate) enum How {
    Panics,
    Fails,
}

pub(crate) struct Broken {
    how: How,
    allocations: usize,
}

impl Broken {
    pub(crate) fn new(how: How) -> Self {
        Self { how, allocations: 0 }
    }
}

#[rustfmt::skip]
impl Device for Broken {
    type Buffer = usize;
    type Weight = ();

    fn class(&self, _: &[(usize, usize)]) -> Vec<(String, String)> { Vec::new() }
    fn row_align(&self) -> usize { 1 }
    fn allocated_bytes(&self) -> u64 { 0 }
    fn free_bytes(&self) -> u64 { u64::MAX }
    fn bound(&mut self, _: u64) -> Done { Ok(()) }
    fn load(&mut self, _: &HostTensor) -> Done { Ok(()) }
    fn alloc(&mut self, _: Use, len: usize) -> Result<usize, DeviceError> {
        self.allocations += 1;
        match self.how {
            _ if self.allocations == 1 => Ok(len),
            How::Panics => panic!("broken on purpose"),
            How::Fails => Err(DeviceError::Failed("broken on purpose".into())),
        }
    }
    fn len(&self, buffer: &usize) -> usize { *buffer }
    fn upload(&mut self, _: &[f32], _: &mut usize, _: usize) -> Done { Ok(()) }
    fn download(&mut self, _: &usize, _: usize, _: &mut [f32]) -> Done { unreachable!() }
    fn embed(&mut self, _: &Layout, _: &[u32], _: &(), _: &mut usize) -> Done { unreachable!() }
    fn rms_norm(&mut self, _: &Layout, _: usize, _: &usize, _: &(), _: f32, _: &mut usize) -> Done { unreachable!() }
    fn rms_norm_backward(&mut self, _: &Layout, _: usize, _: &usize, _: &usize, _: &(), _: f32, _: &mut usize, _: bool) -> Done { unreachable!() }
    fn linear(&mut self, _: &Layout, _: &usize, _: &(), _: Option<&()>, _: &mut usize) -> Done { unreachable!() }
    fn linear_backward(&mut self, _: &Layout, _: &usize, _: &(), _: &mut usize, _: bool) -> Done { unreachable!() }
    fn lora(&mut self, _: &Layout, _: &[LoraRows<'_, usize>], _: &usize, _: &mut [LoraOut<'_, usize>]) -> Done { unreachable!() }
    fn lora_backward(&mut self, _: &Layout, _: &mut [LoraGrads<'_, usize>], _: &usize, _: &[LoraIn<'_, usize>], _: Option<&mut usize>) -> Done { unreachable!() }
    fn rope(&mut self, _: &Layout, _: usize, _: usize, _: &usize, _: &mut usize, _: bool) -> Done { unreachable!() }
    fn attention(&mut self, _: &Layout, _: &Layout, _: AttentionShape, _: &usize, _: &usize, _: &usize, _: &mut usize, _: &mut usize) -> Done { unreachable!() }
    fn attention_backward(&mut self, _: &Layout, _: &Layout, _: AttentionShape, _: &usize, _: &usize, _: &usize, _: &usize, _: &usize, _: &usize, _: &mut usize, _: &mut usize, _: &mut usize) -> Done { unreachable!() }
    fn swiglu(&mut self, _: &Layout, _: &usize, _: &usize, _: &mut usize) -> Done { unreachable!() }
    fn swiglu_backward(&mut self, _: &Layout, _: &usize, _: &usize, _: &usize, _: &mut usize, _: &mut usize) -> Done { unreachable!() }
    fn add(&mut self, _: &Layout, _: &usize, _: &mut usize) -> Done { unreachable!() }
    fn gather(&mut self, _: &Layout, _: &[u32], _: usize, _: &usize, _: &mut usize) -> Done { unreachable!() }
    fn scatter_add(&mut self, _: &Layout, _: &[u32], _: usize, _: &usize, _: &mut usize) -> Done { unreachable!() }
    fn head_loss(&mut self, _: &Layout, _: &usize, _: &(), _: &[u32], _: &[f32], _: &mut usize, _: Option<&mut usize>) -> Done { unreachable!() }
    fn adamw(&mut self, _: &mut [AdamWItem<'_, usize>], _: &mut usize) -> Done { unreachable!() }
}
