//! A process that this one started: why it was ended, and how it ended.
//!
//! Never leaves it behind: dropped, it is ended and waited for. Who may not block calls [`end`] first.

use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};

use super::mps::Mps;
use super::socket::listen;
use super::spawn::how;

/// The process itself, and why it was ended.
pub(crate) struct Fate {
    child: Mutex<Child>,
    sentence: Mutex<Option<String>>,
    /// Whose client it is: it is told off there before it is ended.
    mps: Option<Arc<Mps>>,
}

impl Fate {
    pub(crate) fn new(child: Child) -> Self {
        Self::of_client(child, None)
    }

    /// Of a process that is a client of this daemon.
    pub(crate) fn of_client(child: Child, mps: Option<Arc<Mps>>) -> Self {
        Self { child: Mutex::new(child), sentence: Mutex::new(None), mps }
    }

    /// Logs what the process writes to standard error, until it ends. `name` is what it is called in the log.
    ///
    /// # Errors
    /// The system has no thread.
    pub(crate) fn listen(&self, name: &'static str) -> std::io::Result<()> {
        listen(&mut self.child.lock().unwrap_or_else(PoisonError::into_inner), name)
    }

    /// The process's number.
    pub(crate) fn id(&self) -> u32 {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).id()
    }

    /// Ends the process; the first reason is the one that is told. Blocks where it is a client of a daemon.
    pub(crate) fn seal(&self, reason: Option<String>) {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        farewell(self.mps.as_deref(), &mut child);
        drop(child);
        self.seal_at_once(reason);
    }

    /// The same of a process that has no work on a device any more: there is nobody to tell off.
    pub(crate) fn seal_at_once(&self, reason: Option<String>) {
        let mut sentence = self.sentence.lock().unwrap_or_else(PoisonError::into_inner);
        *sentence = sentence.take().or(reason);
        // It may be dead already.
        drop(self.child.lock().unwrap_or_else(PoisonError::into_inner).kill());
    }

    /// Waits for a process that was ended.
    pub(crate) fn how(&self) -> String {
        let status = self.child.lock().unwrap_or_else(PoisonError::into_inner).wait();
        let sentence = self.sentence.lock().unwrap_or_else(PoisonError::into_inner).clone();
        sentence.unwrap_or_else(|| how(status))
    }
}

/// Ends a process for a reason and waits for it, away from the threads that carry tasks: a daemon may take its time. How it ended.
pub(crate) async fn end(fate: &Arc<Fate>, reason: Option<String>) -> String {
    let fate = fate.clone();
    let ended = tokio::task::spawn_blocking(move || {
        fate.seal(reason);
        fate.how()
    });
    // A panic of it was reported where it happened.
    ended.await.unwrap_or_else(|_| "was lost".to_owned())
}

impl Drop for Fate {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(PoisonError::into_inner);
        farewell(self.mps.as_deref(), child);
        drop(child.kill());
        drop(child.wait());
    }
}

/// Work of a client that is killed without it may take its neighbours on the card along.
fn farewell(mps: Option<&Mps>, child: &mut Child) {
    let is_alive = matches!(child.try_wait(), Ok(None));
    if let Some(mps) = mps.filter(|_| is_alive)
        && let Err(error) = mps.terminate(child.id())
    {
        tracing::warn!("an MPS client is killed without having been told off: {error:#}");
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::mps::tests::daemon;
    use super::{Fate, end};

    /// A client of a daemon that takes its time: on the one thread that there is, others go on meanwhile.
    #[tokio::test]
    async fn an_end_that_takes_time_keeps_nobody_from_working() {
        let folder = tempfile::tempdir().unwrap();
        let daemon = Arc::new(daemon(&folder, "sleep 0.2"));
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let fate = Arc::new(Fate::of_client(child, Some(daemon.clone())));
        let mut beats = 0;
        let beat = async {
            loop {
                tokio::time::sleep(Duration::from_millis(5)).await;
                beats += 1;
            }
        };
        let how = tokio::select! {
            how = end(&fate, Some("was told to".to_owned())) => how,
            () = beat => unreachable!("it beats for ever"),
        };
        assert_eq!(how, "was told to");
        assert!(beats >= 10, "{beats} beats");
        let began = std::time::Instant::now();
        drop(fate);
        assert!(began.elapsed() < Duration::from_millis(100), "nothing is left to be done when it is dropped");
    }
}
