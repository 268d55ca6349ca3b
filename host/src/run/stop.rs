//! Ctrl-C, and the other ways to ask a process to end: the first asks every job to stop, the second ends them.
//!
//! Decides nothing about what is kept.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::Context as _;
use nodus_sandbox::StopFlag;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::display::{Display, say};
use crate::error::Ending;

/// What was asked of the jobs of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    GoOn,
    Stop,
    End,
}

/// Reaches every job of a run.
pub(crate) struct Stopper {
    wish: watch::Sender<Wish>,
    flags: Mutex<Vec<StopFlag>>,
    /// Where the user is told; standard error until there is a display.
    display: OnceLock<Display>,
}

impl Stopper {
    /// Hears interrupts from now on, on a thread of its own.
    ///
    /// # Errors
    /// Ours: the system has no thread left.
    pub(crate) fn listen() -> anyhow::Result<Arc<Self>> {
        let stopper = Arc::new(Self::new());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context("starting to listen to interrupts")?;
        // Before this returns, since an interrupt without a handler ends the process.
        let interrupts = runtime.block_on(async { Interrupts::listen() }).context("listening to interrupts")?;
        let listener = stopper.clone();
        let work = move || runtime.block_on(listener.obey(interrupts));
        std::thread::Builder::new().name("interrupts".into()).spawn(work).context("starting to listen to interrupts")?;
        Ok(stopper)
    }

    fn new() -> Self {
        Self { wish: watch::Sender::new(Wish::GoOn), flags: Mutex::default(), display: OnceLock::new() }
    }

    /// From now on the user is told here.
    pub(super) fn tell_on(&self, display: Display) {
        // A run has one display.
        drop(self.display.set(display));
    }

    /// Whether no job is to start any more.
    pub(super) fn is_asked(&self) -> bool {
        *self.wish.borrow() != Wish::GoOn
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

    /// Resolves when jobs are to stop.
    pub(super) async fn asked(&self) {
        let mut wish = self.wish.subscribe();
        if wish.wait_for(|wish| *wish != Wish::GoOn).await.is_err() {
            std::future::pending().await
        }
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

    /// Waits for an interrupt, twice, and passes it on.
    async fn obey(self: Arc<Self>, mut interrupts: Interrupts) {
        interrupts.next().await;
        self.stop();
        self.note(if self.has_jobs() {
            "stopping after the steps under way; Ctrl-C again ends at once, unsaved"
        } else {
            "stopping before any job starts; Ctrl-C again ends at once"
        });
        interrupts.next().await;
        self.wish.send_replace(Wish::End);
        if !self.has_jobs() {
            // Nobody waits for the wish yet, and there is nothing to save.
            std::process::exit(Ending::Interrupted.exit_code().into());
        }
    }

    fn has_jobs(&self) -> bool {
        !self.flags.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// On a thread of its own: a terminal that is paused takes no line, and the second interrupt must be heard all the same.
    fn note(self: &Arc<Self>, text: &'static str) {
        let stopper = self.clone();
        let tell = move || match stopper.display.get() {
            Some(display) => display.note(text),
            None => say(&mut io::stderr(), text),
        };
        drop(std::thread::Builder::new().name("note".into()).spawn(tell));
    }
}

/// SIGINT (Ctrl-C), SIGTERM (what `kill`, containers and batch systems send) and SIGHUP (the terminal is gone).
struct Interrupts([Signal; 3]);

impl Interrupts {
    fn listen() -> io::Result<Self> {
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
