//! The thread that moves wasmtime's epoch, so that running guests are looked at.
//!
//! Never a task of the runtime: a guest that spins would starve the very ticker that is to stop it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::{Engine, EngineWeak};

use crate::limits::TICK_MS;

/// Moves the epoch every [`TICK_MS`] until it is dropped.
pub(crate) struct Ticker {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts the thread.
    pub(crate) fn start(engine: &Engine) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let engine = engine.weak();
        let thread = std::thread::Builder::new().name("sandbox-ticker".into()).spawn(move || tick(&engine, &stopped))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// Whether the thread lives. Without it no guest may start: nothing would stop it.
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic; and if it did, there is nobody left to tell.
            drop(thread.join());
        }
    }
}

fn tick(engine: &EngineWeak, stopped: &Receiver<()>) {
    while stopped.recv_timeout(Duration::from_millis(TICK_MS)) == Err(RecvTimeoutError::Timeout) {
        let Some(engine) = engine.upgrade() else { return };
        engine.increment_epoch();
    }
}
