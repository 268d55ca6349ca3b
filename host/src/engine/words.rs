//! What an engine process and its parent say to each other beside commands and replies.
//!
//! Plain values. Both ends are this program, and neither is a stranger.

use std::collections::BTreeMap;

use nodus_engine::{Counts, JobBytes};
use nodus_protocol::{JobSlot, TrunkSlot};
use serde::{Deserialize, Serialize};

use crate::cli::DeviceArgs;
use crate::cuda::DeviceEnv;
use crate::name::Name;
use crate::run::device::Class;

/// From the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToEngine {
    /// Load this. Said once, first.
    Load(Box<Load>),
    /// A job has ended: say what it used, and forget it. Answers `Used`.
    Forget(JobSlot),
    /// Say how things are. Answers `Lives`.
    Ping,
}

/// From the engine process.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromEngine {
    /// The trunk is loaded and the device proven; commands are taken.
    Ready(Box<Facts>),
    /// It cannot be; the process ends.
    Refused {
        text: String,
        /// Whether the operator can put it right.
        is_users: bool,
    },
    /// What a job held of the device's memory, and its time in passes, in nanoseconds.
    Used(JobSlot, Box<JobBytes>, u64),
    /// How things are.
    Lives(Box<Vitals>),
}

/// What to load, and on what.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Load {
    pub(super) model: Name,
    /// As people know it.
    pub(super) device: DeviceArgs,
    /// Whether the driver shows the process this card alone, so that it has another number there.
    pub(super) sees_it_alone: bool,
    /// Bytes of its buffers at most: all but the weights.
    pub(super) buffer_bytes_max: u64,
    /// Bytes of the card's memory that it may have in all, as the driver is to see to.
    pub(super) limit: Option<u64>,
    pub(super) environment: DeviceEnv,
}

/// What follows from the device and the model.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) slot: TrunkSlot,
    pub(super) class: Class,
    /// The device, as people call it.
    pub(super) device: String,
}

/// How an engine is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Vitals {
    /// What it has done.
    pub(crate) counts: Counts,
    /// How long it has been at what it does now, in milliseconds.
    pub(crate) busy_ms: u64,
    /// Time in passes of each of its jobs so far.
    pub(crate) device_ns: BTreeMap<JobSlot, u64>,
}
