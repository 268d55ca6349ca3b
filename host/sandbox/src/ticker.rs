//! The thread that moves wasmtime's epoch, so that running guests are looked at.
//!
//! Never a task of the runtime: a guest that spins would starve the very ticker that is to stop it. Never wakes where no guest runs.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use wasmtime::{Engine, EngineWeak};

use crate::limits::TICK_MS;

/// Moves the epoch every [`TICK_MS`] while a guest runs, until it is dropped.
pub(crate) struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    now: Mutex<Now>,
    changed: Condvar,
}

#[derive(Default)]
struct Now {
    /// Guests that run.
    running: usize,
    beats: u64,
    /// Whether the ticker was dropped.
    is_over: bool,
}

impl Shared {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a guest to run, and then so long; none where the ticker was dropped meanwhile.
    fn wait(&self, period: Duration) -> Option<MutexGuard<'_, Now>> {
        let idle = |now: &mut Now| now.running == 0 && !now.is_over;
        let now = self.changed.wait_while(self.now(), idle).unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(now, period, |now| !now.is_over).unwrap_or_else(PoisonError::into_inner);
        Some(waited.0).filter(|now| !now.is_over)
    }
}

/// A guest that runs; it does no longer when this is dropped.
pub(crate) struct Running(Arc<Shared>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.now().running -= 1;
    }
}

impl Ticker {
    /// Starts the thread.
    pub(crate) fn start(engine: &Engine) -> std::io::Result<Self> {
        let (shared, engine) = (Arc::<Shared>::default(), engine.weak());
        let ticking = shared.clone();
        let work = move || tick(&engine, &ticking);
        let thread = std::thread::Builder::new().name("sandbox-ticker".into()).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// A guest is about to run.
    pub(crate) fn running(&self) -> Running {
        self.shared.now().running += 1;
        self.shared.changed.notify_all();
        Running(self.shared.clone())
    }

    /// Whether the thread lives. Without it no guest may start: nothing would stop it.
    pub(crate) fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Looks at the ticker every `period` while a guest runs and calls `on_dead` where it missed two looks in a row. One look is not enough: after
    /// the machine slept, both threads are due at once.
    pub(crate) fn watch(&self, period: Duration, on_dead: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let shared = self.shared.clone();
        let work = move || {
            let (mut seen, mut missed) = (None, 0);
            while missed < 2 {
                let Some(now) = shared.wait(period) else { return };
                // Where no guest runs any more nothing was missed.
                missed = if seen == Some(now.beats) && now.running > 0 { missed + 1 } else { 0 };
                seen = Some(now.beats);
            }
            on_dead();
        };
        std::thread::Builder::new().name("sandbox-watch".into()).spawn(work).map(drop)
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.now().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic; and if it did, there is nobody left to tell.
            drop(thread.join());
        }
    }
}

fn tick(engine: &EngineWeak, shared: &Shared) {
    while let Some(mut now) = shared.wait(Duration::from_millis(TICK_MS)) {
        let Some(engine) = engine.upgrade() else { return };
        engine.increment_epoch();
        now.beats += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const PERIOD: Duration = Duration::from_millis(300);

    #[test]
    fn a_dead_ticker_is_noticed_and_a_live_one_is_not() {
        let (engine, doomed) = (Engine::default(), Engine::default());
        let (dead, live) = (Ticker::start(&doomed).unwrap(), Ticker::start(&engine).unwrap());
        let (tell, told) = channel();
        for (name, ticker) in [("dead", &dead), ("live", &live)] {
            let tell = tell.clone();
            ticker.watch(PERIOD, move || tell.send(name).unwrap()).unwrap();
        }
        // Its thread ends at its next tick.
        drop(doomed);
        let _guests = [dead.running(), live.running()];
        assert_eq!(told.recv_timeout(20 * PERIOD).unwrap(), "dead");
        assert!(!dead.is_alive() && live.is_alive());
        assert!(told.recv_timeout(4 * PERIOD).is_err());
    }

    #[test]
    fn it_ticks_while_a_guest_runs_and_never_else_and_no_rest_is_taken_for_its_death() {
        let engine = Engine::default();
        let ticker = Ticker::start(&engine).unwrap();
        let (tell, told) = channel();
        ticker.watch(PERIOD, move || tell.send(()).unwrap()).unwrap();
        let beats = || ticker.shared.now().beats;
        std::thread::sleep(PERIOD);
        assert_eq!(beats(), 0);
        let guests = [ticker.running(), ticker.running()];
        std::thread::sleep(PERIOD);
        let [first, second] = guests;
        drop(first);
        let so_far = beats();
        assert!(so_far > 0, "it does not tick while guests run");
        std::thread::sleep(PERIOD);
        assert!(beats() > so_far, "it does not tick while one of them runs");
        drop(second);
        // One tick may be under way.
        std::thread::sleep(Duration::from_millis(10 * TICK_MS));
        let at_rest = beats();
        std::thread::sleep(4 * PERIOD);
        assert_eq!(beats(), at_rest);
        assert!(told.try_recv().is_err() && ticker.is_alive());
    }
}
