//! What the client at the other end of a connection may name (its own jobs, their trunks, their cohort), and what it was answered.
//!
//! Never a matter of trust: the client may be a process that strangers' code has taken over.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::seen::{Seen, Ticket, fingerprint};
use crate::{AdapterSlot, AdapterWeights, Client, Command, EngineError, JobSlot, LossSums, Reply, StepReport, TrunkSlot};

/// Answers of one job that may wait to be told; a client that is further ahead of its own words waits. More than all adapters of a job have
/// calls in flight.
const UNTOLD_MAX: usize = 1 << 18;

/// What one job may name.
#[derive(Debug)]
struct Grant {
    /// Where its commands go. None where the job was cut off: what its client still sends of it, knowing no better, is passed over.
    engine: Option<Client>,
    /// Trunks that it may put adapters on.
    trunks: Vec<TrunkSlot>,
    /// The cohort whose activations it may share.
    cohort: Option<u64>,
    /// Commands that it has sent.
    commands: u64,
}

/// A command that its client had no right to send.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a command that names {0}")]
pub struct Breach(pub(super) &'static str);

/// The jobs of one client; all clones are one list.
#[derive(Clone, Debug, Default)]
pub struct Grants(Arc<List>);

#[derive(Debug, Default)]
struct List {
    jobs: Mutex<BTreeMap<JobSlot, (Grant, Seen)>>,
    /// Something was told, or a job has ended.
    told: Notify,
    /// Where all commands go of a client that is the host itself.
    whole: Option<Client>,
}

/// Whether a command is passed on.
#[derive(Clone, Debug)]
pub(super) enum Checked {
    /// It is; where to, and where its answer belongs.
    Pass(Client, Option<Expected>),
    /// Its job was cut off, and its client does not know it yet.
    PassOver,
}

/// Where the answer of a command belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected(JobSlot, Ticket);

impl Grants {
    /// Those of the host itself, which may send everything to this engine.
    #[must_use]
    pub fn whole(engine: Client) -> Self {
        Self(Arc::new(List { whole: Some(engine), ..List::default() }))
    }

    /// From now on the client may send commands of this job, and this engine gets them.
    pub fn grant(&self, job: JobSlot, engine: Client, trunks: Vec<TrunkSlot>, cohort: Option<u64>) {
        let grant = Grant { engine: Some(engine), trunks, cohort, commands: 0 };
        self.lock().insert(job, (grant, Seen::default()));
    }

    /// The job was cut off: from now on nothing of it reaches the engine. Who cut it off has the engine give it up.
    pub fn close(&self, job: JobSlot) {
        self.lock().get_mut(&job).into_iter().for_each(|(grant, _)| grant.engine = None);
        self.0.told.notify_waiters();
    }

    /// From now on it may not.
    pub fn revoke(&self, job: JobSlot) {
        self.lock().remove(&job);
        self.0.told.notify_waiters();
    }

    /// Commands that a job has sent.
    #[must_use]
    pub fn commands(&self, job: JobSlot) -> u64 {
        self.lock().get(&job).map_or(0, |(grant, _)| grant.commands)
    }

    /// The jobs that were not cut off, and their engines.
    pub(super) fn jobs(&self) -> Vec<(JobSlot, Client)> {
        self.lock().iter().filter_map(|(job, (grant, _))| Some((*job, grant.engine.clone()?))).collect()
    }

    /// Whether this is to be passed on, which the client may send; and counts it.
    ///
    /// # Errors
    /// What it must not name.
    pub(super) fn check(&self, command: &Command) -> Result<Checked, Breach> {
        if let Some(engine) = &self.0.whole {
            return Ok(Checked::Pass(engine.clone(), None));
        }
        let mut jobs = self.lock();
        let job = job_of(command)?;
        let (grant, seen) = jobs.get_mut(&job).ok_or(Breach("a job of somebody else"))?;
        if let Command::CreateAdapter { trunk, cohort, .. } | Command::LoadAdapter { trunk, cohort, .. } = command {
            if !grant.trunks.contains(trunk) {
                return Err(Breach("a trunk that the job was not given"));
            }
            if *cohort != grant.cohort {
                return Err(Breach("another cohort than the job's"));
            }
        }
        grant.commands += 1;
        let Some(engine) = grant.engine.clone() else { return Ok(Checked::PassOver) };
        Ok(Checked::Pass(engine, seen.asked(command)?.map(|ticket| Expected(job, ticket))))
    }

    /// Waits until the client has told enough of what this job was answered.
    pub(super) async fn room(&self, expected: Option<Expected>) {
        let Some(Expected(job, _)) = expected else { return };
        loop {
            let mut told = std::pin::pin!(self.0.told.notified());
            // From here on no telling is missed.
            told.as_mut().enable();
            if self.lock().get(&job).is_none_or(|(grant, seen)| grant.engine.is_none() || seen.untold() < UNTOLD_MAX) {
                return;
            }
            told.await;
        }
    }

    /// The engine has answered, and the client is about to hear it.
    pub(super) fn answered(&self, Expected(job, ticket): Expected, reply: &Result<Reply, EngineError>) {
        let fingerprint = if let Ok(Reply::Weights(weights)) = reply { fingerprint(weights) } else { None };
        if let Some((_, seen)) = self.lock().get_mut(&job) {
            seen.answered(ticket, reply, fingerprint);
        }
    }

    /// The client tells a step of a job's adapter: whether it is the oldest that it has not told, bit for bit as the engine answered it.
    #[must_use]
    pub fn told_step(&self, job: JobSlot, adapter: u32, report: &StepReport, learning_rate: f32) -> bool {
        self.told(job, |seen| seen.told_step(adapter, report, learning_rate))
    }

    /// The client tells an evaluation of a job's adapter after so many steps: whether the engine answered it so, bit for bit, and every step
    /// before it was told.
    #[must_use]
    pub fn told_evaluation(&self, job: JobSlot, adapter: u32, step: u64, sums: &LossSums) -> bool {
        self.told(job, |seen| seen.told_evaluation(adapter, step, sums))
    }

    /// Whether the client has told every step that a job was answered.
    #[must_use]
    pub fn is_all_told(&self, job: JobSlot) -> bool {
        self.lock().get(&job).is_none_or(|(_, seen)| seen.is_all_told())
    }

    /// Adapters of a job that have these very weights by their latest export, each with its step count at that time.
    #[must_use]
    pub fn exported(&self, job: JobSlot, weights: &AdapterWeights) -> Vec<(u32, u64)> {
        let Some(fingerprint) = fingerprint(weights) else { return Vec::new() };
        self.lock().get(&job).map_or_else(Vec::new, |(_, seen)| seen.exported(fingerprint))
    }

    fn told(&self, job: JobSlot, tell: impl FnOnce(&mut Seen) -> bool) -> bool {
        let is_true = self.lock().get_mut(&job).is_some_and(|(_, seen)| tell(seen));
        self.0.told.notify_waiters();
        is_true
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobSlot, (Grant, Seen)>> {
        self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn job_of(command: &Command) -> Result<JobSlot, Breach> {
    match command {
        // The host plans memory, not the job.
        Command::Reserve { .. } => Err(Breach("a reservation")),
        Command::Snapshot { .. } | Command::Restore { .. } => Err(Breach("a job's whole state")),
        Command::Prioritise { .. } => Err(Breach("a priority")),
        Command::Bound { .. } => Err(Breach("a bound of the engine's memory")),
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
