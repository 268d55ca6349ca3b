//! A process that this one started: why it was ended, and how it ended.
//!
//! Never leaves it behind: dropped, it is ended and waited for.

use std::process::Child;
use std::sync::{Mutex, PoisonError};

use super::spawn::how;

/// The process itself, and why it was ended.
pub(crate) struct Fate {
    child: Mutex<Child>,
    sentence: Mutex<Option<String>>,
}

impl Fate {
    pub(crate) fn new(child: Child) -> Self {
        Self { child: Mutex::new(child), sentence: Mutex::new(None) }
    }

    /// Ends the process; the first reason is the one that is told.
    pub(crate) fn seal(&self, reason: Option<String>) {
        let mut sentence = self.sentence.lock().unwrap_or_else(PoisonError::into_inner);
        *sentence = sentence.take().or(reason);
        // It may be dead already.
        drop(self.child.lock().unwrap_or_else(PoisonError::into_inner).kill());
    }

    /// Waits for a process that was ended.
    pub(crate) fn how(&self) -> String {
        let status = self.child.lock().unwrap_or_else(PoisonError::into_inner).wait();
        let sentence = self.sentence.lock().unwrap_or_else(PoisonError::into_inner).clone();
        sentence.unwrap_or_else(|| how(status))
    }
}

impl Drop for Fate {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        drop(child.kill());
        drop(child.wait());
    }
}
