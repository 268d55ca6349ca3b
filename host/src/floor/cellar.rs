//! What jobs are made of, opened; what several of them name is opened once.
//!
//! Never opens anything by a name alone: what a job was submitted with is known by digest, and something else is refused. All of it is hashed as it is
//! opened, once for all that have it open, so that no receipt names what was not used.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use anyhow::Context as _;
use nodus_engine::plan::table_bytes;
use nodus_formats::{data, peft};
use nodus_kernels::DType;
use nodus_protocol::{AdapterWeights, Digest};
use nodus_sandbox::Limits;
use nodus_state::{FileRef, HeldOut, Named, Priority, Role, State, Work};

use crate::cli::{DeviceArgs, DeviceChoice, Dtype};
use crate::error::user;
use crate::guest::Workshop;
use crate::import::fault;
use crate::name::Name;
use crate::run::content::Content;
use crate::run::inputs::{Job, JobComponent, OpenModel, Parts};
use crate::run::needs::weight_bytes;
use crate::run::rows::Rows;
use crate::store::Store;
use crate::sweep::Point;

/// What the driver, the libraries and operations on their way take of a card for one engine process, beside what is planned.
const RESERVE_BYTES: u64 = 3 << 30;

/// What an engine process takes of a device that is neither weights nor buffers.
pub(super) fn reserve_bytes(device: DeviceChoice) -> u64 {
    if matches!(device, DeviceChoice::Cuda(_)) { RESERVE_BYTES } else { 0 }
}

/// Opens things, and remembers them while somebody has them.
pub(super) struct Cellar {
    state: Arc<State>,
    store: Arc<Store>,
    workshop: Arc<Workshop>,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    /// For good: engines hold them anyway, and the machine's page cache has their weights.
    models: BTreeMap<Digest, Arc<OpenModel>>,
    components: BTreeMap<Digest, Weak<JobComponent>>,
    /// By the data set and what is held out of it.
    rows: BTreeMap<String, Arc<Mutex<Opened>>>,
}

/// Rows that somebody may still have open. Locked while they are being opened.
#[derive(Default)]
struct Opened {
    train: Weak<Rows>,
    held_out: Option<Weak<Rows>>,
}

impl Opened {
    fn parts(&self) -> Option<Parts> {
        let held_out = self.held_out.as_ref().map(Weak::upgrade);
        Some((self.train.upgrade()?, held_out.map_or(Some(None), |rows| rows.map(Some))?))
    }
}

