//! What there is at one moment: devices, engines, tenants, jobs.
//!
//! Plain numbers. The order of the lists means nothing.

/// A device, such as one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// A frozen model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TrunkId(pub u32);

/// An engine process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EngineId(pub u64);

/// Whose jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TenantId(pub u128);

/// A job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub u128);

/// The members of one sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CohortId(pub u128);

/// How a job shares its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// In an engine with others on the same trunk.
    Fused,
    /// In an engine of its own, beside others.
    Mps,
    /// In an engine of its own, with nobody else on the device.
    Solo,
}

/// Who goes first, whatever was used so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Goes first, and may have jobs of low priority pause where memory is short. It gives way itself to a tenant that has waited too long.
    High,
    /// The usual.
    Low,
}

/// A device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Which.
    pub id: DeviceId,
    /// Bytes for engines and jobs.
    pub memory_bytes: u64,
    /// Whether engines of the lane `mps` have a trunk's weights once between them.
    pub shares_weights: bool,
}

/// A trunk that jobs name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trunk {
    /// Which.
    pub id: TrunkId,
    /// What an engine on it takes of a device before any job: weights, tables, caches.
    pub engine_bytes: u64,
    /// The weights among them.
    pub weight_bytes: u64,
}

/// An engine process that runs, starts, or stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Which.
    pub id: EngineId,
    /// Where.
    pub device: DeviceId,
    /// What it holds.
    pub trunk: TrunkId,
    /// Whom it serves.
    pub lane: Lane,
    /// Whether it was told to stop. Until it is gone it holds its memory, and takes no job.
    pub is_stopping: bool,
    /// How long no job has been in it, in milliseconds.
    pub idle_ms: u64,
}

/// What a tenant may use at the same time, and in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Jobs that run at once.
    pub running_jobs: u64,
    /// Device time in all, in milliseconds.
    pub device_ms: u64,
    /// Device memory of all its running jobs.
    pub device_bytes: u64,
}

/// Whose jobs these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Which.
    pub id: TenantId,
    /// See [`crate::Shares`]: who has less goes first.
    pub virtual_ns: u128,
    /// Device time used so far, in milliseconds.
    pub device_ms: u64,
    /// For how long it has had fewer seats than its share though it wants one, since its last turn; see [`crate::Waits`].
    pub waited_ms: u64,
    /// What it may.
    pub quota: Quota,
}

/// A job that waits or runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Which.
    pub id: JobId,
    /// Whose.
    pub tenant: TenantId,
    /// Its place in its tenant's line.
    pub order: u64,
    /// The sweep that it is a member of.
    pub cohort: Option<CohortId>,
    /// On what.
    pub trunk: TrunkId,
    /// How.
    pub lane: Lane,
    /// How urgent.
    pub priority: Priority,
    /// Device memory of its adapters.
    pub adapter_bytes: u64,
    /// Device memory of its largest batch; of all jobs in an engine the largest counts, once.
    pub activation_bytes: u64,
    /// How far it is.
    pub state: State,
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not placed.
    Waiting {
        /// How long it has been told [`crate::Wait::ages`], without a break, in milliseconds.
        aged_ms: u64,
    },
    /// Placed in an engine, running or about to.
    Running {
        /// Which.
        engine: EngineId,
        /// Whether it was told to make room.
        is_pausing: bool,
        /// How long it has been at work here, in milliseconds: what it takes to begin, or to be where it was before, is none of it.
        ran_ms: u64,
        /// Whether it was told [`crate::Placement::is_turn`], or gave way before: jobs of others do not take its seat before its patience is over.
        is_turn: bool,
    },
}

/// Where no engine may be started now: the last one could not be, or died. Engines that there are take jobs all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// On which device.
    pub device: DeviceId,
    /// With what.
    pub trunk: TrunkId,
    /// For whom.
    pub lane: Lane,
    /// Of the lanes that give each job an engine of its own: for which job alone. None bars all.
    pub job: Option<JobId>,
    /// For how long still, in milliseconds.
    pub left_ms: u64,
}

/// A job that began on another device class than this device is of: its bits are promised within one alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Which.
    pub job: JobId,
    /// Where it cannot go on.
    pub device: DeviceId,
}

/// A device where room was made for a job; see [`crate::Plan::keep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Where.
    pub device: DeviceId,
    /// For which.
    pub job: JobId,
    /// For how long it has been kept without a break, in milliseconds.
    pub kept_ms: u64,
}

/// The operator's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Jobs on one device at once.
    pub device_jobs_max: u64,
    /// Engines of the lane `mps` on one device at once.
    pub device_mps_max: u64,
    /// How long a job at the head of its tenant's line lets others take memory that it could use, in milliseconds; beyond it a device is
    /// cleared for it. Also how long a tenant waits before others that have more give way, and how long a job is at work before it gives way.
    pub patience_ms: u64,
    /// How long an engine without jobs stays, in milliseconds.
    pub idle_ms_max: u64,
    /// What a placement counts for until its device time is known.
    pub quantum_ns: u64,
}

/// Everything that a decision follows from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scene {
    /// The devices.
    pub devices: Vec<Device>,
    /// The trunks that jobs and engines name.
    pub trunks: Vec<Trunk>,
    /// The engines, also those that stop.
    pub engines: Vec<Engine>,
    /// The tenants of all jobs.
    pub tenants: Vec<Tenant>,
    /// The jobs that wait or run.
    pub jobs: Vec<Job>,
    /// Where engines may not be started now.
    pub bars: Vec<Bar>,
    /// Where jobs that began elsewhere cannot go on.
    pub foreign: Vec<Foreign>,
    /// What the last plan said is to be kept.
    pub kept: Vec<Kept>,
    /// The operator's numbers.
    pub rules: Rules,
}
