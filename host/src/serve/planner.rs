//! What jobs are planned with: models that are open, and how large the data is that they train on, read once, by turns of tenants.
//!
//! Knows no request.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use nodus_api::Code;
use nodus_formats::data::HeldOut as Share;
use nodus_protocol::Digest;
use nodus_state::{HeldOut, Item, ItemKind, Reference, TenantId};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::checks::{Checks, Turn};
use super::failure::Failure;
use super::service::{App, Service};
use crate::name::Name;
use crate::run::content::Content;
use crate::run::inputs::{OpenModel, Parts};
use crate::run::rows::Rows;
use crate::run::sizes::{Reckoned, Sizes, measure};

/// Readings that have begun and are not at their ends.
const BEGUN_MAX: usize = 64;
/// Bytes of data that take a moment.
const LITTLE_BYTES_MAX: u64 = 1 << 20;
/// How long one goes on before it is another's turn.
const SLICE: Duration = Duration::from_millis(100);

/// Models that are open, and sizes that are known.
pub(crate) struct Planner {
    models: Mutex<BTreeMap<Name, Arc<OpenModel>>>,
    sizes: Mutex<Reckoned<Digest>>,
    /// Whose data is being read: of one tenant one at a time, since each reading has a thread.
    begun: Arc<Checks>,
    /// Who reads now: one at a time, since each takes a processor, and each for a while.
    reading: Arc<Checks>,
    /// The same for little data, which is read to its end at once and waits for no large one.
    little: Arc<Checks>,
}

/// The data of a job or a sweep: what is trained on, and what is held out.
#[derive(Clone)]
pub(super) struct Data {
    pub(super) train: Item,
    pub(super) held_out: HeldOut,
    /// The held-out data, where it is a data set of its own.
    pub(super) second: Option<Item>,
}

/// Sizes by the length that examples are cut at.
type ByLength = BTreeMap<usize, Arc<Sizes>>;

/// What was read for one request, which has it though others make that it is forgotten.
pub(super) struct Read {
    of: Digest,
    sizes: ByLength,
}

/// What a plan needs to know: how large the examples of some data are for a model, at these lengths.
pub(super) struct Asked {
    pub(super) model: Arc<OpenModel>,
    pub(super) data: Data,
    pub(super) lengths: BTreeSet<usize>,
}

impl Data {
    /// Bytes of all of it.
    pub(super) fn bytes(&self) -> u64 {
        self.train.bytes.saturating_add(self.second.as_ref().map_or(0, |second| second.bytes))
    }

    /// How many rows the data has.
    pub(super) fn rows(&self) -> usize {
        let rows = self.train.about.get("rows").and_then(Value::as_u64).unwrap_or_default();
        usize::try_from(rows).unwrap_or(usize::MAX)
    }

    /// The part of it that is held out, where it is one.
    pub(super) fn share(&self) -> Option<Share> {
        match &self.held_out {
            HeldOut::Nothing | HeldOut::Data(_) => None,
            HeldOut::Count(count) => Some(Share::Count(usize::try_from(*count).unwrap_or(usize::MAX))),
            HeldOut::Fraction(part) => Some(Share::Fraction(*part)),
        }
    }

    /// What its sizes are known by: to its owner alone, since nobody is to see by how quickly a plan is made that another has the same data.
    fn of(&self, of: TenantId, model: &OpenModel) -> Digest {
        Digest::of(json!([of.number().to_string(), model.digest, self.train.digest, self.held_out]).to_string().as_bytes())
    }

    /// Its rows, open. Their lengths are read, and no result says what they were.
    fn open(&self, service: &Service, of: TenantId) -> Result<Parts, Failure> {
        let open = |item: &Item| -> Result<(Name, Content), Failure> {
            let files = service.state.item_files(of, ItemKind::Data, &Reference::Digest(item.digest))?;
            let file = files.first().ok_or_else(|| Failure::ours(anyhow::anyhow!("data set {} has no file", item.digest)))?;
            let name = item.name.as_deref().unwrap_or_default().parse().map_err(|error| Failure::ours(anyhow::Error::new(error)))?;
            Ok((name, Content::unseen(service.state.open_file(file)?)))
        };
        let whole = |item: &Item| open(item).map(|(name, content)| Rows::whole(name, item.digest, content));
        let Some(share) = self.share() else {
            return Ok((whole(&self.train)?, self.second.as_ref().map(whole).transpose()?));
        };
        let (name, content) = open(&self.train)?;
        let parts = Rows::parts(&name, self.train.digest, content, self.rows() as u64, share);
        parts.map(|(train, held_out)| (train, Some(held_out))).map_err(|error| Failure::of(Code::JobRefused, error))
    }
}

