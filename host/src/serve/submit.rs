//! From a request to the jobs it asks for: everything looked up, checked as `run` checks it, and planned, before anything is queued.
//!
//! Decides nothing about when or where a job runs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use nodus_api::{Code, HeldOut as AskedHeldOut, SubmitRequest};
use nodus_formats::data::{Form, HeldOut as Share};
use nodus_protocol::{Digest, LoraConfig};
use nodus_sandbox::Limits;
use nodus_state::{Common, HeldOut, Item, ItemKind, Lane, Member, Named, Priority, Reference, Submission, TenantId};
use serde_json::{Map, Value, json};

use super::adapters::Adapters;
use super::failure::Failure;
use super::service::Service;
use crate::error::{there_are, user};
use crate::limits::{self, Limit, over};
use crate::name::Name;
use crate::run::inputs::{OpenModel, Parts};
use crate::run::plan::{self, Sizes};
use crate::run::rows::Rows;
use crate::settings::{INIT_ADAPTER, sorted};
use crate::sweep::{Point, Sweep, name_of, points};
use crate::text::escape;

/// Plans that are remembered; beyond that, all are forgotten.
const PLANS_MAX: usize = 4096;
/// The parameters that a plan follows from.
const PLANNED: [&str; 6] = ["rank", "targets", "layers", "batch_size", "max_length", INIT_ADAPTER];

/// Models that are open, and what was planned before.
#[derive(Default)]
pub(crate) struct Planner {
    models: Mutex<BTreeMap<Name, Arc<OpenModel>>>,
    plans: Mutex<BTreeMap<Digest, Limits>>,
    /// Held while data is read: one at a time, since each reading takes a processor.
    reading: Mutex<()>,
}

/// The jobs that a tenant asks for, and the adapters that they start from. What all members have in common is there once, however many there are.
pub(super) fn submission(service: &Service, of: TenantId, request: SubmitRequest) -> Result<(Submission, Adapters), Failure> {
    let component = item(service, of, ItemKind::Component, &request.component)?;
    let model = service.planner.model(service, &request.model)?;
    let data = item(service, of, ItemKind::Data, &request.data)?;
    let refused = |error: anyhow::Error| Failure::of(Code::JobRefused, error);
    tokenised(&model, &data)?;
    let (held_out, parts) = parts(service, of, (&model, &data), request.held_out.as_ref())?;
    let given = given(&request.limits).map_err(refused)?;
    let lane = match request.lane {
        nodus_api::Lane::Fused => Lane::Fused,
        nodus_api::Lane::Mps => Lane::Mps,
        nodus_api::Lane::Solo => Lane::Solo,
    };
    if !service.offers.lanes.contains(&lane) {
        let offered: Vec<&str> = service.offers.lanes.iter().map(|lane| lane.as_str()).collect();
        return Err(Failure::new(Code::NotOffered, format!("lane `{lane}` is not offered here, expected one of {}", offered.join(", "))));
    }
    let priority = match request.priority {
        nodus_api::Priority::High => Priority::High,
        nodus_api::Priority::Low => Priority::Low,
    };
    let is_swept = !request.sweep.is_empty();
    let points = members(&request).map_err(refused)?;
    let mut parameters = sorted(request.parameters);
    let (mut adapters, mut sizes) = (Adapters::default(), None);
    let in_common = adapters.init((service, of), &mut parameters, &model)?;
    let common_bytes = length(&parameters);
    let member = |varied: Point| {
        let mut own = varied.clone();
        let adapter = adapters.init((service, of), &mut own, &model)?.or_else(|| in_common.clone());
        let loaded = adapter.as_ref().map(|(_, config)| config);
        let planned = planned(&parameters, &own);
        let limits = service.planner.limits((&model, &data, &held_out), &parts, (&planned, loaded, &given), &mut sizes);
        let limits = limits::within(limits, &given, &service.offers.limits).map_err(|error| refused(user(error.to_string())))?;
        within(common_bytes, &own, &limits).map_err(refused)?;
        own.retain(|key, value| varied.get(key) != Some(value));
        let limits = limits.entries().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let name = if is_swept { name_of(&varied) } else { String::new() };
        Ok(Member { name, varied, parameters: own, limits, init_adapter: adapter.map(|(digest, _)| digest) })
    };
    let mut members = points.into_iter().map(member).collect::<Result<Vec<_>, Failure>>()?;
    let limits = members.first().map(|member| member.limits.clone()).unwrap_or_default();
    members.iter_mut().for_each(|member| member.limits.retain(|name, value| limits.get(name) != Some(value)));
    let common = Common {
        component: Named { name: component.name.clone().unwrap_or_else(|| component.digest.to_string()), digest: component.digest },
        model: Named { name: model.name.to_string(), digest: model.digest },
        data: Named { name: data.name.clone().unwrap_or_default(), digest: data.digest },
        held_out,
        parameters,
        seed: request.seed,
        limits,
        lane,
        priority,
    };
    Ok((Submission { common, members }, adapters))
}

