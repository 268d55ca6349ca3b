//! What the client at the other end of a connection may name: its own jobs, their trunks, their cohort.
//!
//! Never a matter of trust: the client may be a process that strangers' code has taken over.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{AdapterSlot, Command, JobSlot, TrunkSlot};

/// What one job may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Trunks that it may put adapters on.
    pub trunks: Vec<TrunkSlot>,
    /// The cohort whose activations it may share.
    pub cohort: Option<u64>,
    /// Commands that it has sent.
    pub commands: u64,
    /// Whether the job was cut off: what its client still sends of it, knowing no better, is passed over.
    pub is_closed: bool,
}

/// A command that its client had no right to send.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a command that names {0}")]
pub struct Breach(&'static str);

/// The jobs of one client; all clones are one list.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    jobs: Arc<Mutex<BTreeMap<JobSlot, Grant>>>,
    is_whole: bool,
}

impl Grants {
    /// Those of the host itself, which may send everything.
    #[must_use]
    pub fn whole() -> Self {
        Self { jobs: Arc::default(), is_whole: true }
    }

    /// From now on the client may send commands of this job.
    pub fn grant(&self, job: JobSlot, trunks: Vec<TrunkSlot>, cohort: Option<u64>) {
        self.lock().insert(job, Grant { trunks, cohort, commands: 0, is_closed: false });
    }

    /// The job was cut off: from now on nothing of it reaches the engine.
    pub fn close(&self, job: JobSlot) {
        self.lock().get_mut(&job).into_iter().for_each(|grant| grant.is_closed = true);
    }

    /// From now on it may not.
    pub fn revoke(&self, job: JobSlot) {
        self.lock().remove(&job);
    }

    /// Commands that a job has sent.
    #[must_use]
    pub fn commands(&self, job: JobSlot) -> u64 {
        self.lock().get(&job).map_or(0, |grant| grant.commands)
    }

    /// The jobs.
    pub(super) fn jobs(&self) -> Vec<JobSlot> {
        self.lock().keys().copied().collect()
    }

    /// Whether this is to be passed on, which the client may send; and counts it.
    ///
    /// # Errors
    /// What it must not name.
    pub fn check(&self, command: &Command) -> Result<bool, Breach> {
        if self.is_whole {
            return Ok(true);
        }
        let mut jobs = self.lock();
        let grant = jobs.get_mut(&job_of(command)?).ok_or(Breach("a job of somebody else"))?;
        if let Command::CreateAdapter { trunk, cohort, .. } | Command::LoadAdapter { trunk, cohort, .. } = command {
            if !grant.trunks.contains(trunk) {
                return Err(Breach("a trunk that the job was not given"));
            }
            if *cohort != grant.cohort {
                return Err(Breach("another cohort than the job's"));
            }
        }
        grant.commands += 1;
        Ok(!grant.is_closed)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobSlot, Grant>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn job_of(command: &Command) -> Result<JobSlot, Breach> {
    match command {
        // The host plans memory, not the job.
        Command::Reserve { .. } => Err(Breach("a reservation")),
        Command::DropJob { job } => Ok(*job),
        Command::CreateAdapter { slot: AdapterSlot { job, .. }, .. }
        | Command::LoadAdapter { slot: AdapterSlot { job, .. }, .. }
        | Command::ForwardBackward { slot: AdapterSlot { job, .. }, .. }
        | Command::OptimStep { slot: AdapterSlot { job, .. }, .. }
        | Command::TrainStep { slot: AdapterSlot { job, .. }, .. }
        | Command::Evaluate { slot: AdapterSlot { job, .. }, .. }
        | Command::Export { slot: AdapterSlot { job, .. } }
        | Command::DropAdapter { slot: AdapterSlot { job, .. } } => Ok(*job),
    }
}
