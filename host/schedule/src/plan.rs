//! What is to be done now.
//!
//! To be carried out whole, then asked again when anything has changed.

use crate::reason::Reason;
use crate::scene::{DeviceId, EngineId, JobId, Lane, TenantId, TrunkId};
use crate::waits::Clock;

/// An engine to be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewEngine {
    /// Where.
    pub device: DeviceId,
    /// With what.
    pub trunk: TrunkId,
    /// For whom.
    pub lane: Lane,
}

/// An engine that a job is placed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Seat {
    /// One that there is.
    Engine(EngineId),
    /// One of [`Plan::start`], by its place there.
    New(usize),
}

/// A job and where it is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Which.
    pub job: JobId,
    /// Where.
    pub seat: Seat,
    /// Whether its tenant had waited for its patience: how long it waits is counted anew.
    pub is_turn: bool,
}

/// A job that goes on waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Which.
    pub job: JobId,
    /// Why, for its owner.
    pub reason: Reason,
    /// Whether its patience runs: it is its tenant's first that waits for a device, and somebody whose turn was later was placed before it,
    /// now or since it has been told so. See [`crate::State::Waiting`].
    pub ages: bool,
}

/// A device where room was or is made for a job that waits: it gets in there before anybody else is looked at, and others take only what leaves it
/// its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Where.
    pub device: DeviceId,
    /// For which.
    pub job: JobId,
}

/// What is to be done. Every waiting job is placed or told why not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Engines to be stopped; no job is in them.
    pub stop: Vec<EngineId>,
    /// Engines to be started.
    pub start: Vec<NewEngine>,
    /// Jobs to be started, in this order.
    pub place: Vec<Placement>,
    /// Jobs that are to make room, for one of high priority or for a tenant that has waited too long: to be ended and run again later.
    pub pause: Vec<JobId>,
    /// Jobs that go on waiting.
    pub wait: Vec<Wait>,
    /// For whom devices are kept until the next plan; see [`crate::Scene::kept`].
    pub keep: Vec<Keep>,
    /// How the waits of tenants go on; see [`crate::Waits::heed`].
    pub clocks: Vec<(TenantId, Clock)>,
}
