//! The buffers of one pass, handed out again when they are let go.
//!
//! Never outlives its pass: what leaves it goes back to the device, which zeroes it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use nodus_kernels::{Device, DeviceError, Use};

type Shelf<B> = Rc<RefCell<BTreeMap<(bool, usize), Vec<B>>>>;

/// Buffers let go, by use and length.
pub(crate) struct Pool<B> {
    shelf: Shelf<B>,
}

/// A buffer of a pool, to which it returns when dropped. What it holds at first is what its last user left.
pub(crate) struct Lent<B> {
    buffer: Option<B>,
    key: (bool, usize),
    shelf: Shelf<B>,
}

impl<B> Pool<B> {
    pub(crate) fn new() -> Self {
        Self { shelf: Rc::default() }
    }

    /// A buffer of so many elements. Where the device has no room, those on the shelf make it.
    pub(crate) fn take<D: Device<Buffer = B>>(&self, device: &mut D, usage: Use, len: usize) -> Result<Lent<B>, DeviceError> {
        let key = (usage == Use::State, len);
        let shelved = self.shelf.borrow_mut().get_mut(&key).and_then(Vec::pop);
        let buffer = match shelved {
            Some(buffer) => buffer,
            None => match device.alloc(usage, len) {
                Err(DeviceError::OutOfMemory { .. }) => {
                    self.shelf.borrow_mut().clear();
                    device.alloc(usage, len)?
                }
                other => other?,
            },
        };
        Ok(Lent { buffer: Some(buffer), key, shelf: self.shelf.clone() })
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
