//! `init_adapter`: an adapter that a job of the tenant's left, as what another job starts from.
//!
//! Never takes another tenant's, nor one that does not fit the model.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write as _;

use anyhow::Context as _;
use nodus_api::Code;
use nodus_formats::peft;
use nodus_protocol::{AdapterWeights, Digest, LoraConfig};
use nodus_state::{FileRef, ItemKind, JobId, Kept, NewItem, Owner, Reference, TenantId};
use serde_json::{Map, Value, json};

use super::failure::Failure;
use super::service::Service;
use crate::import;
use crate::run::inputs::OpenModel;
use crate::settings::INIT_ADAPTER;
use crate::store::{Hashing, copy};
use crate::text::escape;

/// The name of the adapter that a job is after.
pub(super) const ADAPTER: &str = "adapter";

/// Adapters that the members of one submission start from, by what its parameters call them: each is read once, and kept with the jobs or not at all.
#[derive(Default)]
pub(super) struct Adapters(BTreeMap<String, Brought>);

struct Brought {
    digest: Digest,
    config: LoraConfig,
    about: Value,
    files: Vec<(String, Kept)>,
}

impl Adapters {
    /// Turns what `init_adapter` names into a digest, as a job sees it.
    pub(super) fn init(
        &mut self,
        (service, of): (&Service, TenantId),
        parameters: &mut Map<String, Value>,
        model: &OpenModel,
    ) -> Result<Option<(Digest, LoraConfig)>, Failure> {
        let text = match parameters.get_mut(INIT_ADAPTER) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => text,
            Some(other) => {
                return Err(refused(&format!("is {}, expected a job's id, or its id and an adapter's name", escape(&other.to_string()))));
            }
        };
        let brought = match self.0.entry(text.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(bring(service, of, text, model)?),
        };
        *text = brought.digest.to_string();
        Ok(Some((brought.digest, brought.config.clone())))
    }

    /// As the state takes them, with the jobs.
    pub(super) fn items(&self, of: TenantId) -> Vec<NewItem<'_>> {
        let (kind, owner) = (ItemKind::Adapter, Owner::Tenant(of));
        let of_brought = self.0.values();
        of_brought.map(|new| NewItem { kind, owner, name: None, digest: new.digest, about: &new.about, files: &new.files }).collect()
    }
}

fn refused(what: &str) -> Failure {
    Failure::new(Code::JobRefused, format!("{INIT_ADAPTER}: {what}"))
}

/// Reads an adapter that a job left, and puts its files where the state has them.
fn bring(service: &Service, of: TenantId, text: &str, model: &OpenModel) -> Result<Brought, Failure> {
    let files = files(service, of, text).map_err(|error| match error {
        Some(failure) => failure,
        None => refused(&format!("you have no adapter `{}`, expected JOB or JOB/NAME of a job that ended well", escape(text))),
    })?;
    let weights = read(service, &files, model)?;
    let written = peft::write(&weights, model.name.as_str()).map_err(|error| Failure::ours(error.into()))?;
    let digest = peft::digest(&written);
    let mut kept = Vec::new();
    for (name, content) in &written {
        let mut staged = service.state.stage(content.len() as u64)?;
        staged.write_all(content).context("keeping an adapter").map_err(Failure::ours)?;
        kept.push(((*name).to_owned(), staged.keep()?));
    }
    Ok(Brought { digest, config: weights.config, about: json!({ "from": text }), files: kept })
}

/// An adapter that a job left, by its name; none where there is none.
pub(super) fn of_job(
    service: &Service,
    of: TenantId,
    (id, name): (JobId, &str),
    model: &OpenModel,
) -> Result<Option<AdapterWeights>, Failure> {
    match files(service, of, &format!("{id}/{name}")) {
        Ok(files) => read(service, &files, model).map(Some),
        Err(None) => Ok(None),
        Err(Some(failure)) => Err(failure),
    }
}

/// Reads a PEFT folder for a model.
fn read(service: &Service, files: &[(String, FileRef)], model: &OpenModel) -> Result<AdapterWeights, Failure> {
    let workspace = service.store.workspace().map_err(Failure::ours)?;
    for (name, file) in files {
        let mut content = Hashing::new(service.state.open_file(file)?);
        let mut keep = || copy(&mut content, &mut workspace.dir().create(name)?);
        keep().context("copying an adapter").map_err(Failure::ours)?;
        let (_, found, _) = content.finish();
        if found != file.digest {
            return Err(Failure::ours(anyhow::anyhow!("blob {} is damaged: it holds {found}", file.digest)));
        }
    }
    let read = peft::read(workspace.dir(), &model.config).map_err(import::fault);
    read.map_err(|error| Failure::of(Code::JobRefused, error.context(INIT_ADAPTER)))
}

/// The files of a PEFT folder: those of an adapter that a job left, or of one that was used before, by its digest.
fn files(service: &Service, of: TenantId, text: &str) -> Result<Vec<(String, FileRef)>, Option<Failure>> {
    let found = if let Ok(digest) = text.parse::<Digest>() {
        service.state.item_files(of, ItemKind::Adapter, &Reference::Digest(digest))
    } else {
        let (id, name) = text.split_once('/').unwrap_or((text, ADAPTER));
        let id: JobId = id.parse().map_err(|_| None)?;
        service.state.artifacts(of, id).map(|files| {
            let inside = |file: FileRef| Some(FileRef { path: file.path.strip_prefix(name)?.strip_prefix('/')?.to_owned(), ..file });
            files.into_iter().filter_map(inside).collect()
        })
    };
    match found {
        Ok(files) if files.is_empty() => Err(None),
        // Names within a PEFT folder, and no deeper.
        Ok(files) => Ok(files.into_iter().filter(|file| !file.path.contains('/')).map(|file| (file.path.clone(), file)).collect()),
        Err(nodus_state::StateError::NotFound(_)) => Err(None),
        Err(error) => Err(Some(error.into())),
    }
}
