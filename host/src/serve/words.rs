//! From the state's words to the API's.
//!
//! Adds nothing: what a tenant is not to see is not in the state's answer either.

use nodus_api as api;
use nodus_state::{Event, HeldOut, Item, Job, JobState, Lane, Priority, Quota, Stop, Usage};
use serde_json::Value;

use crate::store::ModelManifest;

/// An API word of the same text as a state's.
macro_rules! same_words {
    ($($function:ident: $from:ident { $($variant:ident),+ })+) => {$(
        pub(super) fn $function(word: $from) -> api::$from {
            match word { $($from::$variant => api::$from::$variant,)+ }
        }
    )+};
}

same_words! {
    job_state: JobState { Queued, Running, Succeeded, Stopped, Failed, Cancelled, Broken }
    lane: Lane { Fused, Mps, Solo }
    priority: Priority { High, Low }
}

pub(super) fn state_filter(word: api::JobState) -> JobState {
    match word {
        api::JobState::Queued => JobState::Queued,
        api::JobState::Running => JobState::Running,
        api::JobState::Succeeded => JobState::Succeeded,
        api::JobState::Stopped => JobState::Stopped,
        api::JobState::Failed => JobState::Failed,
        api::JobState::Cancelled => JobState::Cancelled,
        api::JobState::Broken => JobState::Broken,
    }
}

fn how(stop: Stop) -> api::How {
    match stop {
        Stop::Stop => api::How::Stop,
        Stop::Cancel => api::How::Cancel,
    }
}

pub(super) fn stop(how: api::How) -> Stop {
    match how {
        api::How::Stop => Stop::Stop,
        api::How::Cancel => Stop::Cancel,
    }
}

fn kind(kind: nodus_state::EventKind) -> api::EventKind {
    use nodus_state::EventKind as From;
    match kind {
        From::State => api::EventKind::State,
        From::Step => api::EventKind::Step,
        From::Evaluation => api::EventKind::Evaluation,
        From::Metric => api::EventKind::Metric,
        From::Progress => api::EventKind::Progress,
        From::Log => api::EventKind::Log,
        From::Artifact => api::EventKind::Artifact,
    }
}

fn held_out(held_out: HeldOut) -> Option<api::HeldOut> {
    match held_out {
        HeldOut::Nothing => None,
        HeldOut::Count(count) => Some(api::HeldOut::Count(count)),
        HeldOut::Fraction(part) => Some(api::HeldOut::Fraction(part)),
        HeldOut::Data(data) => Some(api::HeldOut::Data(data.name)),
    }
}

/// What a job told last.
pub(super) struct News {
    pub(super) step: Option<Value>,
    pub(super) evaluation: Option<Value>,
    pub(super) progress: Option<Value>,
}

pub(super) fn job(job: Job, news: News) -> api::Job {
    let spec = job.spec;
    api::Job {
        id: job.id.to_string(),
        cohort: job.cohort.to_string(),
        member: job.member,
        name: spec.name,
        state: job_state(job.state),
        ahead: job.ahead,
        reason: job.reason,
        placed: job.placed,
        stop: job.stop.map(how),
        message: job.message,
        attempts: job.attempts,
        component: spec.common.component.name,
        component_id: spec.common.component.digest.to_string(),
        model: spec.common.model.name,
        data: spec.common.data.name,
        held_out: held_out(spec.common.held_out),
        parameters: spec.common.parameters,
        seed: spec.common.seed,
        limits: spec.common.limits,
        lane: lane(spec.common.lane),
        priority: priority(spec.common.priority),
        receipt: job.has_receipt,
        last_step: news.step,
        last_evaluation: news.evaluation,
        progress: news.progress,
        device_ms: job.device_ms,
        submitted_ms: job.submitted_ms,
        started_ms: job.started_ms,
        ended_ms: job.ended_ms,
    }
}

pub(super) fn event(event: Event) -> api::Event {
    let body = serde_json::from_str(&event.body).unwrap_or(Value::String(event.body));
    api::Event { position: event.position, job: event.job.to_string(), ms: event.ms, kind: kind(event.kind), body }
}

pub(super) fn component(item: Item) -> api::Component {
    api::Component { id: item.digest.to_string(), name: item.name, bytes: item.bytes, shared: item.is_shared, created_ms: item.created_ms }
}

pub(super) fn data_set(item: Item) -> api::DataSet {
    let field = |name: &str| item.about.get(name);
    api::DataSet {
        rows: field("rows").and_then(Value::as_u64).unwrap_or_default(),
        form: field("form").and_then(Value::as_str).unwrap_or_default().to_owned(),
        name: item.name.unwrap_or_default(),
        digest: item.digest.to_string(),
        bytes: item.bytes,
        shared: item.is_shared,
        created_ms: item.created_ms,
    }
}

pub(super) fn model(name: String, manifest: ModelManifest) -> api::Model {
    let summary = manifest.summary;
    api::Model {
        name,
        digest: summary.digest.to_string(),
        architecture: summary.architecture,
        parameters: summary.parameters,
        bytes: manifest.bytes,
        tokenizer: summary.tokenizer,
    }
}

pub(super) fn quota(quota: Quota) -> api::Quota {
    let Quota { queued_jobs, running_jobs, high_jobs, stored_bytes, device_bytes, device_ms, requests_per_second } = quota;
    api::Quota { queued_jobs, running_jobs, high_jobs, stored_bytes, device_bytes, device_ms, requests_per_second }
}

pub(super) fn usage(usage: Usage) -> api::Usage {
    let Usage { queued_jobs, running_jobs, high_jobs, stored_bytes, device_bytes, device_ms } = usage;
    api::Usage { queued_jobs, running_jobs, high_jobs, stored_bytes, device_bytes, device_ms }
}
