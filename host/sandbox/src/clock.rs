//! The guest's clocks: time moves by a fixed step per reading, and a wait is over at once.
//!
//! Knows no real time, so that a job's results are a function of what it was given.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use wasmtime::component::{Resource, ResourceTable};
use wasmtime_wasi::HostWallClock;
use wasmtime_wasi::p2::bindings::clocks::monotonic_clock;
use wasmtime_wasi::p2::{DynPollable, Pollable, subscribe};

use crate::state::State;

/// How far one reading moves the clock.
const STEP: Duration = Duration::from_millis(1);
/// What the wall clock shows at a job's start, since 1970: 1 January 2025, UTC.
const START: Duration = Duration::from_secs(1_735_689_600);

/// A job's time since its start, in nanoseconds; one for both clocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Arc<AtomicU64>);

impl Clock {
    fn read(&self) -> u64 {
        let step = STEP.as_nanos() as u64;
        self.0.fetch_add(step, Relaxed).saturating_add(step)
    }

    fn advance_to(&self, instant: u64) {
        // Half the range is 292 years; beyond it a reading could overflow.
        self.0.fetch_max(instant.min(u64::MAX / 2), Relaxed);
    }
}

impl HostWallClock for Clock {
    fn resolution(&self) -> Duration {
        STEP
    }

    fn now(&self) -> Duration {
        START + Duration::from_nanos(self.read())
    }
}

impl monotonic_clock::Host for State {
    fn now(&mut self) -> wasmtime::Result<u64> {
        Ok(self.clock.read())
    }

    fn resolution(&mut self) -> wasmtime::Result<u64> {
        Ok(STEP.as_nanos() as u64)
    }

    fn subscribe_instant(&mut self, when: u64) -> wasmtime::Result<Resource<DynPollable>> {
        timer(&mut self.table, Timer { clock: self.clock.clone(), when })
    }

    fn subscribe_duration(&mut self, when: u64) -> wasmtime::Result<Resource<DynPollable>> {
        let when = self.clock.0.load(Relaxed).saturating_add(when);
        timer(&mut self.table, Timer { clock: self.clock.clone(), when })
    }
}

fn timer(table: &mut ResourceTable, timer: Timer) -> wasmtime::Result<Resource<DynPollable>> {
    let timer = table.push(timer)?;
    subscribe(table, timer)
}

/// A timer that is due whenever it is asked; asking moves the clock to it.
struct Timer {
    clock: Clock,
    when: u64,
}

#[async_trait::async_trait]
impl Pollable for Timer {
    async fn ready(&mut self) {
        self.clock.advance_to(self.when);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_clocks_are_one_and_never_go_back() {
        let clock = Clock::default();
        assert_eq!(clock.read(), 1_000_000);
        assert_eq!(clock.now(), START + Duration::from_millis(2));
        clock.advance_to(50_000_000);
        clock.advance_to(10_000_000);
        assert_eq!(clock.read(), 51_000_000);
        clock.advance_to(u64::MAX);
        assert!(clock.now() > START);
    }
}
