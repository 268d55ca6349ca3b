//! From a request to the jobs it asks for: everything looked up, checked as `run` checks it, and planned, before anything is queued.
//!
//! Decides nothing about when or where a job runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodus_api::{Code, HeldOut as AskedHeldOut, SubmitRequest};
use nodus_formats::data::Form;
use nodus_protocol::{Digest, LoraConfig};
use nodus_sandbox::Limits;
use nodus_state::{Common, HeldOut, Item, ItemKind, Lane, Member, Named, Priority, Reference, Submission, TenantId};
use serde_json::{Map, Value, json};

use super::adapters::Adapters;
use super::failure::Failure;
use super::planner::{Asked, Data};
use super::service::Service;
use crate::error::{there_are, user};
use crate::limits::{self, Limit, over};
use crate::run::inputs::{self, OpenModel};
use crate::run::plan;
use crate::run::sizes::Sizes;
use crate::settings::{INIT_ADAPTER, sorted};
use crate::sweep::{Point, Sweep, name_of, points};
use crate::text::escape;

/// What the members of a sweep may have of their own, together: as JSON, and so a few times as much of memory while it is looked at.
const VARIED_BYTES_MAX: u64 = 1 << 20;
/// The parameters that a plan follows from.
const PLANNED: [&str; 5] = ["rank", "targets", "layers", "batch_size", MAX_LENGTH];
const MAX_LENGTH: &str = "max_length";

/// The jobs that a tenant asks for, checked in all but what follows from the data's content. What all members have in common is there once, however many
/// there are.
pub(super) struct Draft {
    /// All but the limits.
    common: Common,
    members: Vec<Drafted>,
    /// The limits but for the memory that is planned.
    limits: Limits,
    given: Vec<Limit>,
    adapters: Adapters,
    model: Arc<OpenModel>,
    data: Data,
}

/// A member of them.
struct Drafted {
    name: String,
    varied: Point,
    /// Its parameters beside those in common.
    own: Map<String, Value>,
    /// How many tokens of a line it reads.
    max_length: usize,
    init_adapter: Option<(Digest, LoraConfig)>,
}

impl Draft {
    /// Looks everything up, and refuses what can be refused before data is read.
    pub(super) fn of(service: &Service, of: TenantId, request: &SubmitRequest) -> Result<Self, Failure> {
        let component = item(service, of, ItemKind::Component, &request.component)?;
        let model = service.planner.model(service, &request.model)?;
        let data = data(service, of, &model, request)?;
        let refused = |error: anyhow::Error| Failure::of(Code::JobRefused, error);
        let given = given(&request.limits).map_err(refused)?;
        let (lane, priority) = (lane(service, request.lane)?, priority(request.priority));
        let limits = unplanned(&given, &service.offers.limits).map_err(refused)?;
        inputs::bounded(data.bytes(), &limits).map_err(refused)?;
        let is_swept = !request.sweep.is_empty();
        let points = members(request).map_err(refused)?;
        service.state.admits(of, priority, points.len() as u64)?;
        let mut parameters = sorted(request.parameters.clone());
        let mut adapters = Adapters::default();
        let in_common = adapters.init((service, of), &mut parameters, &model)?;
        let common_bytes = length(&parameters);
        let member = |varied: Point| {
            let mut own = varied.clone();
            let init_adapter = adapters.init((service, of), &mut own, &model)?.or_else(|| in_common.clone());
            within(common_bytes, &own, &limits).map_err(refused)?;
            let says = if own.contains_key(MAX_LENGTH) { &own } else { &parameters };
            let max_length = plan::max_length(says, &model.config);
            own.retain(|key, value| varied.get(key) != Some(value));
            let name = if is_swept { name_of(&varied) } else { String::new() };
            Ok(Drafted { name, varied, own, max_length, init_adapter })
        };
        let members = points.into_iter().map(member).collect::<Result<Vec<_>, Failure>>()?;
        let common = Common {
            component: Named { name: component.name.clone().unwrap_or_else(|| component.digest.to_string()), digest: component.digest },
            model: Named { name: model.name.to_string(), digest: model.digest },
            data: Named { name: data.train.name.clone().unwrap_or_default(), digest: data.train.digest },
            held_out: data.held_out.clone(),
            parameters,
            seed: request.seed,
            limits: BTreeMap::new(),
            lane,
            priority,
        };
        Ok(Self { common, members, limits, given, adapters, model, data })
    }

    /// What must be known of the data; of no length where no memory is planned.
    pub(super) fn asks(&self) -> Asked {
        let planned = self.members.iter().filter(|_| plan::is_planned(&self.given));
        let lengths = planned.map(|member| member.max_length).collect();
        Asked { model: self.model.clone(), data: self.data.clone(), lengths }
    }

    /// Plans each member's memory, and puts down once what their limits have in common.
    pub(super) fn plan(self, sizes: &BTreeMap<usize, Arc<Sizes>>, maxima: &Limits) -> Result<(Submission, Adapters), Failure> {
        let Self { mut common, members, limits: unplanned, given, adapters, model, .. } = self;
        // Of members that vary in nothing that a plan follows from.
        let mut usual: Option<Limits> = None;
        let member = |Drafted { name, varied, own, max_length, init_adapter }: Drafted| {
            let plan = |sizes: &Arc<Sizes>| {
                let loaded = init_adapter.as_ref().map(|(_, config)| config);
                over(plan::planned(&model, sizes, (&planned([&own, &varied, &common.parameters]), loaded)), &given)
            };
            let plan = || sizes.get(&max_length).map_or(unplanned, plan);
            let is_usual = !PLANNED.iter().chain(&[INIT_ADAPTER]).any(|key| varied.contains_key(*key));
            let limits = if is_usual { *usual.get_or_insert_with(plan) } else { plan() };
            let limits = limits::within(limits, &given, maxima);
            let limits = limits.map_err(|error| Failure::of(Code::JobRefused, user(error.to_string())))?;
            let limits = limits.entries().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            Ok(Member { name, varied, parameters: own, limits, init_adapter: init_adapter.map(|(digest, _)| digest) })
        };
        let mut members = members.into_iter().map(member).collect::<Result<Vec<_>, Failure>>()?;
        common.limits = members.first().map(|member| member.limits.clone()).unwrap_or_default();
        members.iter_mut().for_each(|member| member.limits.retain(|name, value| common.limits.get(name) != Some(value)));
        Ok((Submission { common, members }, adapters))
    }
}

