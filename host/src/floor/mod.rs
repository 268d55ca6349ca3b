//! The floor: where the service's jobs run. It asks what is to be done (`nodus_schedule`), and does it.
//!
//! Decides nothing itself, and keeps nothing that a restart may not lose: what must last is in `nodus_state`.

mod attempt;
mod board;
mod cellar;
mod daemons;
mod engines;
mod follow;
mod homes;
mod numbers;
mod obey;
mod options;
mod rooms;
mod scene;
mod settle;
mod settler;
mod stint;
mod suspects;
mod threads;
mod transcript;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nodus_protocol::Digest;
use nodus_receipts::Follower;
use nodus_sandbox::{Limits, Sandbox, SandboxOptions};
use nodus_state::{Claim, JobId, State, What};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::app::Surroundings;
use crate::books::Books;
use crate::cli::{DeviceArgs, FloorArgs, SandboxArgs};
use crate::error::is_disk;
use crate::guest::{Terms, Workshop};
use crate::journal::{Shelf, Space};
use crate::process::rank::Rank;
use crate::store::Store;
use crate::text::count;

pub(crate) use numbers::describe;
pub(crate) use threads::threads;

use board::Board;
use cellar::Cellar;
use daemons::Daemons;
use numbers::Numbers;
use options::{Options, Place};
use settler::Settler;

/// How long changes are gathered before it is decided again.
const GATHER: Duration = Duration::from_millis(20);
/// How long an engine may take to end when the floor is closed.
const END: Duration = Duration::from_secs(5);
/// How often it is decided though nothing changed: patience and idle times run on.
const TICK: Duration = Duration::from_secs(1);

/// How often journals are looked through for those that nobody needs.
const SWEEP: Duration = Duration::from_secs(3600);

/// Memory of each engine's trunk cache, where the operator does not say.
const TRUNK_CACHE_BYTES: u64 = 256 << 20;

/// What the floor works with.
struct Parts {
    state: Arc<State>,
    store: Arc<Store>,
    workshop: Arc<Workshop>,
    /// Of the sandbox that the workshop compiles for.
    settings: Digest,
    daemons: Daemons,
    options: Options,
}

/// The floor, at work until it is closed.
pub(crate) struct Floor {
    shared: Arc<Shared>,
    runner: JoinHandle<()>,
}

/// What its tasks share.
struct Shared {
    state: Arc<State>,
    store: Arc<Store>,
    settings: Digest,
    books: Mutex<Books>,
    cellar: Cellar,
    /// Of the jobs' journals.
    shelf: Shelf,
    daemons: Daemons,
    options: Options,
    board: Mutex<Board>,
    /// Of each device: who tells its engines what they may have.
    rooms: Vec<tokio::sync::Mutex<()>>,
    numbers: Numbers,
    /// Something changed.
    wake: Notify,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts jobs that ran when the service ended back into the queue, ends those that had ended, and forgets receipts whose jobs have them.
    fn recover(self: &Arc<Self>) -> anyhow::Result<()> {
        for running in self.state.running().context("reading the jobs that ran")? {
            let claim = Claim { job: running.job, attempt: running.attempt };
            settle::recover(&Settler::at_start(self.clone(), claim))?;
        }
        let books = self.books();
        for job in books.unsettled()? {
            // Others are of runs of the command line.
            let Ok(id) = job.parse() else { continue };
            if !self.state.is_open(id)? {
                books.settle(&job)?;
            }
        }
        Ok(())
    }
}

impl Floor {
    /// The floor of a service, as its operator wants it, on the threads of the runtime that is entered; none where jobs are to wait.
    ///
    /// # Errors
    /// The operator's: a device is not there. Ours: the state or the data folder refuses.
    pub(crate) fn of_service(
        (store, state, data_dir): (Arc<Store>, Arc<State>, &Path),
        surroundings: &Surroundings,
        args: &FloorArgs,
        sandbox: SandboxArgs,
    ) -> anyhow::Result<Option<Self>> {
        if args.hold {
            return Ok(None);
        }
        let terms = Terms::from(sandbox);
        let device = DeviceArgs {
            device: None,
            dtype: args.dtype,
            threads: args.threads,
            trunk_cache: Some(args.trunk_cache.unwrap_or(TRUNK_CACHE_BYTES)),
            memory: None,
        };
        let places = options::places(surroundings, &args.devices, args.memory)?;
        let options = Options::new(places, device, surroundings.devices.clone(), terms)?.with(args);
        let daemons = Daemons::new(store.dir()?, std::path::absolute(data_dir).context("finding the data folder")?)?;
        let sandbox = Sandbox::new(SandboxOptions { upload: Limits::DEFAULT })?;
        let workshop = Arc::new(Workshop::open(&store, &sandbox, terms)?.standing(Rank::behind()));
        Self::open(Parts { state, store, workshop, settings: sandbox.settings(), daemons, options }).map(Some)
    }