/// The parameters that a plan follows from.
fn planned(common: &Map<String, Value>, own: &Map<String, Value>) -> Map<String, Value> {
    PLANNED.iter().filter_map(|key| Some(((*key).to_owned(), own.get(*key).or_else(|| common.get(*key))?.clone()))).collect()
}

/// Bytes of parameters as JSON.
fn length(parameters: &Map<String, Value>) -> u64 {
    json!(parameters).to_string().len() as u64
}

/// The sweep's combinations; one without any for a single job.
fn members(request: &SubmitRequest) -> anyhow::Result<Vec<Point>> {
    let sweep = |axis: &nodus_api::SweepAxis| {
        if request.parameters.contains_key(&axis.key) {
            return Err(user(format!("`{}` is both set and swept, expected one of the two", escape(&axis.key))));
        }
        Sweep::new(axis.key.clone(), axis.values.clone()).map_err(|error| user(error.to_string()))
    };
    points(&request.sweep.iter().map(sweep).collect::<anyhow::Result<Vec<_>>>()?)
}

fn given(given: &BTreeMap<String, u64>) -> anyhow::Result<Vec<Limit>> {
    let limit = |(name, value): (&String, &u64)| {
        let limit = Limit::new(name, &value.to_string()).map_err(|error| user(error.to_string()))?;
        if limit.is_of_uploads() {
            return Err(user(format!("limit `{name}` bounds components and is the operator's: expected it to be left out")));
        }
        Ok(limit)
    };
    given.iter().map(limit).collect()
}

/// Refuses parameters that the sandbox would refuse later: those in common, of so many bytes, and a member's own.
fn within(common_bytes: u64, own: &Map<String, Value>, limits: &Limits) -> anyhow::Result<()> {
    // One object of both has a pair of brackets less, and a comma where there is something on both sides of it.
    let empty = "{}".len() as u64;
    let own_bytes = length(own);
    let comma = u64::from(common_bytes > empty && own_bytes > empty);
    let (needed, allowed) = (common_bytes + own_bytes - empty + comma, limits.parameter_bytes);
    if needed > allowed {
        return Err(user(format!("the parameters have {needed} bytes, limit `parameter-bytes` allows {allowed}")));
    }
    Ok(())
}

/// By id, or by name.
fn item(service: &Service, of: TenantId, kind: ItemKind, text: &str) -> Result<Item, Failure> {
    let reference = match text.parse::<Digest>() {
        Ok(digest) => Reference::Digest(digest),
        Err(_) => Reference::Name(text.to_owned()),
    };
    match service.state.item(of, kind, &reference) {
        Err(nodus_state::StateError::NotFound(what)) => {
            let asked: String = text.chars().take(80).collect();
            let items = service.state.items(of, kind)?;
            let names: Vec<String> = items.into_iter().map(|item| item.name.unwrap_or_else(|| item.digest.to_string())).collect();
            let are = there_are(&asked, &names, "`nodus-host upload FILE` adds one");
            Err(Failure::new(Code::JobRefused, format!("there is no {what} `{}`{are}", escape(&asked))))
        }
        found => Ok(found?),
    }
}

/// Refuses text that nothing could make tokens of.
fn tokenised(model: &OpenModel, data: &Item) -> Result<(), Failure> {
    let form = data.about.get("form").and_then(Value::as_str).unwrap_or_default();
    if model.text.is_some() || form == Form::Tokens.to_string() {
        return Ok(());
    }
    let (model, data) = (&model.name, data.name.as_deref().unwrap_or_default());
    Err(Failure::new(
        Code::JobRefused,
        format!("data set `{data}` is {form}, and model `{model}` came without a tokenizer: expected rows of `tokens`"),
    ))
}

