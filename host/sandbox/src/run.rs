//! One run of a component, from start to end: one store, never used again.
//!
//! Leaves nothing behind on any engine, however it ends: by returning, by a trap, by a limit, or by being dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use nodus_protocol::JobSlot;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use wasmtime::{Engine, Store, UpdateDeadline};

use crate::component::ValidComponent;
use crate::failure::{Circumstances, Failure, Stop, shorten};
use crate::limits::Limits;
use crate::meter::{Meter, Metered};
use crate::sandbox::Sandbox;
use crate::services::Services;
use crate::state::State;
use crate::wit::Fault;

/// Asks a job to stop soon. Cheap to clone; all clones are one flag.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<Wish>);

#[derive(Debug, Default)]
struct Wish {
    is_requested: AtomicBool,
    told: Notify,
}

impl StopFlag {
    /// Makes the guest's `should-stop` answer yes from now on. To stop it at once, drop the run's future.
    pub fn request(&self) {
        self.0.is_requested.store(true, Relaxed);
        self.0.told.notify_waiters();
    }

    /// Resolves when it is requested.
    pub async fn requested(&self) {
        let mut told = std::pin::pin!(self.0.told.notified());
        // From here on a request is not missed.
        told.as_mut().enable();
        if !self.is_requested() {
            told.await;
        }
    }

    /// Whether it was requested.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.0.is_requested.load(Relaxed)
    }
}

/// What one run is given.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// The parameters, a JSON object; passed on as they are.
    pub params: String,
    /// The seed of everything random in the job.
    pub seed: u64,
    /// What the engines know the job by; free on every engine it uses.
    pub job: JobSlot,
    /// What it may use.
    pub limits: Limits,
    /// Asks it to stop.
    pub stop: StopFlag,
    /// Tells it to stop from this question on, the first being 1 (calls of `should-stop`, and one before each further piece of a long
    /// evaluation): how a run that was asked to stop is run again.
    pub stop_at: Option<u64>,
    /// Jobs that name the same cohort may share trunk activations.
    pub cohort: Option<u64>,
}

/// How a run ended, and what it used.
#[derive(Debug, Serialize, Deserialize)]
pub struct JobEnd {
    /// Success or not.
    pub outcome: Outcome,
    /// What it used.
    pub usage: Usage,
    /// The question (see [`JobSpec::stop_at`]) that was the first to be answered yes; none where none was, and no request could be seen.
    pub stopped_at: Option<u64>,
}

/// Success or not.
#[derive(Debug, Serialize, Deserialize)]
pub enum Outcome {
    /// `run` returned without an error.
    Completed,
    /// Anything else.
    Failed(Failure),
}

/// What a run used.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    /// From start to end.
    pub wall_time: Duration,
    /// CPU time of the guest, and of the host within its calls.
    pub cpu_time: Duration,
    /// Its memories at their largest.
    pub guest_memory_bytes: u64,
    /// Log that was kept.
    pub log_bytes: u64,
    /// Log that was dropped.
    pub log_bytes_dropped: u64,
    /// Metrics and progress reports that were dropped.
    pub reports_dropped: u64,
    /// Weights of all saved adapters, the latest of each name.
    pub artifact_bytes: u64,
}

impl ValidComponent {
    /// Runs the component to its end. Give it a task of its own, on a runtime with time enabled; a panic of the host's own code
    /// ends that task and nothing else. Dropping the future stops the guest at once and has the engines give up what they hold.
    pub async fn run(&self, sandbox: &Sandbox, spec: JobSpec, services: Box<dyn Services>) -> JobEnd {
        if let Err(failure) = check_start(self, sandbox, &spec) {
            return JobEnd { outcome: Outcome::Failed(failure), usage: Usage::default(), stopped_at: None };
        }
        let _running = sandbox.running();
        let start = Instant::now();
        let limits = spec.limits;
        let meter = Arc::new(Meter::default());
        let mut store = Store::new(&sandbox.engine, State::new(spec, services, meter.clone()));
        restrict(&mut store, limits);
        let work = Metered::new(work(self, &mut store), meter.clone());
        let result = tokio::time::timeout(Duration::from_millis(limits.wall_ms), work).await;
        let mut state = store.into_data();
        state.tell_end();
        let outcome = match result {
            Ok(Ok(Ok(()))) => Outcome::Completed,
            Ok(Ok(Err(text))) if state.stop.seen_at().is_some() => Outcome::Failed(Failure::Cancelled(shorten(&text))),
            Ok(Ok(Err(text))) => Outcome::Failed(Failure::Returned(shorten(&text))),
            Ok(Err(error)) => {
                let (memory_refused, panic) = (state.memory.refused(), state.log.panic());
                let known = Circumstances { limits: &limits, is_started: state.is_started, memory_refused, panic };
                Outcome::Failed(Failure::classify(&error, known))
            }
            Err(_) => Outcome::Failed(Failure::WallTime { allowed: limits.wall_ms }),
        };
        let usage = usage(&state, start, meter.used());
        state.adapters.drop_job().await;
        JobEnd { outcome, usage, stopped_at: state.stop.seen_at() }
    }
}

fn check_start(component: &ValidComponent, sandbox: &Sandbox, spec: &JobSpec) -> Result<(), Failure> {
    let (needed, allowed) = (spec.params.len() as u64, spec.limits.parameter_bytes);
    if needed > allowed {
        return Err(Failure::ParameterBytes { needed, allowed });
    }
    if !Engine::same(component.pre().engine(), &sandbox.engine) {
        return Err(Failure::Internal(anyhow::anyhow!("the component was validated by another sandbox")));
    }
    if !sandbox.is_guarded() {
        return Err(Failure::Internal(anyhow::anyhow!("the ticker thread is dead: nothing would stop a guest that spins")));
    }
    Ok(())
}

/// Sets every limit that wasmtime keeps.
fn restrict(store: &mut Store<State>, limits: Limits) {
    let size = |limit: u64| usize::try_from(limit).unwrap_or(usize::MAX);
    store.limiter(|state| &mut state.memory);
    store.set_hostcall_fuel(size(limits.host_call_bytes));
    // The resource table is the limit proper, since it can answer an error; this one also counts what the guest merely borrows.
    store.set_max_component_handles(size(limits.handles.saturating_mul(2)));
    store.set_epoch_deadline(1);
    store.epoch_deadline_callback(move |mut context| {
        let state = context.data_mut();
        state.tell_log();
        state.meter.check(&limits)?;
        // Not `Yield`: it would wake the same task again before any other.
        Ok(UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now())))
    });
}

/// The guest's whole run, and after it the calls that the guest did not wait for.
async fn work(component: &ValidComponent, store: &mut Store<State>) -> wasmtime::Result<Result<(), String>> {
    let result = async {
        let job = component.pre().instantiate_async(&mut *store).await?;
        store.data_mut().is_started = true;
        job.call_run(&mut *store).await
    }
    .await;
    let is_cut_off = result.as_ref().is_err_and(|error| matches!(error.downcast_ref(), Some(Stop::CpuTime { .. })));
    if !is_cut_off {
        store.data_mut().settle_all().await.map_err(Fault::into_stop)?;
    }
    result
}

fn usage(state: &State, start: Instant, cpu_time: Duration) -> Usage {
    let (log_bytes, log_bytes_dropped) = state.log.counts();
    Usage {
        wall_time: start.elapsed(),
        cpu_time,
        guest_memory_bytes: state.memory.bytes(),
        log_bytes,
        log_bytes_dropped,
        reports_dropped: state.counts.reports_dropped,
        artifact_bytes: state.counts.artifacts.values().sum(),
    }
}
