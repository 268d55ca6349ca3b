//! The buffers of one pass, handed out again when they are let go.
//!
//! Never outlives its pass: then its buffers go back to the device, which may keep what is in them until `Device::forget_passes`. Within a pass nothing
//! is zeroed: a buffer is written before it is read.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use nodus_kernels::{Device, DeviceError, Use};

type Shelf<K, B> = Rc<RefCell<BTreeMap<K, Vec<B>>>>;

/// Use and length of a buffer.
type One = (bool, usize);

/// Rows and widths of activations that were allocated together.
type Several = (usize, Vec<usize>);

/// Buffers let go: single ones, and those that belong together.
pub(crate) struct Pool<B> {
    shelf: Shelf<One, B>,
    together: Shelf<Several, Vec<B>>,
}

/// A buffer of a pool, to which it returns when dropped. What it holds at first is what its last user left.
pub(crate) struct Lent<B> {
    buffer: Option<B>,
    key: One,
    shelf: Shelf<One, B>,
}

/// The same of buffers that belong together.
pub(crate) struct LentTogether<B> {
    buffers: Vec<B>,
    key: Several,
    shelf: Shelf<Several, Vec<B>>,
}

impl<B> Pool<B> {
    pub(crate) fn new() -> Self {
        Self { shelf: Rc::default(), together: Rc::default() }
    }

    /// A buffer of so many elements. Where the device has no room, those on the shelf make it.
    pub(crate) fn take<D: Device<Buffer = B>>(&self, device: &mut D, usage: Use, len: usize) -> Result<Lent<B>, DeviceError> {
        let key = (usage == Use::State, len);
        let shelved = self.shelf.borrow_mut().get_mut(&key).and_then(Vec::pop);
        let buffer = match shelved {
            Some(buffer) => buffer,
            None => match device.alloc(usage, len) {
                Err(DeviceError::OutOfMemory { .. }) => {
                    self.clear();
                    device.alloc(usage, len)?
                }
                other => other?,
            },
        };
        Ok(Lent { buffer: Some(buffer), key, shelf: self.shelf.clone() })
    }

    /// Activations of these widths over so many rows; see [`Device::alloc_together`].
    pub(crate) fn take_together<D: Device<Buffer = B>>(
        &self,
        device: &mut D,
        rows: usize,
        widths: &[usize],
    ) -> Result<LentTogether<B>, DeviceError> {
        let key = (rows, widths.to_vec());
        let shelved = self.together.borrow_mut().get_mut(&key).and_then(Vec::pop);
        let buffers = match shelved {
            Some(buffers) => buffers,
            None => match device.alloc_together(Use::Activation, rows, widths) {
                Err(DeviceError::OutOfMemory { .. }) => {
                    self.clear();
                    device.alloc_together(Use::Activation, rows, widths)?
                }
                other => other?,
            },
        };
        Ok(LentTogether { buffers, key, shelf: self.together.clone() })
    }

    fn clear(&self) {
        self.shelf.borrow_mut().clear();
        self.together.borrow_mut().clear();
    }
}

impl<B> Deref for LentTogether<B> {
    type Target = [B];

    fn deref(&self) -> &[B] {
        &self.buffers
    }
}

impl<B> DerefMut for LentTogether<B> {
    fn deref_mut(&mut self) -> &mut [B] {
        &mut self.buffers
    }
}

impl<B> Drop for LentTogether<B> {
    fn drop(&mut self) {
        let buffers = std::mem::take(&mut self.buffers);
        self.shelf.borrow_mut().entry(std::mem::take(&mut self.key)).or_default().push(buffers);
    }
}

impl<B> Deref for Lent<B> {
    type Target = B;

    #[expect(clippy::expect_used, reason = "only `drop` takes the buffer out")]
    fn deref(&self) -> &B {
        self.buffer.as_ref().expect("a buffer until it is dropped")
    }
}

impl<B> DerefMut for Lent<B> {
    #[expect(clippy::expect_used, reason = "only `drop` takes the buffer out")]
    fn deref_mut(&mut self) -> &mut B {
        self.buffer.as_mut().expect("a buffer until it is dropped")
    }
}

impl<B> Drop for Lent<B> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.shelf.borrow_mut().entry(self.key).or_default().push(buffer);
        }
    }
}
