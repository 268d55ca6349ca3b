//! What a tenant may have and use.
//!
//! Acts when something is asked for, never while a job runs, which is held to its own limits alone; but for what it leaves, which is its tenant's.

use rusqlite::Row;
use serde::{Deserialize, Serialize};

use crate::error::{Result, StateError};

/// The bounds of one tenant. `None` is no bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// Jobs that wait. Refuses the submission.
    pub queued_jobs: Option<u64>,
    /// Jobs that run at the same time. More wait.
    pub running_jobs: Option<u64>,
    /// Jobs of high priority that wait or run. Refuses the submission.
    pub high_jobs: Option<u64>,
    /// Bytes of everything the tenant keeps, each content counted once. Refuses the upload and the submission; ends a job that leaves more.
    pub stored_bytes: Option<u64>,
    /// Device memory that the tenant's running jobs may be planned to hold. A job that needs more alone is refused; others wait.
    pub device_bytes: Option<u64>,
    /// Time on the device, in all. Refuses the submission.
    pub device_ms: Option<u64>,
    /// Requests to the service. Refuses the request, and says when to come again.
    pub requests_per_second: Option<u64>,
}

impl Quota {
    /// What a tenant gets without a word.
    pub const DEFAULT: Self = Self {
        queued_jobs: Some(4096),
        running_jobs: Some(64),
        high_jobs: None,
        stored_bytes: Some(64 << 30),
        device_bytes: Some(64 << 30),
        device_ms: None,
        requests_per_second: Some(100),
    };

    /// All names, the unit last, as an operator gives them.
    pub const NAMES: [&str; 7] =
        ["queued-jobs", "running-jobs", "high-jobs", "stored-bytes", "device-bytes", "device-ms", "requests-per-second"];

    /// Sets a bound by its name; whether there is one of that name.
    pub fn set(&mut self, name: &str, bound: Option<u64>) -> bool {
        let place = match name {
            "queued-jobs" => &mut self.queued_jobs,
            "running-jobs" => &mut self.running_jobs,
            "high-jobs" => &mut self.high_jobs,
            "stored-bytes" => &mut self.stored_bytes,
            "device-bytes" => &mut self.device_bytes,
            "device-ms" => &mut self.device_ms,
            "requests-per-second" => &mut self.requests_per_second,
            _ => return false,
        };
        *place = bound;
        true
    }

    /// Names and bounds.
    #[must_use]
    pub fn entries(&self) -> [(&'static str, Option<u64>); 7] {
        let [queued, running, high, stored, device, time, requests] = Self::NAMES;
        [
            (queued, self.queued_jobs),
            (running, self.running_jobs),
            (high, self.high_jobs),
            (stored, self.stored_bytes),
            (device, self.device_bytes),
            (time, self.device_ms),
            (requests, self.requests_per_second),
        ]
    }

    pub(crate) const COLUMNS: &str =
        "queued_jobs_max, running_jobs_max, high_jobs_max, stored_bytes_max, device_bytes_max, device_ms_max, requests_per_second_max";

    /// From the columns that begin at `first`.
    pub(crate) fn from_row(row: &Row<'_>, first: usize) -> rusqlite::Result<Self> {
        Ok(Self {
            queued_jobs: row.get(first)?,
            running_jobs: row.get(first + 1)?,
            high_jobs: row.get(first + 2)?,
            stored_bytes: row.get(first + 3)?,
            device_bytes: row.get(first + 4)?,
            device_ms: row.get(first + 5)?,
            requests_per_second: row.get(first + 6)?,
        })
    }
}

impl Default for Quota {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Refuses `asked` on top of `used` where it goes beyond the bound.
pub(crate) fn within(quota: &'static str, bound: Option<u64>, used: u64, asked: u64) -> Result<()> {
    match bound {
        Some(max) if used.saturating_add(asked) > max => Err(StateError::Quota { quota, max, used, asked }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Quota, within};

    #[test]
    fn bounds_have_names_and_hold() {
        let mut quota = Quota::DEFAULT;
        for name in Quota::NAMES {
            assert!(quota.set(name, Some(7)));
        }
        assert!(quota.entries().iter().all(|(_, bound)| *bound == Some(7)));
        assert!(!quota.set("jobs", None));
        assert!(within("q", Some(7), 5, 2).is_ok() && within("q", None, u64::MAX, 1).is_ok());
        assert_eq!(within("q", Some(7), 5, 3).unwrap_err().to_string(), "quota `q` is 7: 5 used, 3 more asked for");
    }
}
