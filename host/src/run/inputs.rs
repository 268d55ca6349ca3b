//! What a run is made of, opened and checked before anything starts.
//!
//! Nothing downstream looks a name up again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use anyhow::ensure;
use cap_std::fs::File;
use nodus_formats::data::{self, HeldOut};
use nodus_formats::{Model, TextModel, hf};
use nodus_kernels::HostTensor;
use nodus_protocol::{AdapterWeights, Digest, ModelConfig};
use nodus_sandbox::{Limits, Sandbox, ValidComponent};
use serde_json::{Map, Value};

use crate::cli::{HeldOutArgs, RunArgs};
use crate::error::{exit_code, user};
use crate::import;
use crate::name::Name;
use crate::paths::{Paths, shown};
use crate::settings::{INIT_ADAPTER, merge};
use crate::store::Store;

/// Decides, with the number of rows alone, which rows are held out: runs of other seeds stay comparable.
const SPLIT_SEED: u64 = 0;

/// Rows of a data set in the store.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) name: Name,
    pub(super) digest: Digest,
    pub(super) file: File,
    /// Line numbers, from 1; absent: all.
    pub(super) lines: Option<BTreeSet<u64>>,
}

/// Everything a run needs from outside.
pub(super) struct Inputs {
    pub(super) model_name: Name,
    pub(super) config: Arc<ModelConfig>,
    /// Of configuration, weights and tokenizer.
    pub(super) digest: Digest,
    pub(super) text: Option<Arc<TextModel>>,
    /// Mapped weights; the engine takes them.
    pub(super) tensors: BTreeMap<String, HostTensor>,
    pub(super) train: Arc<Rows>,
    pub(super) held_out: Option<Arc<Rows>>,
    pub(super) parameters: Map<String, Value>,
    /// Adapters that the job may load.
    pub(super) adapters: Vec<(Digest, Arc<AdapterWeights>)>,
}

/// Reads and validates the component.
pub(super) fn component(paths: Paths, path: &Path, sandbox: &Sandbox) -> anyhow::Result<ValidComponent> {
    let bytes = paths.read(path, Limits::DEFAULT.component_bytes)?;
    sandbox.validate(&bytes).map_err(|refusal| user(format!("{}: {refusal}", shown(path))))
}

impl Inputs {
    /// Opens model, data and parameters.
    pub(super) fn open(store: &Store, paths: Paths, args: &RunArgs) -> anyhow::Result<Self> {
        let mut parameters = parameters(paths, args)?;
        let (train, held_out) = rows(store, &args.data, &args.held_out)?;
        let (dir, manifest) = store.model(&args.model)?;
        let model = hf::open(&dir)
            .map_err(|error| anyhow::anyhow!(error).context(format!("model `{}` of the data folder is damaged", args.model)))?;
        let (found, expected) = (model.digest, manifest.summary.digest);
        ensure!(
            found == expected,
            "model `{}` of the data folder is damaged: its digest is {found}, expected {expected}; import it again",
            args.model
        );
        let adapters = init_adapter(store, paths, &mut parameters, &model, &args.model)?;
        let (config, text) = (Arc::new(model.config), model.text.map(Arc::new));
        Ok(Self {
            model_name: args.model.clone(),
            config,
            digest: found,
            text,
            tensors: model.tensors,
            train,
            held_out,
            parameters,
            adapters,
        })
    }
}

fn parameters(paths: Paths, args: &RunArgs) -> anyhow::Result<Map<String, Value>> {
    let Some(path) = &args.params else { return merge(None, &args.settings) };
    let text = paths.read(path, Limits::DEFAULT.parameter_bytes)?;
    let text = String::from_utf8(text).map_err(|error| user(format!("{}: no UTF-8: {error}", shown(path))))?;
    merge(Some((&shown(path), &text)), &args.settings)
}

/// A path under `init_adapter` is imported, and the job is given its digest in place of the path.
fn init_adapter(
    store: &Store,
    paths: Paths,
    parameters: &mut Map<String, Value>,
    model: &Model,
    base: &Name,
) -> anyhow::Result<Vec<(Digest, Arc<AdapterWeights>)>> {
    let path = match parameters.get_mut(INIT_ADAPTER) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::String(path)) => path,
        Some(other) => return Err(user(format!("{INIT_ADAPTER} is {other}, expected the path of a PEFT folder"))),
    };
    let imported = import::adapter(store, paths, Path::new(path.as_str()), &model.config, base.as_str());
    let (digest, weights) = imported.map_err(|error| match exit_code(&error) {
        2 => user(format!("{INIT_ADAPTER}: {error}")),
        _ => error,
    })?;
    *path = digest.to_string();
    Ok(vec![(digest, Arc::new(weights))])
}

fn rows(store: &Store, name: &Name, held_out: &HeldOutArgs) -> anyhow::Result<(Arc<Rows>, Option<Arc<Rows>>)> {
    let (file, manifest) = store.dataset(name)?;
    let share = match (held_out.held_out_count, held_out.held_out_fraction) {
        (Some(count), _) => HeldOut::Count(count.get()),
        (None, Some(part)) => HeldOut::Fraction(part),
        (None, None) => {
            let train = Rows { name: name.clone(), digest: manifest.digest, file, lines: None };
            let second = held_out.held_out.as_ref().map(|name| whole(store, name)).transpose()?;
            return Ok((Arc::new(train), second));
        }
    };
    let count = usize::try_from(manifest.rows).unwrap_or(usize::MAX);
    let split = data::split(count, share, SPLIT_SEED).map_err(|error| user(format!("data set `{name}`: {error}")))?;
    let part = |file, rows: Vec<usize>| {
        let lines = rows.into_iter().map(|row| row as u64 + 1).collect();
        Arc::new(Rows { name: name.clone(), digest: manifest.digest, file, lines: Some(lines) })
    };
    let second = file.try_clone()?;
    Ok((part(file, split.train), Some(part(second, split.held_out))))
}

fn whole(store: &Store, name: &Name) -> anyhow::Result<Arc<Rows>> {
    let (file, manifest) = store.dataset(name)?;
    Ok(Arc::new(Rows { name: name.clone(), digest: manifest.digest, file, lines: None }))
}
