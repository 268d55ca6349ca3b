//! The thread that owns the device: drains commands, forms a pass, runs it, answers.
//!
//! Never answers a command twice, and never leaves one unanswered, even when it fails.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nodus_kernels::Device;
use nodus_protocol::{AdapterSlot, Client, Command, EngineError, ErrorKind, Inbox, JobSlot, Request, TrunkSlot, channel};
use tokio::sync::mpsc::error::TryRecvError;

use crate::counters::{Counters, Counts};
use crate::engine::{Engine, chosen};
use crate::form::{Decision, Item};
use crate::jobs::JobBytes;

/// The engine's thread, seen from outside.
#[derive(Debug)]
pub struct EngineHandle {
    thread: JoinHandle<Result<(), EngineError>>,
    counters: Arc<Counters>,
    epoch: Instant,
    /// Of each trunk.
    classes: Vec<Vec<(String, String)>>,
}

impl EngineHandle {
    /// Waits until all clients are gone and every command is answered.
    ///
    /// # Errors
    /// `DeviceLost` or `Internal` where the engine failed on the way.
    pub fn join(self) -> Result<(), EngineError> {
        self.thread.join().unwrap_or_else(|_| Err(failed()))
    }

    /// [`EngineHandle::join`], and what was done by then: the last counts, and each job's last figures.
    pub fn finish(self) -> (Result<(), EngineError>, Counts, BTreeMap<JobSlot, JobBytes>) {
        let counters = self.counters.clone();
        let end = self.join();
        let jobs = counters.jobs().0.clone();
        (end, counters.read(), jobs)
    }

    /// What makes the bits of results on a trunk; see [`Engine::class`].
    #[must_use]
    pub fn class(&self, trunk: TrunkSlot) -> &[(String, String)] {
        self.classes.get(trunk.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// What it has done so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counters.read()
    }

    /// Takes a job's last figures, once it has been dropped: what it held of the device's memory, and its time in passes, in nanoseconds.
    #[must_use]
    pub fn take(&self, job: JobSlot) -> (JobBytes, u64) {
        let bytes = self.counters.jobs().0.remove(&job).unwrap_or_default();
        (bytes, self.counters.device_ns().remove(&job).unwrap_or(0))
    }

    /// Time in passes of each job so far, in nanoseconds, a pass's by its part of the rows.
    #[must_use]
    pub fn device_ns(&self) -> BTreeMap<JobSlot, u64> {
        self.counters.device_ns().clone()
    }

    /// How long the thread has been at what it does now; zero while it waits.
    #[must_use]
    pub fn busy(&self) -> Duration {
        match self.counters.busy_since_ms.load(Relaxed) {
            0 => Duration::ZERO,
            since => self.epoch.elapsed().saturating_sub(Duration::from_millis(since - 1)),
        }
    }

    /// What each job holds of the device's memory; also of jobs that ended and whose figures nobody took.
    #[must_use]
    pub fn jobs(&self) -> BTreeMap<JobSlot, JobBytes> {
        self.counters.jobs().0.clone()
    }
}

impl<D: Device> Engine<D> {
    /// Moves the engine to a thread of its own. `capacity` commands may wait before clients must. The thread ends when all clients are gone.
    ///
    /// # Errors
    /// When the operating system has no thread.
    pub fn spawn(self, capacity: usize) -> std::io::Result<(Client, EngineHandle)> {
        let (client, mut inbox) = channel(capacity);
        let counters = self.counters.clone();
        let classes = (0..self.trunks.len()).map(|trunk| self.class(TrunkSlot(trunk as u32))).collect();
        let timer = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let epoch = Instant::now();
        let body = move || {
            let mut desk = Desk { waiting: Vec::new(), open: true, epoch, pass_end_us: 0 };
            let mut engine = self;
            engine.clock = Box::new(move || u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX));
            let served = catch_unwind(AssertUnwindSafe(|| serve(&mut engine, &mut inbox, &mut desk, &timer)));
            if served.is_err() {
                tracing::error!("the engine's thread panicked; everything is refused from here on");
                refuse_all(&mut inbox, desk.waiting);
                return Err(failed());
            }
            engine.lost.map_or(Ok(()), Err)
        };
        let thread = std::thread::Builder::new().name("nodus-engine".into()).spawn(body)?;
        Ok((client, EngineHandle { thread, counters, epoch, classes }))
    }
}

/// Commands that wait, and the clock.
struct Desk {
    waiting: Vec<Request>,
    open: bool,
    epoch: Instant,
    pass_end_us: u64,
}

