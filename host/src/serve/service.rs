//! What all requests share.
//!
//! Holds no request's data.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use metrics_exporter_prometheus::PrometheusHandle;
use nodus_receipts::Follower;
use nodus_sandbox::{Limits, Sandbox, SandboxOptions};
use nodus_state::{Bars, Change, Kinds, Lane, State, What};
use tokio::sync::{Semaphore, watch};

use super::checks::Checks;
use super::failure::Failure;
use super::planner::Planner;
use super::rates::Rates;
use super::slots::Slots;
use super::streams::Streams;
use crate::books;
use crate::cli::SandboxArgs;
use crate::guest::{Terms, Workshop};
use crate::process::rank::Rank;
use crate::store::Store;

/// Uploads that are taken at the same time; more wait.
const UPLOADS_MAX: usize = 64;
/// Uploads of one tenant at the same time.
const UPLOADS_OF_ONE_MAX: usize = 8;
/// Large JSON bodies at the same time, of all tenants (more wait) and of one: each is held in memory.
const BODIES_MAX: usize = 32;
const BODIES_OF_ONE_MAX: usize = 4;
/// Downloads at the same time, of all tenants (more wait) and of one: each has a thread, of which there are some hundreds.
const DOWNLOADS_MAX: usize = 128;
const DOWNLOADS_OF_ONE_MAX: usize = 16;
/// Readings of the ledger at the same time: each has a thread, which may wait for what was added to it to be read.
const LEDGERS_MAX: usize = 2;
/// Submissions that are looked at at the same time: each has a thread.
const SUBMISSIONS_MAX: usize = 4;
/// Components that are compiled at the same time, and data sets that are read through: each takes a processor.
const COMPILING_MAX: usize = 2;
const READING_MAX: usize = 2;
/// Streams that read their events at the same time, so that ten thousand woken at once leave readers of the database to other requests.
const TELLING_MAX: usize = 2;

/// What the operator offers to tenants.
pub(super) struct Offers {
    /// Their adapters merged into the operator's models.
    pub(super) merged: bool,
    pub(super) lanes: Vec<Lane>,
    /// What they may set a job's limits to.
    pub(super) limits: Limits,
    /// Jobs are taken, and none is started.
    pub(super) holds: bool,
}

/// What all requests share.
pub(crate) struct Service {
    /// Models, and the folder of machine code.
    pub(crate) store: Arc<Store>,
    /// Everything else that lasts.
    pub(crate) state: Arc<State>,
    /// Where components are compiled.
    pub(crate) workshop: Workshop,
    /// The limits of uploads.
    pub(crate) upload: Limits,
    pub(super) planner: Planner,
    pub(super) rates: Rates,
    pub(super) streams: Arc<Streams>,
    pub(super) uploads: Semaphore,
    pub(super) slots: Arc<Slots>,
    pub(super) bodies: Arc<Semaphore>,
    pub(super) body_slots: Arc<Slots>,
    pub(super) downloads: Arc<Semaphore>,
    pub(super) download_slots: Arc<Slots>,
    pub(super) ledgers: Semaphore,
    /// As far as it was read.
    pub(super) ledger: Mutex<Follower>,
    pub(super) submissions: Arc<Checks>,
    pub(super) compiling: Arc<Checks>,
    pub(super) reading: Arc<Checks>,
    pub(super) telling: Semaphore,
    pub(super) numbers: PrometheusHandle,
    pub(super) offers: Offers,
    /// What shut bearers out when it was looked at last.
    pub(super) bars: watch::Sender<Bars>,
    /// True once the service is to end.
    pub(super) closing: watch::Sender<bool>,
}

/// A handle to it.
#[derive(Clone)]
pub(crate) struct App(Arc<Service>);

impl std::ops::Deref for App {
    type Target = Service;

    fn deref(&self) -> &Service {
        &self.0
    }
}

impl App {
    pub(super) fn new(
        store: Arc<Store>,
        state: Arc<State>,
        sandbox: SandboxArgs,
        numbers: PrometheusHandle,
        offers: Offers,
    ) -> anyhow::Result<Self> {
        let upload = Limits::DEFAULT;
        let workshop = Workshop::open(&store, &Sandbox::new(SandboxOptions { upload })?, Terms::from(sandbox))?;
        let workshop = workshop.standing(Rank::behind());
        let (bars, ledger) = (watch::Sender::new(state.bars()?), books::follower(store.dir()?));
        let streams = Arc::new(Streams::default());
        let told = streams.clone();
        state.listen(move |change: &Change| {
            let kinds = if let What::Events(kinds) = change.what { kinds } else { Kinds::ALL };
            told.wake(change.cohort, kinds);
        });
        Ok(Self(Arc::new(Service {
            store,
            state,
            workshop,
            upload,
            planner: Planner::new(),
            rates: Rates::default(),
            streams,
            uploads: Semaphore::new(UPLOADS_MAX),
            slots: Slots::new(UPLOADS_OF_ONE_MAX),
            bodies: Arc::new(Semaphore::new(BODIES_MAX)),
            body_slots: Slots::new(BODIES_OF_ONE_MAX),
            downloads: Arc::new(Semaphore::new(DOWNLOADS_MAX)),
            download_slots: Slots::new(DOWNLOADS_OF_ONE_MAX),
            ledgers: Semaphore::new(LEDGERS_MAX),
            ledger: Mutex::new(ledger),
            submissions: Checks::new(SUBMISSIONS_MAX),
            compiling: Checks::new(COMPILING_MAX),
            reading: Checks::new(READING_MAX),
            telling: Semaphore::new(TELLING_MAX),
            numbers,
            offers,
            bars,
            closing: watch::Sender::new(false),
        })))
    }

    /// Reads the ledger on from where somebody has read it to.
    pub(super) fn follow(&self, follower: Follower) {
        *self.ledger.lock().unwrap_or_else(PoisonError::into_inner) = follower;
    }

    /// Runs what reads or writes a disk away from the threads that answer requests.
    pub(super) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Service) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let service = self.0.clone();
        let done = tokio::task::spawn_blocking(move || work(&service)).await;
        done.context("a request's work panicked").map_err(Failure::ours)?
    }
}
