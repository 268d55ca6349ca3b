//! What the machine says of itself: time, threads, memory.
//!
//! Decides nothing.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;

use crate::error::user;
use crate::paths::Paths;

/// Where Linux says how much memory there is.
pub(crate) const MEMORY_FILE: &str = "/proc/meminfo";

/// Memory of the machine, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// All of it.
    pub(crate) total: u64,
    /// What a new program can have without swapping: `MemAvailable`.
    pub(crate) available: u64,
}

/// The machine's memory as `/proc/meminfo` tells it; none where there is no such file.
pub(crate) fn memory(paths: Paths) -> Option<Memory> {
    let text = paths.read(Path::new(MEMORY_FILE), 1 << 20).ok()?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let figure = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total: figure("MemTotal")?, available: figure("MemAvailable")? })
}

/// Threads beyond this only cost memory.
const THREADS_MAX: usize = 1024;

/// As many threads as asked for, else as the machine has.
///
/// # Errors
/// The user's: more than any machine has. Ours: the system does not say.
pub(crate) fn threads(asked: Option<NonZeroUsize>) -> anyhow::Result<usize> {
    match asked {
        Some(threads) if threads.get() > THREADS_MAX => Err(user(format!("--threads is {threads}, expected at most {THREADS_MAX}"))),
        Some(threads) => Ok(threads.get()),
        None => Ok(std::thread::available_parallelism().context("counting the CPU's threads")?.get()),
    }
}

/// Milliseconds since 1970 in UTC.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
