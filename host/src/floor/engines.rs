//! The floor's engine processes, from their start to their end.
//!
//! Never gives a job an engine that is not ready.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nodus_protocol::Digest;
use nodus_schedule::{EngineId, Job, Lane, NewEngine};
use tokio::sync::watch;

use super::Shared;
use super::board::{Backoff, Kind};
use super::cellar::reserve_bytes;
use super::homes::Homes;
use super::options::Place;
use super::rooms::{self, Bound, Need};
use crate::cli::{DeviceArgs, DeviceChoice};
use crate::engine::{MpsTerms, Process, Setup};
use crate::journal::identity;
use crate::run::inputs::OpenModel;
use crate::run::neighbours::Neighbours;

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
    pub(super) need: Need,
    /// What its buffers may have.
    pub(super) bound: Bound,
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
    let (need, bound) = (need(shared, numbers, first, &model), Bound::default());
    let engine = Engine { numbers, need, bound: bound.clone(), stage, is_stopping: false, idle_since, neighbours, homes };
    let id = {
        let mut board = shared.board();
        let id = board.next_engine();
        board.engines.insert(id, engine);
        id
    };
    tokio::spawn(live(shared.clone(), id, (numbers, need, bound), model, teller));
    id
}

/// The life of an engine.
async fn live(
    shared: Arc<Shared>,
    id: EngineId,
    (numbers, need, bound): (NewEngine, Need, Bound),
    model: Arc<OpenModel>,
    teller: watch::Sender<Stage>,
) {
    let mut ready = None;
    let how = match begin(&shared, numbers, (need, &bound), &model).await {
        Ok((process, class)) => {
            let process = Arc::new(process);
            shared.board().classes.insert((numbers.device, numbers.trunk), class);
            tracing::info!(engine = id.0, model = %model.name, device = process.device(), lane = ?numbers.lane, "an engine is ready");
            let publish = || drop(teller.send_replace(Stage::Ready(process.clone())));
            rooms::enter(&shared, numbers.device, (&process, &bound), publish).await;
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
    leave(&shared, id, (numbers, &need), ready, &how);
    teller.send_replace(Stage::Gone(how));
    shared.wake.notify_one();
    // The others may have what it had.
    rooms::settle(&shared, numbers.device).await;
}

/// Strikes an engine off, and has the next of its kind wait where its end was not meant.
fn leave(shared: &Shared, id: EngineId, (numbers, need): (NewEngine, &Need), ready: Option<Instant>, how: &str) {
    let mut board = shared.board();
    if board.engines.remove(&id).is_some_and(|engine| engine.is_stopping) {
        tracing::info!(engine = id.0, "an engine was stopped");
        return;
    }
    if ready.is_some() {
        tracing::error!(engine = id.0, "an engine process {how}");
    }
    // One that worked for a while before it died is no continuation of those before it.
    let is_steady = ready.is_some_and(|since| since.elapsed() >= STEADY);
    let kind = Kind::of(numbers, need.first.id);
    let before = board.engines_later.get(&kind).filter(|_| !is_steady);
    let later = Backoff::after(before, shared.options.backoff, how.to_owned());
    board.engines_later.insert(kind, later);
}

/// What it needs of its device.
fn need(shared: &Shared, numbers: NewEngine, first: Job, model: &OpenModel) -> Need {
    let (options, cellar) = (&shared.options.device, &shared.cellar);
    let device = place(shared, numbers).map_or(DeviceChoice::Cpu, |place| place.device);
    let weight_bytes = cellar.weight_bytes(model, options, device);
    let fixed_bytes = weight_bytes.saturating_add(reserve_bytes(device));
    Need { weight_bytes, fixed_bytes, own_bytes: cellar.engine_bytes(model, options, device).saturating_sub(fixed_bytes), first }
}

/// Starts its process, and says what decides the bits of its results.
async fn begin(shared: &Shared, numbers: NewEngine, (need, bound): (Need, &Bound), model: &OpenModel) -> anyhow::Result<(Process, Digest)> {
    let place = place(shared, numbers)?;
    // Its neighbours have given back what it is to have.
    rooms::settle(shared, numbers.device).await;
    let buffer_bytes_max = bound.load(Relaxed);
    let mps = match (numbers.lane, place.device, &place.card) {
        (Lane::Mps, DeviceChoice::Cuda(ordinal), Some(card)) => {
            // What it is planned to need is refused by the engine's own numbers, never by the driver.
            let memory_bytes = need.fixed_bytes.saturating_add(buffer_bytes_max);
            let daemon = shared.daemons.of(ordinal, card).await?;
            Some(MpsTerms { weights: daemon.weights(model.digest), daemon, memory_bytes })
        }
        // A processor has no daemon: the lane is an engine of the job's own.
        _ => None,
    };
    let setup = Setup {
        model: model.name.clone(),
        device: DeviceArgs { device: Some(place.device), ..shared.options.device },
        card: place.card.clone(),
        buffer_bytes_max,
        environment: shared.options.environment.clone(),
        mps,
        watch: shared.options.watch,
    };
    let process = Process::start(&shared.store.dir()?, &setup).await?;
    let class = identity(process.class())?;
    Ok((process, class))
}

fn place(shared: &Shared, numbers: NewEngine) -> anyhow::Result<&Place> {
    let place = shared.options.places.get(numbers.device.0 as usize);
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
