//! The queue and the floor as the schedule sees them: numbers.
//!
//! Changes nothing but what is counted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nodus_protocol::Digest;
use nodus_schedule::{self as schedule, Bar, Device, DeviceId, Engine, Foreign, Job, Kept, Scene, State as Progress, Tenant, Trunk};
use nodus_state::{CohortId, JobId, Priority, Queued, TenantId};

use super::Shared;
use super::board::{Backoff, Board, Kind};
use crate::cli::DeviceChoice;
use crate::error::exit_code;
use crate::run::inputs::OpenModel;

/// What was seen.
pub(super) struct View {
    pub(super) scene: Scene,
    /// The waiting jobs of the scene.
    pub(super) waiting: BTreeMap<schedule::JobId, Waiting>,
    /// Jobs that are not in the scene, and why they wait.
    pub(super) aside: Vec<(JobId, String)>,
    /// Jobs that can never run, and why.
    pub(super) hopeless: Vec<(JobId, String)>,
}

/// A waiting job.
#[derive(Clone)]
pub(super) struct Waiting {
    pub(super) job: JobId,
    pub(super) tenant: TenantId,
    pub(super) cohort: CohortId,
    pub(super) numbers: Job,
    /// Whether it is to run alone because it is suspected.
    pub(super) is_tried: bool,
    pub(super) model: Arc<OpenModel>,
}

/// A tenant's number.
pub(super) fn tenant_of(tenant: TenantId) -> schedule::TenantId {
    schedule::TenantId(tenant.number())
}

/// Looks. Blocks: the state is read, and models that were not looked at before.
pub(super) fn look(shared: &Shared) -> anyhow::Result<View> {
    // As it is before the queue is read: whoever of them is not in it then has ended.
    let unserved = shared.board().unserved.clone();
    let queued = shared.state.queued().context("reading the queue")?;
    let tenants = shared.state.tenants().context("reading the tenants")?;
    let models = models(shared, &queued);
    let began = began(shared, &queued);
    let mut board = shared.board();
    count(&mut board);
    board.wait(Duration::from_millis(shared.options.rules.patience_ms));
    for (job, stint) in unserved {
        board.unserved.remove(&job);
        if queued.iter().any(|queued| queued.job == job) {
            board.give_back(job, stint);
        }
    }
    let engines = board.engines.iter().filter_map(|(id, engine)| Some((*id, engine.process()?.vitals().counts)));
    shared.numbers.engines(engines);
    let known: BTreeSet<JobId> = queued.iter().map(|job| job.job).chain(board.running.keys().copied()).collect();
    board.jobs_later.retain(|job, _| known.contains(job));
    board.suspects.retain(|job| known.contains(job));
    shared.state.keep_excuses(|job| known.contains(&job));
    let numbers: BTreeSet<schedule::JobId> = known.iter().map(|job| schedule::JobId(job.as_u128())).collect();
    board.forsake(|job| numbers.contains(&job));
    board.engines_later.retain(|kind, _| kind.job.is_none_or(|job| numbers.contains(&job)));
    board.began.retain(|job, _| known.contains(job));
    board.began.extend(began);
    let mut view = View { scene: still(shared, &board), waiting: BTreeMap::new(), aside: Vec::new(), hopeless: Vec::new() };
    let mut lengths: BTreeMap<TenantId, usize> = BTreeMap::new();
    for ((order, job), model) in (0..).zip(&queued).zip(&models) {
        if board.is_closing || board.running.contains_key(&job.job) {
            continue;
        }
        match model {
            Err(error) if exit_code(error) == 2 => view.hopeless.push((job.job, error.to_string())),
            Err(error) => view.aside.push((job.job, aside(job, error))),
            Ok(model) => enter(shared, &mut board, &mut view, (order, job, model), &mut lengths),
        }
    }
    view.scene.foreign = foreign(&board, view.waiting.values());
    let present: BTreeSet<schedule::TenantId> = view.scene.jobs.iter().map(|job| job.tenant).collect();
    board.shares.present(&present);
    view.scene.trunks = trunks(shared, &mut board, models.iter().flatten());
    let running_ms =
        |of: TenantId| board.running.values().filter(|run| run.tenant == of).map(|run| run.counted_ns).sum::<u64>() / 1_000_000;
    let tenant = |tenant: &nodus_state::Tenant| {
        let (id, most) = (tenant_of(tenant.id), |bound: Option<u64>| bound.unwrap_or(u64::MAX));
        let nodus_state::Quota { running_jobs, device_bytes, device_ms, .. } = tenant.quota;
        let quota = schedule::Quota { running_jobs: most(running_jobs), device_ms: most(device_ms), device_bytes: most(device_bytes) };
        let (virtual_ns, waited_ms) = (board.shares.of(id), board.waits.of(id));
        Tenant { id, virtual_ns, device_ms: tenant.device_ms + running_ms(tenant.id), waited_ms, quota }
    };
    view.scene.tenants = tenants.iter().map(tenant).collect();
    Ok(view)
}

