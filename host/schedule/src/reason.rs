//! Why a job waits, in its owner's words.
//!
//! Never names another tenant or its jobs.

use std::fmt;

/// Why a job waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Its tenant runs as many jobs as it may.
    #[error("waiting for another of your jobs to end: {running} run, {allowed} may")]
    RunningJobs {
        /// That run now.
        running: u64,
        /// The quota.
        allowed: u64,
    },
    /// Its tenant has used all its device time.
    #[error("your device time is used up: {} s of {} s", used_ms / 1000, allowed_ms / 1000)]
    DeviceTime {
        /// So far.
        used_ms: u64,
        /// The quota.
        allowed_ms: u64,
    },
    /// It needs more device memory than its tenant has left of its quota.
    #[error("waiting for device memory of your quota: needs {}, {} of {} free", Size(*needed), Size(*free), Size(*allowed))]
    TenantMemory {
        /// By this job.
        needed: u64,
        /// Of the quota.
        free: u64,
        /// The quota.
        allowed: u64,
    },
    /// It needs more than its tenant's whole quota.
    #[error("will not start: needs {} of device memory, your quota is {}", Size(*needed), Size(*allowed))]
    OverQuota {
        /// By this job.
        needed: u64,
        /// The quota.
        allowed: u64,
    },
    /// No device has the memory free.
    #[error("waiting for device memory: needs {}, {} free", Size(*needed), Size(*free))]
    Memory {
        /// On the device that has most free, an engine to be started included.
        needed: u64,
        /// There.
        free: u64,
    },
    /// No device is large enough.
    #[error("will not start: needs {} of device memory, the largest device has {}", Size(*needed), Size(*largest))]
    TooLarge {
        /// An engine of its own included.
        needed: u64,
        /// Of any device.
        largest: u64,
    },
    /// As many jobs run as may.
    #[error("waiting for a seat: all {allowed} of the device are taken")]
    Seats {
        /// Of one device.
        allowed: u64,
    },
    /// As many engines of the lane `mps` run as may.
    #[error("waiting for an engine of its own: all {allowed} of the device are taken")]
    Engines {
        /// Of one device.
        allowed: u64,
    },
    /// It wants a device to itself.
    #[error("waiting to have a device to itself")]
    Alone,
    /// Somebody has the device to themselves.
    #[error("waiting for a device that is in use as a whole")]
    Taken,
    /// The devices that it could run on are cleared for a job that has waited longer.
    #[error("waiting for a device that is kept for a job that has waited longer")]
    Kept,
    /// An idle engine is stopped, or jobs of low priority make room for it.
    #[error("room is being made for it")]
    MakingRoom,
    /// The last engine for it could not be started, or died.
    #[error("the host failed it and tries again in {} s", left_ms / 1000 + 1)]
    Later {
        /// Until then.
        left_ms: u64,
    },
    /// It began on a device of another class than any that could take it.
    #[error("waiting for a device of the class that it began on: its bits are promised on that one alone")]
    OtherClass,
    /// There is none.
    #[error("waiting for a device: none can be used")]
    NoDevice,
}

impl Reason {
    /// A short name for counting, such as `memory`.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::RunningJobs { .. } => "running-jobs",
            Self::DeviceTime { .. } => "device-time",
            Self::TenantMemory { .. } => "tenant-memory",
            Self::OverQuota { .. } => "over-quota",
            Self::Memory { .. } => "memory",
            Self::TooLarge { .. } => "too-large",
            Self::Seats { .. } => "seats",
            Self::Engines { .. } => "engines",
            Self::Alone => "alone",
            Self::Taken => "taken",
            Self::Kept => "kept",
            Self::MakingRoom => "making-room",
            Self::Later { .. } => "later",
            Self::OtherClass => "other-class",
            Self::NoDevice => "no-device",
        }
    }
}

/// Bytes, for people.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 3] = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
        match UNITS.into_iter().find(|(unit, _)| self.0 >= *unit) {
            Some((unit, name)) => {
                let tenths = self.0 / (unit / 10);
                write!(f, "{}.{} {name}", tenths / 10, tenths % 10)
            }
            None => write!(f, "{} bytes", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Reason;

    #[test]
    fn a_reason_says_the_numbers() {
        let memory = Reason::Memory { needed: 3_140_000_000, free: 1_200_000_000 };
        assert_eq!(memory.to_string(), "waiting for device memory: needs 3.1 GB, 1.2 GB free");
        let quota = Reason::TenantMemory { needed: 64 << 20, free: 999, allowed: 12_000 };
        assert_eq!(quota.to_string(), "waiting for device memory of your quota: needs 67.1 MB, 999 bytes of 12.0 kB free");
        assert_eq!(Reason::DeviceTime { used_ms: 61_000, allowed_ms: 60_000 }.to_string(), "your device time is used up: 61 s of 60 s");
    }
}
