//! Shares work out over threads.
//!
//! Never decides how work is split: items come from the operation, and nothing but speed depends on which thread takes which.

use std::sync::{Mutex, PoisonError};

use crate::DeviceError;

/// The threads of a device, the calling one among them.
#[derive(Debug)]
pub(super) struct Workers {
    pool: Option<rayon::ThreadPool>,
    threads: usize,
    spare: Mutex<Vec<Scratch>>,
}

impl Workers {
    pub(super) fn new(threads: usize) -> Result<Self, DeviceError> {
        if threads == 0 {
            return Err(DeviceError::Unsupported("a CPU device needs at least one thread".into()));
        }
        let pool = (threads > 1)
            .then(|| rayon::ThreadPoolBuilder::new().num_threads(threads - 1).thread_name(|i| format!("kernels-{i}")).build())
            .transpose()
            .map_err(|error| DeviceError::Failed(format!("no thread pool: {error}")))?;
        Ok(Self { pool, threads, spare: Mutex::default() })
    }

    /// Calls `work` once with every item, in no particular order.
    pub(super) fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(T, &mut Scratch) + Sync) {
        let count = items.len();
        let queue = Mutex::new(items.into_iter());
        let take = || {
            let mut scratch = self.borrow();
            loop {
                let item = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                match item {
                    Some(item) => work(item, &mut scratch),
                    None => break,
                }
            }
            self.give_back(scratch);
        };
        match &self.pool {
            Some(pool) if count > 1 => pool.in_place_scope(|scope| {
                for _ in 1..self.threads.min(count) {
                    scope.spawn(|_| take());
                }
                take();
            }),
            _ => take(),
        }
    }

    fn borrow(&self) -> Scratch {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    fn give_back(&self, scratch: Scratch) {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

/// Working memory of one thread, kept between operations. It belongs to the device and is never handed out; an item overwrites what it
/// takes before it reads it, and dropping it zeroes it.
#[derive(Debug, Default)]
pub(super) struct Scratch(Vec<f32>);

impl Scratch {
    /// Slices of these lengths, holding anything.
    pub(super) fn take<const N: usize>(&mut self, lens: [usize; N]) -> [&mut [f32]; N] {
        let total = lens.iter().sum();
        if self.0.len() < total {
            super::buffer::wipe(&mut self.0);
            self.0.resize(total, 0.0);
        }
        let mut rest = self.0.as_mut_slice();
        lens.map(|len| rest.split_off_mut(..len).unwrap_or_default())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        super::buffer::wipe(&mut self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::{Scratch, Workers};

    #[test]
    fn every_item_once_on_any_number_of_threads() {
        for threads in 1..4 {
            let workers = Workers::new(threads).unwrap();
            let mut seen = vec![0; 1000];
            workers.each(seen.iter_mut().collect(), |seen: &mut i32, _| *seen += 1);
            assert!(seen.iter().all(|seen| *seen == 1));
        }
        assert!(Workers::new(0).is_err());
    }

    #[test]
    fn scratch_has_the_lengths_asked_for() {
        let mut scratch = Scratch::default();
        assert_eq!(scratch.take([3, 0, 5]).map(|s| s.len()), [3, 0, 5]);
        assert_eq!(scratch.take([10, 10]).map(|s| s.len()), [10, 10]);
    }
}