/// Where jobs began that were run before, of those that it is not known of. Read from their journals.
fn began(shared: &Shared, queued: &[Queued]) -> Vec<(JobId, Digest)> {
    let known: BTreeSet<JobId> = shared.board().began.keys().copied().collect();
    let unknown = queued.iter().filter(|job| job.attempts > 0 && !known.contains(&job.job));
    unknown.filter_map(|job| Some((job.job, shared.shelf.identity(&job.job.to_string())?))).collect()
}

/// Devices on which jobs that began elsewhere cannot go on.
fn foreign<'a>(board: &Board, waiting: impl Iterator<Item = &'a Waiting>) -> Vec<Foreign> {
    let of = |waiting: &Waiting| {
        let Some(began) = board.began.get(&waiting.job) else { return Vec::new() };
        let others = board.classes.iter().filter(|((_, trunk), class)| *trunk == waiting.numbers.trunk && *class != began);
        others.map(|((device, _), _)| Foreign { job: waiting.numbers.id, device: *device }).collect()
    };
    waiting.flat_map(of).collect()
}

/// The model of each waiting job.
fn models(shared: &Shared, queued: &[Queued]) -> Vec<anyhow::Result<Arc<OpenModel>>> {
    queued.iter().map(|job| shared.cellar.model(&job.model)).collect()
}

/// An error of ours that may pass; the owner is not told more.
fn aside(job: &Queued, error: &anyhow::Error) -> String {
    tracing::error!(job = %job.job, "a job's model cannot be opened: {error:#}");
    format!("model `{}` cannot be opened by the host; it tries again", job.model.name)
}

/// Counts the time in passes of all that run.
fn count(board: &mut Board) {
    let processes: Vec<_> = board.engines.values().filter_map(super::engines::Engine::process).collect();
    for process in processes {
        for (slot, device_ns) in process.vitals().device_ns {
            board.count(slot, device_ns);
        }
    }
}

/// Devices, engines and running jobs.
fn still(shared: &Shared, board: &Board) -> Scene {
    let device = |(id, place): (u32, &super::Place)| Device {
        id: DeviceId(id),
        memory_bytes: place.memory_bytes,
        shares_weights: place.shares_weights,
    };
    let engine = |(id, engine): (&schedule::EngineId, &super::engines::Engine)| {
        let schedule::NewEngine { device, trunk, lane } = engine.numbers;
        Engine { id: *id, device, trunk, lane, is_stopping: engine.is_stopping, idle_ms: ms(engine.idle()) }
    };
    let (now, patience) = (Instant::now(), Duration::from_millis(shared.options.rules.patience_ms));
    let job = |run: &super::board::Run| {
        let (ran_ms, is_turn) = (ms(run.stint.worked(patience, now)), run.stint.is_turn());
        Job { state: Progress::Running { engine: run.engine, is_pausing: run.is_pausing(), ran_ms, is_turn }, ..run.numbers }
    };
    let bar = |(kind, later): (&Kind, &Backoff)| {
        let Kind { device, trunk, lane, job } = *kind;
        Some(Bar { device, trunk, lane, job, left_ms: ms(later.left()?) })
    };
    let kept = |((device, job), (since, _)): (&(DeviceId, schedule::JobId), &(Instant, TenantId))| Kept {
        device: *device,
        job: *job,
        kept_ms: ms(since.elapsed()),
    };
    Scene {
        devices: (0..).zip(&shared.options.places).map(device).collect(),
        trunks: Vec::new(),
        engines: board.engines.iter().map(engine).collect(),
        tenants: Vec::new(),
        jobs: board.running.values().map(job).collect(),
        bars: board.engines_later.iter().filter_map(bar).collect(),
        foreign: Vec::new(),
        kept: board.kept.iter().map(kept).collect(),
        rules: shared.options.rules,
    }
}