    /// Puts jobs that ran when the service ended back into the queue, and begins.
    ///
    /// # Errors
    /// Ours: the state or the books refuse.
    fn open(parts: Parts) -> anyhow::Result<Self> {
        let Parts { state, store, workshop, settings, daemons, options } = parts;
        follow::describe();
        let books = Mutex::new(Books::open(store.dir()?)?);
        let shelf = Shelf::open(&store.dir()?, Space::new(options.journal_bytes_max))?;
        sweep(&state, &shelf)?;
        let cellar = Cellar::new(state.clone(), store.clone(), workshop);
        let (board, numbers, wake) = (Mutex::default(), Numbers::default(), Notify::new());
        let rooms = options.places.iter().map(|_| tokio::sync::Mutex::default()).collect();
        let shared = Shared { state: state.clone(), store, settings, books, cellar, shelf, daemons, options, board, rooms, numbers, wake };
        let shared = Arc::new(shared);
        shared.recover().context("taking up what the service was at when it ended")?;
        let listener = Arc::downgrade(&shared);
        state.listen(move |change| {
            if !matches!(change.what, What::Events(_))
                && let Some(shared) = listener.upgrade()
            {
                // Whoever wrote answers a request, and waits for the floor only where the floor has to know.
                if change.what == What::Stop {
                    shared.board().heard(change);
                }
                shared.wake.notify_one();
            }
        });
        let runner = tokio::spawn(work(shared.clone()));
        Ok(Self { shared, runner })
    }

    /// The host's ledger as the floor has read it, for who reads of single jobs.
    ///
    /// # Errors
    /// Ours: the system has no file handle left.
    pub(crate) fn follower(&self) -> anyhow::Result<Follower> {
        self.shared.books().follower()
    }

    /// Starts no more jobs, and has those that run kept as they are: they go on when the service is started again.
    pub(crate) async fn close(self) {
        let Self { shared, runner } = self;
        shared.board().is_closing = true;
        let mut told = Instant::now();
        loop {
            let left: Vec<JobId> = {
                let board = shared.board();
                // One that was being placed may have come since.
                board.running.values().for_each(board::Run::pause);
                board.running.keys().copied().collect()
            };
            if left.is_empty() {
                break;
            }
            if told.elapsed() >= TICK {
                told = Instant::now();
                tracing::warn!("the service ends, and waits until {} are kept as they are", count(left.len() as u64, "job"));
            }
            tokio::time::sleep(GATHER).await;
        }
        runner.abort();
        let engines: Vec<_> = {
            let mut board = shared.board();
            board.engines.values_mut().for_each(|engine| engine.is_stopping = true);
            board.engines.values().cloned().collect()
        };
        for engine in engines {
            // One that still loads its model ends by itself when this process is gone.
            drop(tokio::time::timeout(END, engine.end()).await);
        }
    }
}

/// Removes the journals of jobs that have ended. One that has not, be its owner disabled, may go on; one that has never does.
fn sweep(state: &State, shelf: &Shelf) -> anyhow::Result<()> {
    shelf.sweep(|job| match job.parse::<JobId>() {
        Ok(job) => state.is_open(job).context("reading whether a job has ended"),
        Err(_) => Ok(false),
    })
}

/// Decides and obeys, again and again.
async fn work(shared: Arc<Shared>) {
    let (mut swept, mut rested, mut is_refused) = (Instant::now(), Instant::now(), false);
    loop {
        if swept.elapsed() >= SWEEP {
            swept = Instant::now();
            let sweeper = shared.clone();
            // Jobs that were cancelled while they waited leave theirs.
            let sweep = move || sweep(&sweeper.state, &sweeper.shelf);
            if let Ok(Err(error)) = tokio::task::spawn_blocking(sweep).await {
                tracing::error!("the floor: {error:#}");
            }
        }
        if rested.elapsed() >= TICK {
            rested = Instant::now();
            tokio::spawn(rest(shared.clone()));
        }
        match step(&shared).await {
            // A disk that takes no writes is said once.
            Err(error) if is_disk(&error) && std::mem::replace(&mut is_refused, true) => {}
            Err(error) => tracing::error!("the floor: {error:#}"),
            Ok(()) => is_refused = false,
        }
        if shared.state.is_broken() {
            tracing::error!("the floor starts no job any more: the state's database is broken");
            return;
        }
        tokio::select! {
            () = shared.wake.notified() => tokio::time::sleep(GATHER).await,
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// Ends guest processes that nobody needs.
async fn rest(shared: Arc<Shared>) {
    let all: Vec<_> = shared.board().engines.values().map(|engine| engine.homes.clone()).collect();
    for homes in all {
        homes.rest(Duration::from_millis(shared.options.rules.idle_ms_max)).await;
    }
}

async fn step(shared: &Arc<Shared>) -> anyhow::Result<()> {
    let looker = shared.clone();
    let look = move || scene::look(&looker).map(|view| (nodus_schedule::decide(&view.scene), view));
    let (plan, view) = tokio::task::spawn_blocking(look).await.context("looking at the queue")??;
    obey::obey(shared, &plan, view).await
}
