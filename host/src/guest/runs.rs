//! The jobs in a guest process, by their slots, and how the process ended.
//!
//! Passes words on; understands none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nodus_protocol::JobSlot;
use tokio::sync::mpsc;

use super::words::FromJob;

/// All clones are one list.
#[derive(Clone, Default)]
pub(super) struct Runs(Arc<Mutex<Board>>);

#[derive(Default)]
struct Board {
    jobs: BTreeMap<JobSlot, mpsc::Sender<FromJob>>,
    ended: Option<String>,
}

impl Runs {
    /// From now on the job's words go here.
    ///
    /// # Errors
    /// How the process ended.
    pub(super) fn enter(&self, job: JobSlot, words: mpsc::Sender<FromJob>) -> Result<(), String> {
        let mut board = self.lock();
        if let Some(how) = &board.ended {
            return Err(how.clone());
        }
        board.jobs.insert(job, words);
        Ok(())
    }

    /// From now on nobody listens to the job.
    pub(super) fn leave(&self, job: JobSlot) {
        self.lock().jobs.remove(&job);
    }

    /// Waits for whoever listens to the job. Words of a job that ended, or that never was, go nowhere.
    pub(super) async fn pass(&self, job: JobSlot, words: FromJob) {
        let listener = self.lock().jobs.get(&job).cloned();
        if let Some(listener) = listener {
            drop(listener.send(words).await);
        }
    }

    /// The process ended: no job will say anything more.
    pub(super) fn end(&self, how: String) {
        let mut board = self.lock();
        board.ended = Some(how);
        board.jobs.clear();
    }

    /// How it ended, where it has.
    pub(super) fn ended(&self) -> Option<String> {
        self.lock().ended.clone()
    }

    /// How it ended.
    pub(super) fn how(&self) -> String {
        self.lock().ended.clone().unwrap_or_else(|| "was lost".to_owned())
    }

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