impl Desk {
    fn us(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_micros()).unwrap_or(u64::MAX)
    }

    fn drain(&mut self, inbox: &mut Inbox) {
        loop {
            match inbox.try_recv() {
                Ok(request) => self.accept(request),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.open = false;
                    return;
                }
            }
        }
    }

    /// A dropped job's commands that still wait are dropped with it.
    fn accept(&mut self, request: Request) {
        if let Command::DropJob { job } = request.command {
            self.waiting.retain(|waiting| slot_of(&waiting.command).is_none_or(|slot| slot.job != job));
        }
        self.waiting.push(request);
    }

    /// Takes one more request, waiting for it until a time or for ever.
    fn receive(&mut self, inbox: &mut Inbox, timer: &tokio::runtime::Runtime, until_us: Option<u64>) {
        let received = match until_us {
            None => inbox.blocking_recv(),
            Some(until_us) => {
                let left = Duration::from_micros(until_us.saturating_sub(self.us(Instant::now())));
                match timer.block_on(async { tokio::time::timeout(left, inbox.recv()).await }) {
                    Ok(received) => received,
                    Err(_) => return,
                }
            }
        };
        match received {
            Some(request) => self.accept(request),
            None => self.open = false,
        }
    }
}

fn serve<D: Device>(engine: &mut Engine<D>, inbox: &mut Inbox, desk: &mut Desk, timer: &tokio::runtime::Runtime) {
    loop {
        desk.drain(inbox);
        let start_ns = (engine.clock)();
        let items: Vec<Item> = desk.waiting.iter().map(|request| engine.item(&request.command, desk.us(request.sent))).collect();
        // With all clients gone there is nobody to wait for.
        let now_us = if desk.open { desk.us(Instant::now()) } else { u64::MAX };
        let decision = engine.decide(&items, now_us, desk.pass_end_us);
        engine.counters.forming_ns.fetch_add((engine.clock)().saturating_sub(start_ns), Relaxed);
        match &decision {
            Decision::Idle if !desk.open => return,
            Decision::Idle => desk.receive(inbox, timer, None),
            Decision::Wait { until_us } => desk.receive(inbox, timer, Some(*until_us)),
            Decision::Alone(_) | Decision::Pass(..) => {
                answer(engine, desk, &decision);
                if matches!(decision, Decision::Pass(..)) {
                    desk.pass_end_us = desk.us(Instant::now());
                }
            }
        }
    }
}

fn answer<D: Device>(engine: &mut Engine<D>, desk: &mut Desk, decision: &Decision) {
    let places = chosen(decision);
    let commands: Vec<&Command> = places.iter().filter_map(|place| desk.waiting.get(*place)).map(|request| &request.command).collect();
    engine.counters.busy_since_ms.store(desk.us(Instant::now()) / 1000 + 1, Relaxed);
    let replies = engine.carry_out(decision, &commands);
    engine.counters.busy_since_ms.store(0, Relaxed);
    let mut replies: Vec<_> = places.iter().zip(replies).collect();
    // From the back, so that places in front stay what they are.
    replies.sort_by_key(|(place, _)| std::cmp::Reverse(**place));
    for (place, reply) in replies {
        desk.waiting.remove(*place).answer(reply);
    }
}

/// After a defect: everything is refused until all clients are gone.
fn refuse_all(inbox: &mut Inbox, waiting: Vec<Request>) {
    for request in waiting {
        request.answer(Err(failed()));
    }
    while let Some(request) = inbox.blocking_recv() {
        request.answer(Err(failed()));
    }
}

fn failed() -> EngineError {
    EngineError::new(ErrorKind::DeviceLost, "the engine failed: internal error")
}

fn slot_of(command: &Command) -> Option<AdapterSlot> {
    match command {
        Command::Reserve { .. }
        | Command::Prioritise { .. }
        | Command::Snapshot { .. }
        | Command::Restore { .. }
        | Command::Bound { .. }
        | Command::DropJob { .. } => None,
        Command::CreateAdapter { slot, .. }
        | Command::LoadAdapter { slot, .. }
        | Command::ForwardBackward { slot, .. }
        | Command::OptimStep { slot, .. }
        | Command::TrainStep { slot, .. }
        | Command::Evaluate { slot, .. }
        | Command::Export { slot }
        | Command::DropAdapter { slot } => Some(*slot),
    }
}

#[cfg(test)]
mod tests {
    use nodus_kernels::cpu::CpuDevice;

    use super::*;
    use crate::Options;

    #[test]
    fn a_job_is_urgent_from_when_it_is_said_until_it_is_dropped() {
        let mut engine = Engine::new(CpuDevice::new(1).unwrap(), Options::default());
        let job = JobSlot(3);
        let mut tell = |command: &Command| {
            engine.carry_out(&Decision::Alone(vec![0]), &[command]).pop().unwrap().unwrap();
            let of = |job| engine.item(&Command::Export { slot: AdapterSlot { job, index: 0 } }, 0).is_urgent;
            (of(job), of(JobSlot(4)))
        };
        assert_eq!(tell(&Command::Prioritise { job }), (true, false));
        assert_eq!(tell(&Command::DropJob { job }), (false, false));
    }
}