impl Planner {
    pub(super) fn new() -> Self {
        let (models, sizes) = Default::default();
        Self { models, sizes, begun: Checks::bounded(BEGUN_MAX, 1), reading: Checks::new(1), little: Checks::new(1) }
    }

    /// A model, opened once.
    pub(super) fn model(&self, service: &Service, name: &str) -> Result<Arc<OpenModel>, Failure> {
        let refused = |error| Failure::of(Code::JobRefused, error);
        let name: Name = name.parse().map_err(|error: crate::name::NameError| Failure::new(Code::JobRefused, error.to_string()))?;
        let (_, manifest) = service.store.model(&name).map_err(refused)?;
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = models.get(&name).filter(|model| model.digest == manifest.summary.digest) {
            return Ok(model.clone());
        }
        let model = Arc::new(OpenModel::open(&service.store, &name).map_err(refused)?);
        models.insert(name, model.clone());
        Ok(model)
    }

    fn reckoned(&self) -> MutexGuard<'_, Reckoned<Digest>> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sizes of a tenant's data, of what was just read or what was before; none where they are not all known.
    pub(super) fn sizes(&self, of: TenantId, Asked { model, data, lengths }: &Asked, read: Option<Read>) -> Option<ByLength> {
        let key = data.of(of, model);
        let read = read.filter(|read| read.of == key && lengths.iter().all(|length| read.sizes.contains_key(length)));
        read.map(|read| read.sizes).or_else(|| self.known(&key, lengths))
    }

    /// What is known of data at these lengths; none where it is not all known.
    fn known(&self, of: &Digest, lengths: &BTreeSet<usize>) -> Option<ByLength> {
        let reckoned = self.reckoned();
        lengths.iter().map(|length| Some((*length, reckoned.get(of, *length)?))).collect()
    }
}

/// A turn to read, given up for others now and then, and for good where nobody waits for what is read.
struct Slice {
    reading: Arc<Checks>,
    of: TenantId,
    turn: Option<Turn>,
    since: Instant,
    wanted: Weak<()>,
}

impl Slice {
    /// Returns once it is the tenant's turn, or still. Blocks.
    fn pass(&mut self) -> io::Result<()> {
        if self.turn.is_some() && self.since.elapsed() < SLICE {
            return Ok(());
        }
        drop(self.turn.take());
        if self.wanted.strong_count() == 0 {
            return Err(io::Error::other("who asked is gone"));
        }
        self.turn = Handle::current().block_on(self.reading.take(self.of));
        self.since = Instant::now();
        Ok(())
    }
}

/// Reads data that is not known at these lengths, once for all of them, a while at a time where others wait for theirs.
pub(super) async fn read(app: &App, of: TenantId, Asked { model, data, lengths }: Asked) -> Result<Read, Failure> {
    let is_little = data.bytes() <= LITTLE_BYTES_MAX;
    let places = if is_little { &app.planner.little } else { &app.planner.begun };
    let place = places.take(of).await;
    // Gone with this future, and so with the request.
    let wanted = Arc::new(());
    let weak = Arc::downgrade(&wanted);
    let done = app.blocking(move |service| {
        let (_place, planner) = (place, &service.planner);
        let key = data.of(of, &model);
        // Whoever was before may have asked the same.
        if let Some(sizes) = planner.known(&key, &lengths) {
            return Ok(Read { of: key, sizes });
        }
        let (train, held_out) = data.open(service, of)?;
        let mut slice = Slice { reading: planner.reading.clone(), of, turn: None, since: Instant::now(), wanted: weak };
        let measured = measure(&model, (&train, held_out.as_deref()), &lengths, || if is_little { Ok(()) } else { slice.pass() })
            .map_err(Failure::ours)?;
        let sizes = planner.reckoned().learn(&key, measured);
        Ok(Read { of: key, sizes })
    });
    let done = done.await;
    drop(wanted);
    done
}
