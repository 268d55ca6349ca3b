//! What one running job has: its limits, its services, its resources and what it used of them.
//!
//! Belongs to one store and so to one run; nothing in it is shared with another job.

use std::collections::BTreeMap;
use std::sync::Arc;

use wasmtime::component::{Resource, ResourceTable, ResourceTableError};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};

use crate::adapters::Adapters;
use crate::charge::Charges;
use crate::clock::Clock;
use crate::limits::Limits;
use crate::log::{Log, Stream};
use crate::memory::Memory;
use crate::meter::Meter;
use crate::random::Random;
use crate::run::JobSpec;
use crate::services::{Event, Level, Refusal, Services};
use crate::stdio::Stdio;
use crate::stopping::Stopping;
use crate::wit::Fault;

/// The data of a job's store.
pub(crate) struct State {
    pub(crate) limits: Limits,
    pub(crate) services: Box<dyn Services>,
    pub(crate) params: String,
    pub(crate) seed: u64,
    pub(crate) stop: Stopping,
    /// Whether the component was instantiated.
    pub(crate) is_started: bool,
    pub(crate) table: ResourceTable,
    pub(crate) adapters: Adapters,
    pub(crate) counts: Counts,
    pub(crate) memory: Memory,
    pub(crate) meter: Arc<Meter>,
    pub(crate) log: Log,
    pub(crate) clock: Clock,
    pub(crate) random: Random,
    wasi: WasiCtx,
}

/// What a job used of the limits that are counted here.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) metrics: u64,
    pub(crate) progress_reports: u64,
    /// Metrics and progress reports that were dropped.
    pub(crate) reports_dropped: u64,
    pub(crate) datasets: u64,
    pub(crate) batches: Charges,
    /// Bytes of weights of each saved name.
    pub(crate) artifacts: BTreeMap<String, u64>,
    pub(crate) evaluations: u64,
}

impl State {
    pub(crate) fn new(spec: JobSpec, services: Box<dyn Services>, meter: Arc<Meter>) -> Self {
        let limits = spec.limits;
        let log = Log::new(limits.log_bytes, limits.log_lines);
        let clock = Clock::default();
        let mut table = ResourceTable::new();
        table.set_max_capacity(usize::try_from(limits.handles).unwrap_or(usize::MAX));
        Self {
            wasi: wasi(&log, &clock),
            random: Random::new(spec.seed),
            adapters: Adapters::new(spec.job, spec.cohort),
            memory: Memory::new(limits),
            counts: Counts::default(),
            is_started: false,
            params: spec.params,
            seed: spec.seed,
            stop: Stopping::new(spec.stop, spec.stop_at),
            limits,
            services,
            table,
            meter,
            log,
            clock,
        }
    }

    /// One question whether the job is to stop. The first yes waits until it has been noted.
    pub(crate) async fn asks_to_stop(&mut self) -> Result<bool, Refusal> {
        let is_known = self.stop.seen_at().is_some();
        let is_to_stop = self.stop.ask();
        if let Some(question) = self.stop.seen_at().filter(|_| !is_known) {
            self.services.stopping(question).await?;
        }
        Ok(is_to_stop)
    }

    /// Tells an event, after the log lines that came before it.
    pub(crate) fn tell(&mut self, event: Event) {
        self.tell_log();
        self.services.event(event);
    }

    /// Tells the log lines that are not yet told.
    pub(crate) fn tell_log(&mut self) {
        for (level, message) in self.log.take() {
            self.services.event(Event::Log { level, message });
        }
    }

    /// Tells what is left at the job's end, and what was dropped.
    pub(crate) fn tell_end(&mut self) {
        self.log.finish();
        self.tell_log();
        let (_, bytes) = self.log.counts();
        let reports = self.counts.reports_dropped;
        for (limit, dropped) in [("log-bytes or log-lines", bytes), ("metrics or progress-reports", reports)] {
            if dropped > 0 {
                let message = format!("over the limit {limit}: {dropped} dropped");
                self.services.event(Event::Log { level: Level::Warn, message });
            }
        }
    }

    /// Gives the guest a resource, or the error that it holds too many.
    pub(crate) fn push<T: Send + 'static>(&mut self, value: T) -> Result<Resource<T>, Fault> {
        self.table.push(value).map_err(|error| match error {
            ResourceTableError::Full => Fault::quota("handles", self.limits.handles.saturating_add(1), self.limits.handles),
            other => Fault::Stop(other.into()),
        })
    }
}

impl WasiView for State {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

/// WASI that reaches nothing: no file, no network, no environment, no argument, no input. Monotonic clock and random sources are
/// replaced in the linker (see `sandbox`).
fn wasi(log: &Log, clock: &Clock) -> WasiCtx {
    WasiCtx::builder()
        .allow_tcp(false)
        .allow_udp(false)
        .allow_ip_name_lookup(false)
        .allow_blocking_current_thread(false)
        .stdout(Stdio { log: log.clone(), stream: Stream::Out })
        .stderr(Stdio { log: log.clone(), stream: Stream::Err })
        .wall_clock(clock.clone())
        .max_random_size(0)
        .build()
}