impl Cellar {
    pub(super) fn new(state: Arc<State>, store: Arc<Store>, workshop: Arc<Workshop>) -> Self {
        Self { state, store, workshop, kept: Mutex::default() }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A model. Blocks while it is read.
    ///
    /// # Errors
    /// The owner's: it is not there any more, or another one has its name. Ours: it is damaged.
    pub(super) fn model(&self, named: &Named) -> anyhow::Result<Arc<OpenModel>> {
        if let Some(model) = self.kept().models.get(&named.digest) {
            return Ok(model.clone());
        }
        let model = OpenModel::open(&self.store, &name(&named.name)?)?;
        if model.digest != named.digest {
            let (name, was, is) = (&named.name, named.digest, model.digest);
            return Err(user(format!("model `{name}` was {was} when the job was submitted, and is {is} now: submit it again")));
        }
        Ok(self.kept().models.entry(model.digest).or_insert(Arc::new(model)).clone())
    }

    /// The models that were opened.
    pub(super) fn models(&self) -> Vec<Arc<OpenModel>> {
        self.kept().models.values().cloned().collect()
    }

    /// Bytes of a model's weights on a device.
    pub(super) fn weight_bytes(&self, model: &OpenModel, args: &DeviceArgs, device: DeviceChoice) -> u64 {
        let is_narrow = match (device, args.dtype) {
            (DeviceChoice::Cpu | DeviceChoice::Auto, _) | (_, Some(Dtype::F32)) => false,
            (_, Some(Dtype::Bf16)) => true,
            (_, None) => model.weights.dtype() != DType::F32,
        };
        weight_bytes(&model.config, if is_narrow { 2 } else { 4 })
    }

    /// What an engine on a model takes of a device before any job.
    pub(super) fn engine_bytes(&self, model: &OpenModel, args: &DeviceArgs, device: DeviceChoice) -> u64 {
        let (weights, cache) = (self.weight_bytes(model, args, device), args.trunk_cache.unwrap_or(0));
        weights.saturating_add(reserve_bytes(device)).saturating_add(table_bytes(&model.config)).saturating_add(cache)
    }

    /// A job. Blocks while it is read; `cohort` is what its engine knows its cohort by.
    ///
    /// # Errors
    /// The owner's: an input is not right. Ours: the state or the data folder is damaged.
    pub(super) fn job(&self, work: &Work, cohort: u64) -> anyhow::Result<Job> {
        let spec = &work.spec;
        let model = self.model(&spec.common.model)?;
        let (train, held_out) = self.rows(work)?;
        let mut limits = Limits::DEFAULT;
        for (name, value) in &spec.common.limits {
            limits.set(name, *value);
        }
        Ok(Job {
            name: None,
            varied: Point::new(),
            component: self.component(work)?,
            base: model.name.to_string(),
            adapters: self.adapters(work, &model)?,
            model,
            train,
            held_out,
            parameters: spec.common.parameters.clone(),
            seed: spec.common.seed,
            limits,
            stop_at: work.stop_question,
            cohort,
            is_urgent: spec.common.priority == Priority::High,
        })
    }

    fn component(&self, work: &Work) -> anyhow::Result<Arc<JobComponent>> {
        let named = &work.spec.common.component;
        if let Some(component) = self.kept().components.get(&named.digest).and_then(Weak::upgrade) {
            return Ok(component);
        }
        let bytes = self.state.read_file(input(work, Role::Component)?)?;
        let component = Arc::new(JobComponent::new(&self.workshop, bytes, named.name.clone(), "the component")?);
        let mut kept = self.kept();
        kept.components.retain(|_, component| component.strong_count() > 0);
        kept.components.insert(named.digest, Arc::downgrade(&component));
        Ok(component)
    }

    /// What somebody has open, or is opening, is not read again: the members of a sweep are opened at the same time.
    fn rows(&self, work: &Work) -> anyhow::Result<Parts> {
        let spec = &work.spec;
        let key = format!("{} {} {:?}", spec.common.data.name, spec.common.data.digest, spec.common.held_out);
        let place = {
            let mut kept = self.kept();
            kept.rows
                .retain(|_, place| Arc::strong_count(place) > 1 || place.lock().unwrap_or_else(PoisonError::into_inner).parts().is_some());
            kept.rows.entry(key).or_default().clone()
        };
        let mut opened = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(parts) = opened.parts() {
            return Ok(parts);
        }
        let parts = self.read_rows(work)?;
        *opened = Opened { train: Arc::downgrade(&parts.0), held_out: parts.1.as_ref().map(Arc::downgrade) };
        Ok(parts)
    }

    fn read_rows(&self, work: &Work) -> anyhow::Result<Parts> {
        let whole = |role, named: &Named| -> anyhow::Result<Arc<Rows>> {
            let (name, file) = (name(&named.name)?, self.state.open_file(input(work, role)?)?);
            let content = Content::hashed(&name, named.digest, file)?;
            Ok(Rows::whole(name, named.digest, content))
        };
        let spec = &work.spec;
        let share = match &spec.common.held_out {
            HeldOut::Nothing => return Ok((whole(Role::Data, &spec.common.data)?, None)),
            HeldOut::Data(named) => return Ok((whole(Role::Data, &spec.common.data)?, Some(whole(Role::HeldOut, named)?))),
            HeldOut::Count(count) => data::HeldOut::Count(usize::try_from(*count).unwrap_or(usize::MAX)),
            HeldOut::Fraction(part) => data::HeldOut::Fraction(*part),
        };
        let (file, name) = (self.state.open_file(input(work, Role::Data)?)?, name(&spec.common.data.name)?);
        let (content, count) = Content::counted(&name, spec.common.data.digest, file)?;
        let (train, held_out) = Rows::parts(&name, spec.common.data.digest, content, count, share)?;
        Ok((train, Some(held_out)))
    }

    fn adapters(&self, work: &Work, model: &OpenModel) -> anyhow::Result<Vec<(Digest, Arc<AdapterWeights>)>> {
        let Some(digest) = work.spec.init_adapter else { return Ok(Vec::new()) };
        let files = work.inputs.iter().filter(|(role, _)| *role == Role::InitAdapter);
        let workspace = self.store.workspace()?;
        for (_, file) in files {
            workspace.dir().write(&file.path, self.state.read_file(file)?).context("putting an adapter's files together")?;
        }
        let weights = peft::read(workspace.dir(), &model.config).map_err(fault)?;
        Ok(vec![(digest, Arc::new(weights))])
    }
}

fn input(work: &Work, role: Role) -> anyhow::Result<&FileRef> {
    let found = work.inputs.iter().find(|(of, _)| *of == role);
    found.map(|(_, file)| file).with_context(|| format!("the state is damaged: the job has no {role}"))
}

/// A name that the state gave: checked when it was taken in.
fn name(text: &str) -> anyhow::Result<Name> {
    text.parse().with_context(|| format!("the state is damaged: `{text}` is no name"))
}