fn lane(service: &Service, asked: nodus_api::Lane) -> Result<Lane, Failure> {
    let lane = match asked {
        nodus_api::Lane::Fused => Lane::Fused,
        nodus_api::Lane::Mps => Lane::Mps,
        nodus_api::Lane::Solo => Lane::Solo,
    };
    if service.offers.lanes.contains(&lane) {
        return Ok(lane);
    }
    let offered: Vec<&str> = service.offers.lanes.iter().map(|lane| lane.as_str()).collect();
    Err(Failure::new(Code::NotOffered, format!("lane `{lane}` is not offered here, expected one of {}", offered.join(", "))))
}

fn priority(asked: nodus_api::Priority) -> Priority {
    match asked {
        nodus_api::Priority::High => Priority::High,
        nodus_api::Priority::Low => Priority::Low,
    }
}

/// A job's limits within what the operator allows; its memory, which is planned later, only where it was given.
fn unplanned(given: &[Limit], maxima: &Limits) -> anyhow::Result<Limits> {
    let defaults = Limits { device_bytes: 0, activation_bytes: 0, ..Limits::DEFAULT };
    limits::within(over(defaults, given), given, maxima).map_err(|error| user(error.to_string()))
}

/// The parameters that a plan follows from, each from the first of these that has it.
fn planned<const N: usize>(parameters: [&Map<String, Value>; N]) -> Map<String, Value> {
    let found = |key: &&str| parameters.iter().find_map(|parameters| parameters.get(*key)).map(|value| ((*key).to_owned(), value.clone()));
    PLANNED.iter().filter_map(found).collect()
}

/// Bytes of parameters as JSON.
fn length(parameters: &Map<String, Value>) -> u64 {
    json!(parameters).to_string().len() as u64
}

/// Bytes of what all members of a sweep have of their own, as JSON, before any of it is there.
fn varied_bytes(request: &SubmitRequest) -> u64 {
    let members: u64 = request.sweep.iter().map(|axis| axis.values.len() as u64).fold(1, u64::saturating_mul);
    let values = |axis: &nodus_api::SweepAxis| axis.values.iter().map(|value| value.to_string().len() as u64).sum::<u64>();
    let of = |axis: &nodus_api::SweepAxis| (members / (axis.values.len() as u64).max(1)).saturating_mul(values(axis));
    request.sweep.iter().map(of).fold(0, u64::saturating_add)
}

/// The sweep's combinations; one without any for a single job.
fn members(request: &SubmitRequest) -> anyhow::Result<Vec<Point>> {
    let sweep = |axis: &nodus_api::SweepAxis| {
        if request.parameters.contains_key(&axis.key) {
            return Err(user(format!("`{}` is both set and swept, expected one of the two", escape(&axis.key))));
        }
        Sweep::new(axis.key.clone(), axis.values.clone()).map_err(|error| user(error.to_string()))
    };
    let axes = request.sweep.iter().map(sweep).collect::<anyhow::Result<Vec<_>>>()?;
    let bytes = varied_bytes(request);
    if bytes > VARIED_BYTES_MAX {
        return Err(user(format!("what varies between the sweep's members has {bytes} bytes in all, expected at most {VARIED_BYTES_MAX}")));
    }
    points(&axes)
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

/// What the job trains on and may evaluate on.
fn data(service: &Service, of: TenantId, model: &OpenModel, request: &SubmitRequest) -> Result<Data, Failure> {
    let find = |name: &str| {
        let data = item(service, of, ItemKind::Data, name)?;
        tokenised(model, &data).map(|()| data)
    };
    let (train, mut second) = (find(&request.data)?, None);
    let held_out = match &request.held_out {
        None => HeldOut::Nothing,
        Some(AskedHeldOut::Data(name)) => {
            let data = second.insert(find(name)?);
            HeldOut::Data(Named { name: data.name.clone().unwrap_or_default(), digest: data.digest })
        }
        Some(AskedHeldOut::Count(count)) => HeldOut::Count(*count),
        Some(AskedHeldOut::Fraction(part)) => HeldOut::Fraction(*part),
    };
    let data = Data { train, held_out, second };
    let refused = |what: String| Failure::new(Code::JobRefused, what);
    let is_sound = match data.held_out {
        HeldOut::Count(count) => count > 0,
        HeldOut::Fraction(part) => part > 0.0 && part < 1.0,
        HeldOut::Nothing | HeldOut::Data(_) => true,
    };
    if !is_sound {
        return Err(refused("held_out: expected a count of 1 or more, or a fraction above 0 and below 1".to_owned()));
    }
    let count = data.share().map(|share| share.count(data.rows())).transpose();
    count.map_err(|error| refused(format!("data set `{}`: {error}", data.train.name.as_deref().unwrap_or_default())))?;
    Ok(data)
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
