//! What a job is made of, opened and checked before anything starts; what several jobs name is opened once.
//!
//! Nothing downstream looks a name up again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use cap_std::fs::Dir;
use nodus_formats::data::HeldOut;
use nodus_formats::{TextFiles, TextModel, hf};
use nodus_kernels::{DType, HostTensor};
use nodus_protocol::{AdapterWeights, Digest, ModelConfig};
use nodus_sandbox::{Limits, Precompiled};
use serde_json::{Map, Value};

use super::asked::Asked;
use super::content::Content;
use super::plan;
use super::rows::Rows;
use super::sizes::Reckoned;
use crate::cli::HeldOutArgs;
use crate::error::{exit_code, refusal, user};
use crate::guest::Workshop;
use crate::import::{self, RANDOM};
use crate::limits::over;
use crate::name::Name;
use crate::paths::{Paths, shown};
use crate::random::{self, Recipe};
use crate::settings::INIT_ADAPTER;
use crate::store::Store;
use crate::sweep::Point;
use crate::text::escape;

/// A component that may run, with its bytes, which a receipt's replay needs.
pub(crate) struct JobComponent {
    pub(crate) code: Precompiled,
    pub(crate) bytes: Vec<u8>,
    /// The file's name, escaped.
    pub(crate) name: String,
}

/// A model of the store, open.
pub(crate) struct OpenModel {
    pub(crate) name: Name,
    pub(crate) config: Arc<ModelConfig>,
    /// Of configuration, weights and tokenizer.
    pub(crate) digest: Digest,
    pub(crate) text: Option<Arc<TextModel>>,
    /// What `text` was made of, for the processes that guests run in.
    pub(crate) text_files: Arc<TextFiles>,
    pub(crate) weights: Weights,
}

/// Where a model's weights come from.
pub(crate) enum Weights {
    /// Mapped files.
    Mapped(BTreeMap<String, HostTensor>),
    /// The device makes them.
    Random {
        /// What they are rounded to.
        dtype: DType,
        /// Of all of them.
        seed: u64,
    },
}

impl Weights {
    /// The type that most of them are stored in: that of the largest, the embedding.
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Mapped(tensors) => tensors.get("model.embed_tokens.weight").map_or(DType::F32, HostTensor::dtype),
            Self::Random { dtype, .. } => *dtype,
        }
    }
}

/// Everything a job needs from outside.
pub(crate) struct Job {
    /// Its folder within the results; none where it has the whole.
    pub(crate) name: Option<String>,
    /// The parameters in which it differs from the others of its sweep.
    pub(crate) varied: Point,
    pub(crate) component: Arc<JobComponent>,
    pub(crate) model: Arc<OpenModel>,
    /// What others know the model by.
    pub(crate) base: String,
    pub(crate) train: Arc<Rows>,
    pub(crate) held_out: Option<Arc<Rows>>,
    pub(crate) parameters: Map<String, Value>,
    /// Adapters that the job may load.
    pub(crate) adapters: Vec<(Digest, Arc<AdapterWeights>)>,
    pub(crate) seed: u64,
    pub(crate) limits: Limits,
    /// From which question on it is told to stop, where a run is repeated that was.
    pub(crate) stop_at: Option<u64>,
    /// Jobs of one cohort may share trunk activations.
    pub(crate) cohort: u64,
    /// Whether its passes go before those of others.
    pub(crate) is_urgent: bool,
}

impl JobComponent {
    /// Validates and compiles a component, unless that was done before.
    ///
    /// # Errors
    /// The user's: why it is none; `place` says which. Ours: no process can be started for it.
    pub(crate) fn new(workshop: &Workshop, bytes: Vec<u8>, name: String, place: &str) -> anyhow::Result<Self> {
        let code = workshop.compiled(&bytes)?.map_err(|refused| refusal(refused.code(), format!("{place}: {refused}")))?;
        Ok(Self { code, bytes, name })
    }

    /// Digest of the bytes that were uploaded.
    pub(crate) fn digest(&self) -> Digest {
        self.code.digest()
    }
}