/// Takes a waiting job into the view, or leaves it aside with the reason.
fn enter(
    shared: &Shared,
    board: &mut Board,
    view: &mut View,
    (order, queued, model): (u64, &Queued, &Arc<OpenModel>),
    lengths: &mut BTreeMap<TenantId, usize>,
) {
    let trunk = board.trunk(model.digest);
    if let Some((later, left)) = board.jobs_later.get(&queued.job).and_then(|later| Some((later, later.left()?))) {
        view.aside.push((queued.job, format!("the host failed it and tries again in {} s: {}", left.as_secs() + 1, later.why)));
        return;
    }
    let length = lengths.entry(queued.tenant).or_default();
    *length += 1;
    if *length > shared.options.window {
        view.aside.push((queued.job, format!("waiting behind {} of your own jobs", *length - 1)));
        return;
    }
    let aged_ms = told_ms(board.aging.get(&queued.job));
    let own_lane = lane(queued.lane);
    let is_tried = own_lane != schedule::Lane::Solo && board.suspects.is_tried(queued.job);
    let numbers = Job {
        id: schedule::JobId(queued.job.as_u128()),
        tenant: tenant_of(queued.tenant),
        order,
        cohort: Some(cohort_of(queued.cohort)),
        trunk,
        lane: if is_tried { schedule::Lane::Solo } else { own_lane },
        priority: match queued.priority {
            Priority::High => schedule::Priority::High,
            Priority::Low => schedule::Priority::Low,
        },
        adapter_bytes: queued.device_bytes,
        activation_bytes: queued.activation_bytes,
        state: Progress::Waiting { aged_ms },
    };
    view.scene.jobs.push(numbers);
    view.waiting.insert(
        numbers.id,
        Waiting { job: queued.job, tenant: queued.tenant, cohort: queued.cohort, numbers, is_tried, model: model.clone() },
    );
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// How long somebody has been told to wait; be it since a moment ago, it is not nothing.
fn told_ms(since: Option<&Instant>) -> u64 {
    since.map_or(0, |since| ms(since.elapsed()).max(1))
}

fn cohort_of(cohort: CohortId) -> schedule::CohortId {
    schedule::CohortId(cohort.as_u128())
}

fn lane(lane: nodus_state::Lane) -> schedule::Lane {
    match lane {
        nodus_state::Lane::Fused => schedule::Lane::Fused,
        nodus_state::Lane::Mps => schedule::Lane::Mps,
        nodus_state::Lane::Solo => schedule::Lane::Solo,
    }
}

/// What engines take, of every trunk that somebody names. Where devices differ, the most.
fn trunks<'a>(shared: &Shared, board: &mut Board, waiting: impl Iterator<Item = &'a Arc<OpenModel>>) -> Vec<Trunk> {
    let places = &shared.options.places;
    let (cellar, args) = (&shared.cellar, &shared.options.device);
    let most = |bytes: &dyn Fn(DeviceChoice) -> u64| places.iter().map(|place| bytes(place.device)).max().unwrap_or(0);
    let trunk = |board: &mut Board, model: &OpenModel| Trunk {
        id: board.trunk(model.digest),
        engine_bytes: most(&|device| cellar.engine_bytes(model, args, device)),
        weight_bytes: most(&|device| cellar.weight_bytes(model, args, device)),
    };
    let models: BTreeMap<_, Arc<OpenModel>> = waiting.cloned().chain(shared.cellar.models()).map(|model| (model.digest, model)).collect();
    models.values().map(|model| trunk(board, model)).collect()
}