/// What the job trains on and may evaluate on, as the state keeps it and as rows.
fn parts(
    service: &Service,
    of: TenantId,
    (model, data): (&OpenModel, &Item),
    asked: Option<&AskedHeldOut>,
) -> Result<(HeldOut, Parts), Failure> {
    let open = |item: &Item| -> Result<(Name, cap_std::fs::File), Failure> {
        let files = service.state.item_files(of, ItemKind::Data, &Reference::Digest(item.digest))?;
        let file = files.first().ok_or_else(|| Failure::ours(anyhow::anyhow!("data set {} has no file", item.digest)))?;
        let name = item.name.as_deref().unwrap_or_default().parse().map_err(|error| Failure::ours(anyhow::Error::new(error)))?;
        Ok((name, service.state.open_file(file)?))
    };
    let (name, file) = open(data)?;
    let share = match asked {
        None => return Ok((HeldOut::Nothing, (Rows::whole(name, data.digest, file), None))),
        Some(AskedHeldOut::Data(second)) => {
            let second = item(service, of, ItemKind::Data, second)?;
            tokenised(model, &second)?;
            let (second_name, second_file) = open(&second)?;
            let named = Named { name: second_name.to_string(), digest: second.digest };
            let second = Rows::whole(second_name, second.digest, second_file);
            return Ok((HeldOut::Data(named), (Rows::whole(name, data.digest, file), Some(second))));
        }
        Some(AskedHeldOut::Count(count)) => {
            (HeldOut::Count(*count), Share::Count(usize::try_from(*count).unwrap_or(usize::MAX)), *count > 0)
        }
        Some(AskedHeldOut::Fraction(part)) => (HeldOut::Fraction(*part), Share::Fraction(*part), *part > 0.0 && *part < 1.0),
    };
    let (kept, share, is_sound) = share;
    if !is_sound {
        return Err(Failure::new(Code::JobRefused, "held_out: expected a count of 1 or more, or a fraction above 0 and below 1"));
    }
    let rows = data.about.get("rows").and_then(Value::as_u64).unwrap_or_default();
    let (train, second) = Rows::parts(&name, data.digest, file, rows, share).map_err(|error| Failure::of(Code::JobRefused, error))?;
    Ok((kept, (train, Some(second))))
}

impl Planner {
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

    /// A job's limits: the defaults, its device memory as it is planned by these of its parameters, and what was given over both.
    fn limits(
        &self,
        (model, data, held_out): (&OpenModel, &Item, &HeldOut),
        (train, second): &Parts,
        (parameters, loaded, given): (&Map<String, Value>, Option<&LoraConfig>, &[Limit]),
        sizes: &mut Option<(usize, Sizes)>,
    ) -> Limits {
        let key = Digest::of(json!([model.digest, data.digest, held_out, parameters]).to_string().as_bytes());
        let plans = || self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let known = plans().get(&key).copied();
        let limits = known.unwrap_or_else(|| {
            // The other members are of the same rows.
            let max_length = plan::max_length(parameters, &model.config);
            let (_, sizes) = match sizes.take().filter(|(of, _)| *of == max_length) {
                Some(known) => sizes.insert(known),
                None => {
                    let _turn = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
                    sizes.insert((max_length, plan::sizes(model, (train, second.as_deref()), max_length)))
                }
            };
            let limits = plan::planned(model, sizes, (parameters, loaded));
            let mut plans = plans();
            if plans.len() >= PLANS_MAX {
                plans.clear();
            }
            plans.insert(key, limits);
            limits
        });
        over(limits, given)
    }
}

#[cfg(test)]
mod tests {
    use nodus_sandbox::Limits;
    use serde_json::{Map, Value, json};

    use super::{length, within};

    /// To the byte what the job is given, however its parameters are divided.
    #[test]
    fn the_length_of_parameters_is_that_of_the_whole() {
        let object = |value: Value| value.as_object().unwrap().clone();
        for (common, own) in [
            (json!({}), json!({})),
            (json!({"a": "x"}), json!({})),
            (json!({}), json!({"b": 1})),
            (json!({"a": [1]}), json!({"b": 1, "c": {}})),
        ] {
            let (common, own) = (object(common), object(own));
            let whole: Map<String, Value> = common.clone().into_iter().chain(own.clone()).collect();
            for (bytes, is_within) in [(length(&whole), true), (length(&whole) - 1, false)] {
                let limits = Limits { parameter_bytes: bytes, ..Limits::DEFAULT };
                assert_eq!(within(length(&common), &own, &limits).is_ok(), is_within, "{whole:?}");
            }
        }
    }
}