impl OpenModel {
    /// Opens a model.
    ///
    /// # Errors
    /// The user's: there is none of this name. Ours: it is damaged.
    pub(crate) fn open(store: &Store, name: &Name) -> anyhow::Result<Self> {
        let (dir, manifest) = store.model(name)?;
        if manifest.summary.source == RANDOM {
            return Self::random(&dir, name, manifest.summary.digest);
        }
        let model = hf::open(&dir).with_context(|| format!("model `{name}` of the data folder is damaged"))?;
        let (found, expected) = (model.digest, manifest.summary.digest);
        ensure!(
            found == expected,
            "model `{name}` of the data folder is damaged: its digest is {found}, expected {expected}; import it again"
        );
        let (config, text) = (Arc::new(model.config), model.text.map(Arc::new));
        let text_files = TextFiles::read(&dir).map(Arc::new).with_context(|| format!("model `{name}` of the data folder is damaged"))?;
        Ok(Self { name: name.clone(), config, digest: found, text, text_files, weights: Weights::Mapped(model.tensors) })
    }

    fn random(dir: &Dir, name: &Name, expected: Digest) -> anyhow::Result<Self> {
        let text = dir.read(random::FILE).with_context(|| format!("model `{name}` of the data folder is damaged"))?;
        let found = Recipe::read(&text).filter(|(_, digest)| *digest == expected);
        let (recipe, digest) = found.with_context(|| format!("model `{name}` of the data folder is damaged; import it again"))?;
        let weights = Weights::Random { dtype: recipe.dtype(), seed: recipe.seed };
        let (config, text_files) = (Arc::new(recipe.config), Arc::default());
        Ok(Self { name: name.clone(), config, digest, text: None, text_files, weights })
    }
}

impl Job {
    /// Bytes of its data sets, whole, as they are in the store.
    pub(crate) fn dataset_bytes(&self) -> u64 {
        std::iter::once(&self.train).chain(&self.held_out).map(|rows| rows.whole_bytes()).sum()
    }
}

/// Bytes of data sets, whole. One of which both parts are is counted once.
fn dataset_bytes(train: &Rows, held_out: Option<&Rows>) -> u64 {
    let other = held_out.filter(|rows| rows.part_len().is_none());
    train.whole_bytes().saturating_add(other.map_or(0, Rows::whole_bytes))
}

/// Refuses data sets of so many bytes where a job may not have them.
///
/// # Errors
/// The user's.
pub(crate) fn bounded(dataset_bytes: u64, limits: &Limits) -> anyhow::Result<()> {
    let allowed = limits.dataset_bytes;
    if dataset_bytes > allowed {
        return Err(user(format!("the job's data has {dataset_bytes} bytes, limit `dataset-bytes` allows {allowed}")));
    }
    Ok(())
}

/// Opens jobs' inputs.
pub(crate) struct Opener<'a> {
    store: &'a Store,
    paths: Paths,
    workshop: &'a Workshop,
    /// Bytes of a component at most.
    component_bytes_max: u64,
    components: BTreeMap<PathBuf, Arc<JobComponent>>,
    models: BTreeMap<Name, Arc<OpenModel>>,
    data: Vec<((Name, HeldOutArgs), Parts)>,
    reckoned: Reckoned<plan::OfRows>,
}

/// What a job trains on, and what it may evaluate on.
pub(crate) type Parts = (Arc<Rows>, Option<Arc<Rows>>);

impl<'a> Opener<'a> {
    pub(crate) fn new(store: &'a Store, paths: Paths, workshop: &'a Workshop, component_bytes_max: u64) -> Self {
        let (components, models, data, reckoned) = (BTreeMap::new(), BTreeMap::new(), Vec::new(), Reckoned::default());
        Self { store, paths, workshop, component_bytes_max, components, models, data, reckoned }
    }

