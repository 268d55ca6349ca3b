//! The floor's engine processes, from their start to their end.
//!
//! Never gives a job an engine that is not ready.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nodus_protocol::Digest;
use nodus_schedule::{EngineId, Job, Lane, NewEngine};
use tokio::sync::watch;

use super::Shared;
use super::attempt::identity;
use super::board::{Backoff, Kind};
use super::homes::Homes;
use super::options::Place;
use crate::cli::{DeviceArgs, DeviceChoice};
use crate::engine::{MpsTerms, Process, Setup};
use crate::run::inputs::OpenModel;
use crate::run::neighbours::Neighbours;

/// What the driver and the libraries take of a card for one client of the MPS daemon, beside what is planned.
const CLIENT_RESERVE_BYTES: u64 = 2 << 30;

/// How long an engine must have worked for its death to count as the first.
const STEADY: Duration = Duration::from_secs(120);

/// How far an engine is.
#[derive(Clone)]
pub(super) enum Stage {
    Starting,
    Ready(Arc<Process>),
    /// How it ended, or why it did not start.
    Gone(String),
}

/// An engine of the floor.
#[derive(Clone)]
pub(super) struct Engine {
    pub(super) numbers: NewEngine,
    pub(super) stage: watch::Receiver<Stage>,
    pub(super) is_stopping: bool,
    /// Since when no job has been in it.
    pub(super) idle_since: Option<Instant>,
    pub(super) neighbours: Arc<Neighbours>,
    pub(super) homes: Arc<Homes>,
}

impl Engine {
    /// Waits until it takes jobs.
    ///
    /// # Errors
    /// Why it never will.
    pub(super) async fn ready(&self) -> Result<Arc<Process>, String> {
        let mut stage = self.stage.clone();
        match stage.wait_for(|stage| !matches!(stage, Stage::Starting)).await.as_deref() {
            Ok(Stage::Ready(process)) => Ok(process.clone()),
            Ok(Stage::Gone(why)) => Err(why.clone()),
            Ok(Stage::Starting) | Err(_) => Err("was given up".to_owned()),
        }
    }

    /// Its process, where it takes jobs.
    pub(super) fn process(&self) -> Option<Arc<Process>> {
        match &*self.stage.borrow() {
            Stage::Ready(process) => Some(process.clone()),
            _ => None,
        }
    }

    pub(super) fn idle(&self) -> Duration {
        self.idle_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Ends it, and the guests in it, and waits until they are gone.
    pub(super) async fn end(&self) {
        self.homes.end().await;
        if let Ok(process) = self.ready().await {
            process.end().await;
        }
    }
}

/// Starts an engine with a model for this job first, and enters it; it takes jobs when it is ready.
pub(super) fn start(shared: &Arc<Shared>, (numbers, first): (NewEngine, Job), model: Arc<OpenModel>) -> EngineId {
    let (teller, stage) = watch::channel(Stage::Starting);
    let homes = Arc::new(Homes::new(shared.settings, shared.options.guest_threads, shared.options.terms));
    let (neighbours, idle_since) = (Arc::default(), Some(Instant::now()));
    let engine = Engine { numbers, stage, is_stopping: false, idle_since, neighbours, homes };
    let id = {
        let mut board = shared.board();
        let id = board.next_engine();
        board.engines.insert(id, engine);
        id
    };
    tokio::spawn(live(shared.clone(), id, (numbers, first), model, teller));
    id
}

/// The life of an engine.
async fn live(shared: Arc<Shared>, id: EngineId, (numbers, first): (NewEngine, Job), model: Arc<OpenModel>, teller: watch::Sender<Stage>) {
    let mut ready = None;
    let how = match begin(&shared, numbers, first, &model).await {
        Ok((process, class)) => {
            let process = Arc::new(process);
            shared.board().classes.insert((numbers.device, numbers.trunk), class);
            tracing::info!(engine = id.0, model = %model.name, device = process.device(), lane = ?numbers.lane, "an engine is ready");
            teller.send_replace(Stage::Ready(process.clone()));
            shared.wake.notify_one();
            ready = Some(Instant::now());
            process.ended().await
        }
        Err(error) => {
            let why = format!("{error:#}");
            tracing::error!(engine = id.0, model = %model.name, "an engine did not start: {why}");
            why
        }
    };
    let mut board = shared.board();
    let is_meant = board.engines.remove(&id).is_some_and(|engine| engine.is_stopping);
    if is_meant {
        tracing::info!(engine = id.0, "an engine was stopped");
    } else {
        if ready.is_some() {
            tracing::error!(engine = id.0, model = %model.name, "an engine process {how}");
        }
        // One that worked for a while before it died is no continuation of those before it.
        let is_steady = ready.is_some_and(|since| since.elapsed() >= STEADY);
        let kind = Kind::of(numbers, first.id);
        let before = board.engines_later.get(&kind).filter(|_| !is_steady);
        let later = Backoff::after(before, shared.options.backoff, how.clone());
        board.engines_later.insert(kind, later);
    }
    drop(board);
    teller.send_replace(Stage::Gone(how));
    shared.wake.notify_one();
}

/// Starts its process, and says what decides the bits of its results.
async fn begin(shared: &Shared, numbers: NewEngine, first: Job, model: &OpenModel) -> anyhow::Result<(Process, Digest)> {
    let job_bytes = first.adapter_bytes.saturating_add(first.activation_bytes);
    let place = place(shared, numbers)?;
    let (options, cellar) = (&shared.options.device, &shared.cellar);
    let weights = cellar.weight_bytes(model, options, place.device);
    let mps = match (numbers.lane, place.device) {
        (Lane::Mps, DeviceChoice::Cuda(ordinal)) => {
            let planned = cellar.engine_bytes(model, options, place.device).saturating_add(job_bytes);
            let daemon = shared.daemons.of(ordinal).await?;
            Some(MpsTerms {
                weights: daemon.weights(model.digest),
                daemon,
                ordinal,
                memory_bytes: planned.saturating_add(CLIENT_RESERVE_BYTES),
            })
        }
        // A processor has no daemon: the lane is an engine of the job's own.
        _ => None,
    };
    let most = place.memory_bytes.saturating_sub(weights);
    let setup = Setup {
        model: model.name.clone(),
        device: DeviceArgs { device: Some(place.device), ..shared.options.device },
        // Within its limit: what it is planned to need is refused by the engine's own numbers, never by the driver.
        buffer_bytes_max: mps.as_ref().map_or(most, |mps| most.min(mps.memory_bytes.saturating_sub(weights + CLIENT_RESERVE_BYTES))),
        environment: shared.options.environment.clone(),
        mps,
        watch: shared.options.watch,
    };
    let process = Process::start(&shared.store.dir()?, &setup).await?;
    let class = identity(&process)?;
    Ok((process, class))
}

fn place(shared: &Shared, numbers: NewEngine) -> anyhow::Result<Place> {
    let place = shared.options.places.get(numbers.device.0 as usize).copied();
    place.context("the schedule named a device that there is not")
}

/// As receipts write it.
pub(super) fn lane_name(lane: Lane) -> &'static str {
    match lane {
        Lane::Fused => "fused",
        Lane::Mps => "mps",
        Lane::Solo => "solo",
    }
}
