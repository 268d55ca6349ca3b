//! The thread that moves wasmtime's epoch, so that running guests are looked at.
//!
//! Never a task of the runtime: a guest that spins would starve the very ticker that is to stop it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::{Engine, EngineWeak};

use crate::limits::TICK_MS;

/// Moves the epoch every [`TICK_MS`] until it is dropped.
pub(crate) struct Ticker {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    beats: Arc<AtomicU64>,
    /// Gone when the ticker is dropped.
    life: Arc<()>,
}

impl Ticker {
    /// Starts the thread.
    pub(crate) fn start(engine: &Engine) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let (engine, beats) = (engine.weak(), Arc::new(AtomicU64::new(0)));
        let counted = beats.clone();
        let work = move || tick(&engine, &stopped, &counted);
        let thread = std::thread::Builder::new().name("sandbox-ticker".into()).spawn(work)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), beats, life: Arc::new(()) })
    }

    /// Whether the thread lives. Without it no guest may start: nothing would stop it.
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Looks at the ticker every `period` and calls `on_dead` where it missed two looks in a row. One look is not enough: after the
    /// machine slept, both threads are due at once.
    pub(crate) fn watch(&self, period: Duration, on_dead: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let (beats, life) = (self.beats.clone(), Arc::downgrade(&self.life));
        let work = move || {
            let (mut seen, mut missed) = (beats.load(Relaxed), 0);
            while missed < 2 {
                std::thread::sleep(period);
                if life.strong_count() == 0 {
                    return;
                }
                let now = beats.load(Relaxed);
                missed = if now == seen { missed + 1 } else { 0 };
                seen = now;
            }
            on_dead();
        };
        std::thread::Builder::new().name("sandbox-watch".into()).spawn(work).map(drop)
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

fn tick(engine: &EngineWeak, stopped: &Receiver<()>, beats: &AtomicU64) {
    while stopped.recv_timeout(Duration::from_millis(TICK_MS)) == Err(RecvTimeoutError::Timeout) {
        let Some(engine) = engine.upgrade() else { return };
        engine.increment_epoch();
        beats.fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const PERIOD: Duration = Duration::from_millis(300);

    #[test]
    fn a_dead_ticker_is_noticed_and_a_live_one_is_not() {
        let engine = Engine::default();
        let (mut dead, live) = (Ticker::start(&engine).unwrap(), Ticker::start(&engine).unwrap());
        let (tell, told) = channel();
        for (name, ticker) in [("dead", &dead), ("live", &live)] {
            let tell = tell.clone();
            ticker.watch(PERIOD, move || tell.send(name).unwrap()).unwrap();
        }
        drop(dead.stop.take());
        assert_eq!(told.recv_timeout(20 * PERIOD).unwrap(), "dead");
        assert!(!dead.is_alive() && live.is_alive());
        assert!(told.recv_timeout(4 * PERIOD).is_err());
    }
}
