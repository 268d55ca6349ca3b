//! From a receipt back to the job: every input found by its digest.
//!
//! Takes nothing on trust but digests, and nothing that is not in the data folder or was sent for it.

use std::sync::Arc;

use cap_std::fs::File;
use nodus_formats::data::HeldOut as Share;
use nodus_formats::peft;
use nodus_protocol::{AdapterWeights, Digest};
use nodus_receipts::statement::DigestSet;

use super::brought::Brought;
use crate::error::user;
use crate::guest::Workshop;
use crate::import::fault;
use crate::name::Name;
use crate::receipt::{CONTRACT, ExternalEvent, HeldOut, Predicate, Resource};
use crate::run::content::Content;
use crate::run::inputs::{Job, JobComponent, OpenModel, Parts};
use crate::run::rows::Rows;
use crate::store::Store;
use crate::sweep::Point;
use crate::text::escape;

/// Refuses a receipt that cannot be replayed here, whatever the data folder has.
///
/// # Errors
/// The user's.
pub(super) fn refuse_foreign(predicate: &Predicate) -> anyhow::Result<()> {
    if predicate.contract != CONTRACT {
        let contract = escape(&predicate.contract);
        return Err(user(format!("the job ran under {contract}, this host has {CONTRACT}: bits are promised within one contract only")));
    }
    Ok(())
}

/// Where inputs are looked for: what was sent, and the data folder.
pub(super) type From<'a> = (&'a Store, Option<&'a Brought>);

/// The job that a receipt speaks of.
///
/// # Errors
/// The user's: an input is not in the data folder. Ours: the data folder is damaged.
pub(super) fn job((store, brought): From<'_>, workshop: &Workshop, predicate: &Predicate) -> anyhow::Result<Job> {
    let from = (store, brought);
    let component = component(from, workshop, &predicate.component)?;
    let model = model(store, &predicate.trunk)?;
    let (train, held_out) = rows(from, predicate)?;
    let adapters = predicate.loaded_artifacts.iter().map(|resource| adapter(from, resource, &model)).collect::<anyhow::Result<_>>()?;
    Ok(Job {
        name: None,
        varied: Point::new(),
        component: Arc::new(component),
        model: Arc::new(model),
        base: predicate.trunk.name.clone(),
        train,
        held_out,
        parameters: predicate.parameters.clone(),
        adapters,
        seed: predicate.seed,
        limits: predicate.limits,
        stop_at: predicate.events.iter().map(|ExternalEvent::StopRequested { call }| *call).next(),
        cohort: 0,
        is_urgent: false,
    })
}

fn digest(resource: &Resource) -> Digest {
    let DigestSet(digest) = resource.digest;
    digest
}

fn missing(what: &str, resource: &Resource, remedy: &str) -> anyhow::Error {
    user(format!("the {what} `{}` ({}) is not in the data folder: {remedy}", escape(&resource.name), digest(resource)))
}

fn component((store, brought): From<'_>, workshop: &Workshop, resource: &Resource) -> anyhow::Result<JobComponent> {
    let remedy = "it is kept there by the host that ran the job; --component of `audit job` brings one that the service does not send";
    if let Some(given) = brought.and_then(|brought| brought.component.as_deref()).map(Digest::of).filter(|given| *given != digest(resource))
    {
        let (name, expected) = (escape(&resource.name), digest(resource));
        return Err(user(format!("--component is {given}, expected the one that the job ran: component `{name}`, {expected}")));
    }
    let sent = brought.map(|brought| brought.component(digest(resource))).transpose()?.flatten();
    let found = if sent.is_some() { sent } else { store.component(digest(resource))? };
    let bytes = found.ok_or_else(|| missing("component", resource, remedy))?;
    JobComponent::new(workshop, bytes, escape(&resource.name), "the component")
}

fn model(store: &Store, resource: &Resource) -> anyhow::Result<OpenModel> {
    let models = store.models()?;
    let found = models.into_iter().find(|(_, manifest)| manifest.summary.digest == digest(resource));
    let (name, _) = found.ok_or_else(|| missing("model", resource, "`nodus-host model import` adds it"))?;
    OpenModel::open(store, &name)
}

fn rows(from: From<'_>, predicate: &Predicate) -> anyhow::Result<Parts> {
    match &predicate.held_out {
        HeldOut::Nothing => Ok((whole(from, &predicate.data)?, None)),
        HeldOut::Dataset { resource } => Ok((whole(from, &predicate.data)?, Some(whole(from, resource)?))),
        HeldOut::Data { rows } => {
            let (name, file, count) = dataset(from, &predicate.data)?;
            let share = Share::Count(usize::try_from(*rows).unwrap_or(usize::MAX));
            let content = Content::hashed(&name, digest(&predicate.data), file)?;
            let (train, held_out) = Rows::parts(&name, digest(&predicate.data), content, count, share)?;
            Ok((train, Some(held_out)))
        }
    }
}

fn whole(from: From<'_>, resource: &Resource) -> anyhow::Result<Arc<Rows>> {
    let (name, file, _) = dataset(from, resource)?;
    let content = Content::hashed(&name, digest(resource), file)?;
    Ok(Rows::whole(name, digest(resource), content))
}

/// A data set's name, its file, and how many rows it has.
fn dataset((store, brought): From<'_>, resource: &Resource) -> anyhow::Result<(Name, File, u64)> {
    if let Some((file, rows)) = brought.map(|brought| brought.data(digest(resource))).transpose()?.flatten() {
        let name = resource.name.parse().map_err(|_| user(format!("the data set's name `{}` is none", escape(&resource.name))))?;
        return Ok((name, file, rows));
    }
    let found = store.datasets()?.into_iter().find(|(_, manifest)| manifest.digest == digest(resource));
    let (name, _) = found.ok_or_else(|| missing("data set", resource, "`nodus-host data put` adds it"))?;
    let (file, manifest) = store.dataset(&name)?;
    Ok((name, file, manifest.rows))
}

fn adapter((store, brought): From<'_>, resource: &Resource, model: &OpenModel) -> anyhow::Result<(Digest, Arc<AdapterWeights>)> {
    let remedy = "it is kept there by the host that ran the job";
    let sent = brought.map(|brought| brought.adapter(digest(resource))).transpose()?.flatten();
    let found = if sent.is_some() { sent } else { store.adapter(digest(resource))? };
    let dir = found.ok_or_else(|| missing("adapter", resource, remedy))?;
    let weights = peft::read(&dir, &model.config).map_err(fault)?;
    Ok((digest(resource), Arc::new(weights)))
}
