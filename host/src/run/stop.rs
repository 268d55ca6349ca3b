//! Ctrl-C, and the other ways to ask a process to end: the first asks every job to stop, the second ends them.
//!
//! Decides nothing about what is kept.

use std::sync::{Arc, Mutex, PoisonError};

use nodus_sandbox::StopFlag;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// What was asked of the jobs of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    GoOn,
    Stop,
    End,
}

/// Reaches every job of a run.
pub(super) struct Stopper {
    wish: watch::Sender<Wish>,
    flags: Mutex<Vec<StopFlag>>,
}

impl Stopper {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { wish: watch::Sender::new(Wish::GoOn), flags: Mutex::default() })
    }

    /// The flag of a job that is about to start; none where no more are to start.
    pub(super) fn enlist(&self) -> Option<StopFlag> {
        let mut flags = self.flags.lock().unwrap_or_else(PoisonError::into_inner);
        if *self.wish.borrow() != Wish::GoOn {
            return None;
        }
        let flag = StopFlag::default();
        flags.push(flag.clone());
        Some(flag)
    }

    /// Resolves when jobs are to end at once.
    pub(super) async fn end(&self) {
        let mut wish = self.wish.subscribe();
        if wish.wait_for(|wish| *wish == Wish::End).await.is_err() {
            std::future::pending().await
        }
    }

    fn stop(&self) {
        let flags = self.flags.lock().unwrap_or_else(PoisonError::into_inner);
        self.wish.send_replace(Wish::Stop);
        flags.iter().for_each(StopFlag::request);
    }

    /// Waits for an interrupt, twice, and passes it on; `note` shows a line.
    pub(super) async fn obey_interrupts(&self, note: impl Fn(&str)) {
        // Without handlers an interrupt ends the process as it always does.
        let Ok(mut interrupts) = Interrupts::listen() else { return };
        interrupts.next().await;
        self.stop();
        note("stopping after the steps under way; Ctrl-C again ends at once, unsaved");
        interrupts.next().await;
        self.wish.send_replace(Wish::End);
    }
}

/// SIGINT (Ctrl-C), SIGTERM (what `kill`, containers and batch systems send) and SIGHUP (the terminal is gone).
struct Interrupts([Signal; 3]);

impl Interrupts {
    fn listen() -> std::io::Result<Self> {
        Ok(Self([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Stopper;

    #[test]
    fn a_stop_reaches_all_that_run_and_no_more_start() {
        let stopper = Stopper::new();
        let flags = [stopper.enlist().unwrap(), stopper.enlist().unwrap()];
        assert!(!flags[0].is_requested());
        stopper.stop();
        assert!(flags.iter().all(nodus_sandbox::StopFlag::is_requested) && stopper.enlist().is_none());
    }
}
