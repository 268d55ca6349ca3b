//! Why jobs stand still while the disk takes no writes: told from memory, since there is nowhere else to tell it from.
//!
//! Never outlives the service, nor a job's end.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ids::JobId;
use crate::jobs::Job;
use crate::state::State;

/// By job.
#[derive(Debug, Default)]
pub(crate) struct Excuses(Mutex<BTreeMap<JobId, String>>);

impl Excuses {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<JobId, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// What a job's owner is told instead of why it waits, until it is taken back.
    pub fn excuse(&self, job: JobId, why: Option<&str>) {
        match why {
            Some(why) => self.excuses.lock().insert(job, why.to_owned()),
            None => self.excuses.lock().remove(&job),
        };
    }

    /// Forgets what owners of other jobs were told.
    pub fn keep_excuses(&self, is_wanted: impl Fn(JobId) -> bool) {
        self.excuses.lock().retain(|job, _| is_wanted(*job));
    }

    /// Jobs with what their owners are told.
    pub(crate) fn excused(&self, jobs: Vec<Job>) -> Vec<Job> {
        let excuses = self.excuses.lock();
        let excused = |job: Job| match excuses.get(&job.id) {
            Some(why) if !job.state.is_ended() => Job { reason: Some(why.clone()), ..job },
            _ => job,
        };
        jobs.into_iter().map(excused).collect()
    }
}
