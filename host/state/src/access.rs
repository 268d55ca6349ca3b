//! How much of the folder a process takes.
//!
//! The lock is the operating system's: it goes with the process, however that ends, and with what the process was about to start when it ended.

use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cap_std::fs::{Dir, OpenOptions};

use crate::error::{Result, StateError};

const LOCK: &str = "serve.lock";
/// How long a service that ended may go on holding the folder: one that is started in its place waits for that.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// How much of the folder a process takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Rows and blobs: one process at a time. The service.
    Whole,
    /// Rows alone, beside the service. An operator's command.
    Rows,
}

/// Takes the folder, where that is asked for; holds it until dropped. Waits for seconds where another process has it.
pub(crate) fn take(dir: &Dir, access: Access) -> Result<Option<std::fs::File>> {
    if access == Access::Rows {
        return Ok(None);
    }
    let failed = StateError::file("opening the lock of the state's folder");
    let file = dir.open_with(LOCK, OpenOptions::new().read(true).write(true).create(true)).map_err(failed)?.into_std();
    let asked = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(std::fs::TryLockError::WouldBlock) if asked.elapsed() < PATIENCE => sleep(PAUSE),
            Err(std::fs::TryLockError::WouldBlock) => return Err(StateError::InUse),
            Err(std::fs::TryLockError::Error(error)) => {
                return Err(StateError::file("locking the state's folder")(io::Error::other(error)));
            }
        }
    }
}
