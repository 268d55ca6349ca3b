//! Who settles a job: what the disk refuses of that is tried again for as long as the service runs.
//!
//! Never leaves a job unsettled that somebody waits for, and holds no more than the job itself meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nodus_state::{Claim, StateError};

use super::Shared;

/// How long after the first refusal it is tried again; twice as long after each further one.
const FIRST: Duration = Duration::from_millis(400);
/// And how long at most.
const LONGEST: Duration = Duration::from_secs(10);
/// Every so many refusals are told in the log, and the first.
const TOLD_EVERY: u32 = 30;
/// How often it is looked meanwhile whether the service ends.
const LOOK: Duration = Duration::from_millis(100);
/// Tries when the service starts: one that cannot take up its jobs does not start.
const TRIES_AT_START: u32 = 5;

/// What owners are told meanwhile.
pub(super) const NO_WRITES: &str = "the host's disk takes no writes: the job goes on once it does";

/// Settles one attempt.
pub(super) struct Settler {
    pub(super) shared: Arc<Shared>,
    pub(super) claim: Claim,
    tries_max: u32,
}

impl Settler {
    pub(super) fn new(shared: Arc<Shared>, claim: Claim) -> Self {
        Self { shared, claim, tries_max: u32::MAX }
    }

    /// Of a job that ran when the service ended.
    pub(super) fn at_start(shared: Arc<Shared>, claim: Claim) -> Self {
        Self { shared, claim, tries_max: TRIES_AT_START }
    }

    /// Does what can be done again. Blocks.
    ///
    /// # Errors
    /// The claim is stale; the service ends, or does not start; the state's database is broken.
    pub(super) fn persist<T>(&self, mut work: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let (job, mut tries, mut wait) = (self.claim.job, 0, FIRST);
        let done = loop {
            let error = match work() {
                Err(error) if tries < self.tries_max && !is_stale(&error) && !self.shared.state.is_broken() => error,
                done => break done,
            };
            if tries % TOLD_EVERY == 0 {
                tracing::warn!(%job, "what became of a job cannot be written, and is tried again until it can: {error:#}");
            }
            tries += 1;
            self.shared.state.excuse(job, Some(NO_WRITES));
            if !self.wait(wait) {
                break Err(error.context("the service ends"));
            }
            wait = LONGEST.min(2 * wait);
        };
        if tries > 0 && done.is_ok() {
            tracing::info!(%job, tries, "what became of a job is written");
            self.shared.state.excuse(job, None);
        }
        done
    }

    /// Whether the service still runs after that.
    fn wait(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while Instant::now() < until {
            if self.shared.board().is_closing {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }
}

/// Whether the job was taken from this attempt, and is another's to settle.
pub(super) fn is_stale(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(StateError::StaleClaim | StateError::NotFound(_)))
}