    /// Opens all that one job needs.
    ///
    /// # Errors
    /// The user's: what is not there or not right. Ours: the data folder is damaged.
    pub(crate) fn open(&mut self, asked: Asked) -> anyhow::Result<Job> {
        let component = self.component(&asked.component)?;
        let (train, held_out) = self.rows(&asked.data, &asked.held_out)?;
        bounded(dataset_bytes(&train, held_out.as_deref()), &over(Limits::DEFAULT, &asked.limits))?;
        let model = self.model(&asked.model)?;
        let mut parameters = asked.parameters;
        let adapters = self.init_adapter(&mut parameters, &model)?;
        let base = model.name.to_string();
        let loaded = adapters.first().map(|(_, weights)| &weights.config);
        let limits = plan::limits(&model, (&train, held_out.as_deref()), (&parameters, loaded), &asked.limits, &mut self.reckoned)?;
        let Asked { name, varied, seed, cohort, .. } = asked;
        Ok(Job {
            name,
            varied,
            component,
            model,
            base,
            train,
            held_out,
            parameters,
            adapters,
            seed,
            limits,
            stop_at: None,
            cohort,
            is_urgent: false,
        })
    }

    fn component(&mut self, path: &Path) -> anyhow::Result<Arc<JobComponent>> {
        if let Some(component) = self.components.get(path) {
            return Ok(component.clone());
        }
        let bytes = self.paths.read(path, self.component_bytes_max)?;
        let name = escape(&path.file_name().unwrap_or_default().to_string_lossy());
        let component = Arc::new(JobComponent::new(self.workshop, bytes, name, &shown(path))?);
        self.components.insert(path.to_owned(), component.clone());
        Ok(component)
    }

    fn model(&mut self, name: &Name) -> anyhow::Result<Arc<OpenModel>> {
        if let Some(model) = self.models.get(name) {
            return Ok(model.clone());
        }
        let model = Arc::new(OpenModel::open(self.store, name)?);
        self.models.insert(name.clone(), model.clone());
        Ok(model)
    }

    fn rows(&mut self, name: &Name, held_out: &HeldOutArgs) -> anyhow::Result<Parts> {
        let key = (name.clone(), held_out.clone());
        if let Some((_, parts)) = self.data.iter().find(|(known, _)| *known == key) {
            return Ok(parts.clone());
        }
        let parts = self.open_rows(name, held_out)?;
        self.data.push((key, parts.clone()));
        Ok(parts)
    }

    fn open_rows(&mut self, name: &Name, held_out: &HeldOutArgs) -> anyhow::Result<Parts> {
        let share = match (held_out.held_out_count, held_out.held_out_fraction) {
            (Some(count), _) => HeldOut::Count(count.get()),
            (None, Some(part)) => HeldOut::Fraction(part),
            (None, None) => {
                let train = self.whole(name)?;
                let second = held_out.held_out.as_ref().map(|name| self.whole(name)).transpose()?;
                return Ok((train, second));
            }
        };
        let (file, manifest) = self.store.dataset(name)?;
        let content = Content::hashed(name, manifest.digest, file)?;
        let (train, held_out) = Rows::parts(name, manifest.digest, content, manifest.rows, share)?;
        Ok((train, Some(held_out)))
    }

    fn whole(&self, name: &Name) -> anyhow::Result<Arc<Rows>> {
        let (file, manifest) = self.store.dataset(name)?;
        let content = Content::hashed(name, manifest.digest, file)?;
        Ok(Rows::whole(name.clone(), manifest.digest, content))
    }

    /// A path under `init_adapter` is imported, and the job is given its digest in place of the path.
    fn init_adapter(&self, parameters: &mut Map<String, Value>, model: &OpenModel) -> anyhow::Result<Vec<(Digest, Arc<AdapterWeights>)>> {
        let path = match parameters.get_mut(INIT_ADAPTER) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::String(path)) => path,
            Some(other) => return Err(user(format!("{INIT_ADAPTER} is {other}, expected the path of a PEFT folder"))),
        };
        let imported = import::adapter(self.store, self.paths, Path::new(path.as_str()), &model.config, model.name.as_str());
        let (digest, weights) = imported.map_err(|error| match exit_code(&error) {
            2 => user(format!("{INIT_ADAPTER}: {error}")),
            _ => error,
        })?;
        *path = digest.to_string();
        Ok(vec![(digest, Arc::new(weights))])
    }
}
