//! How much of the folder a process takes.
//!
//! The lock is the operating system's: it goes with the process, however that ends.

use std::io;

use cap_std::fs::{Dir, OpenOptions};

use crate::error::{Result, StateError};

const LOCK: &str = "serve.lock";

/// How much of the folder a process takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Rows and blobs: one process at a time. The service.
    Whole,
    /// Rows alone, beside the service. An operator's command.
    Rows,
}

/// Takes the folder, where that is asked for; holds it until dropped.
pub(crate) fn take(dir: &Dir, access: Access) -> Result<Option<std::fs::File>> {
    if access == Access::Rows {
        return Ok(None);
    }
    let failed = StateError::file("opening the lock of the state's folder");
    let file = dir.open_with(LOCK, OpenOptions::new().read(true).write(true).create(true)).map_err(failed)?.into_std();
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => Err(StateError::InUse),
        Err(std::fs::TryLockError::Error(error)) => Err(StateError::file("locking the state's folder")(io::Error::other(error))),
    }
}
