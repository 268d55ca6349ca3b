//! Jobs: submitted, listed, looked at, cancelled, deleted.
//!
//! Never finds a job of another tenant.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Json as Answer;
use nodus_api::{CancelRequest, Cancellation, Code, Cohort, Job, JobPage, JobState, Member, Problem, SubmitRequest, Submitted};
use nodus_protocol::Digest;
use nodus_state::{Cancelled, CohortId, EventKind, Filter, JobId, Key, StateError, TenantId};
use serde::Deserialize;
use utoipa::IntoParams;

use super::usual::{App, Caller, Failure, Id, Json, Query, Service};
use crate::serve::planner::{self, Asked, Read};
use crate::serve::submit::Draft;
use crate::serve::words;
use crate::serve::words::News;

/// Longest idempotency key.
const KEY_CHARS_MAX: usize = 255;
const PAGE: u64 = 50;
const PAGE_MAX: u64 = 200;

/// Submit a job or a sweep
///
/// Everything is checked and planned before this answers, and all members are queued, or none. With an `Idempotency-Key` the same request again answers
/// with the jobs that the first one made.
#[utoipa::path(
    post, path = "/v1/jobs", tag = "jobs",
    params(("Idempotency-Key" = Option<String>, Header, description = "1 to 255 visible ASCII characters; yours alone, and kept as long as its jobs")),
    request_body = SubmitRequest,
    responses(
        (status = 201, body = Submitted, description = "They are queued"),
        (status = 200, body = Submitted, description = "They were, under this key"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn submit(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    Json(request, _place): Json<SubmitRequest>,
) -> Result<(StatusCode, Answer<Submitted>), Failure> {
    let key = key(&headers, &request)?;
    let of = caller.0.id;
    let (request, mut read) = (Arc::new(request), None);
    let submitted = loop {
        let turn = app.submissions.take(of).await;
        let (key, request, read_before) = (key.clone(), request.clone(), read.take());
        let step = move |service: &Service| {
            let _turn = turn;
            step(service, of, key.as_ref(), &request, read_before)
        };
        match app.blocking(step).await? {
            Step::Submitted(submitted) => break submitted,
            Step::Unread(asked) => read = Some(planner::read(&app, of, *asked).await?),
        }
    };
    let jobs = submitted.jobs.iter().zip(submitted.names).map(|(id, name)| Member { id: id.to_string(), name }).collect();
    let status = if submitted.is_new { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Answer(Submitted { cohort: submitted.cohort.to_string(), jobs })))
}

/// What a submission comes to.
enum Step {
    /// Its jobs are queued, now or under its key before.
    Submitted(nodus_state::Submitted),
    /// Data is to be read first. Nothing is held meanwhile but the request, which is looked at anew after that.
    Unread(Box<Asked>),
}

fn step(service: &Service, of: TenantId, key: Option<&Key>, request: &SubmitRequest, read: Option<Read>) -> Result<Step, Failure> {
    if let Some(before) = key.map(|key| service.state.submitted(of, key)).transpose()?.flatten() {
        return Ok(Step::Submitted(before));
    }
    let draft = Draft::of(service, of, request)?;
    let asked = draft.asks();
    let Some(sizes) = service.planner.sizes(of, &asked, read) else { return Ok(Step::Unread(Box::new(asked))) };
    let (submission, adapters) = draft.plan(&sizes, &service.offers.limits)?;
    Ok(Step::Submitted(service.state.submit_from(of, key, &submission, &adapters.items(of))?))
}

fn key(headers: &HeaderMap, request: &SubmitRequest) -> Result<Option<Key>, Failure> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let is_good = |text: &&str| (1..=KEY_CHARS_MAX).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    let key = value.to_str().ok().filter(is_good);
    let key = key.ok_or_else(|| Failure::new(Code::BadParameter, "Idempotency-Key: expected 1 to 255 visible ASCII characters"))?;
    let text = serde_json::to_vec(request).map_err(|error| Failure::ours(error.into()))?;
    Ok(Some(Key { key: key.to_owned(), request: Digest::of(&text) }))
}

/// Which jobs are listed.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// Only those in this state
    state: Option<JobState>,
    /// Only those of this cohort
    cohort: Option<String>,
    /// Only those on this model
    model: Option<String>,
    /// Only those older than this job: `next` of the page before
    before: Option<String>,
    /// How many at most, 1 to 200; 50 without a word. Fewer where their parameters are large
    limit: Option<u64>,
}

/// Which members are shown.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct MembersQuery {
    /// Only those after this member: `next` of the page before
    after: Option<u64>,
    /// How many at most, 1 to 200; 50 without a word. Fewer where their parameters are large
    limit: Option<u64>,
}

fn limit(asked: Option<u64>) -> Result<usize, Failure> {
    let limit = asked.unwrap_or(PAGE);
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(Failure::new(Code::BadParameter, format!("limit is {limit}, expected 1 to {PAGE_MAX}")));
    }
    Ok(usize::try_from(limit).unwrap_or(usize::MAX))
}

/// List your jobs, the newest first
#[utoipa::path(
    get, path = "/v1/jobs", tag = "jobs", params(ListQuery),
    responses(
        (status = 200, body = JobPage),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn list(State(app): State<App>, caller: Caller, Query(query): Query<ListQuery>) -> Result<Answer<JobPage>, Failure> {
    let limit = limit(query.limit)?;
    let cohort = query.cohort.map(|text| text.parse::<CohortId>().map_err(|_| Failure::not_found("cohort"))).transpose()?;
    let before = query.before.map(|text| text.parse::<JobId>().map_err(|_| Failure::not_found("job"))).transpose()?;
    let filter = Filter { state: query.state.map(words::state_filter), cohort, model: query.model, before };
    let of = caller.0.id;
    app.blocking(move |service| {
        let page = service.state.jobs(of, &filter, limit)?;
        let next = page.jobs.last().filter(|_| page.is_more).map(|job| job.id.to_string());
        let jobs = page.jobs.into_iter().map(|job| with_news(service, of, job)).collect::<Result<_, _>>()?;
        Ok(Answer(JobPage { jobs, next }))
    })
    .await
}

/// A job with what it told last.
fn with_news(service: &Service, of: TenantId, mut job: nodus_state::Job) -> Result<Job, Failure> {
    let latest = |kind| match service.state.latest_event(of, job.id, kind) {
        Ok(event) => Ok(event.and_then(|event| serde_json::from_str(&event.body).ok())),
        // Deleted since it was listed.
        Err(StateError::NotFound(_)) => Ok(None),
        Err(error) => Err(error),
    };
    let (step, evaluation, progress) = (latest(EventKind::Step)?, latest(EventKind::Evaluation)?, latest(EventKind::Progress)?);
    if service.offers.holds && job.state == nodus_state::JobState::Queued {
        job.reason = Some("the service takes jobs and starts none now".to_owned());
    }
    Ok(words::job(job, News { step, evaluation, progress }))
}

/// Look a job up
#[utoipa::path(
    get, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = Job),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn get(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Answer<Job>, Failure> {
    let of = caller.0.id;
    app.blocking(move |service| with_news(service, of, service.state.job(of, id)?).map(Answer)).await
}

/// Look the members of a sweep up, in their order
#[utoipa::path(
    get, path = "/v1/cohorts/{id}", tag = "jobs", params(("id" = String, Path, description = "The cohort's id"), MembersQuery),
    responses(
        (status = 200, body = Cohort),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn cohort(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id<CohortId>,
    Query(query): Query<MembersQuery>,
) -> Result<Answer<Cohort>, Failure> {
    let (of, limit) = (caller.0.id, limit(query.limit)?);
    app.blocking(move |service| {
        let page = service.state.members(of, id, query.after, limit)?;
        let next = page.jobs.last().filter(|_| page.is_more).map(|job| job.member);
        let jobs = page.jobs.into_iter().map(|job| with_news(service, of, job)).collect::<Result<_, _>>()?;
        Ok(Answer(Cohort { id: id.to_string(), jobs, next }))
    })
    .await
}

/// Cancel a job
///
/// One that was not started yet is cancelled at once. One that runs is asked to end well and keeps what it trained (`stop`), or is cut off (`cancel`).
#[utoipa::path(
    post, path = "/v1/jobs/{id}/cancel", tag = "jobs", params(("id" = String, Path, description = "The job's id")),
    request_body = CancelRequest,
    responses(
        (status = 202, body = Cancellation),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn cancel(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id<JobId>,
    Json(request, _place): Json<CancelRequest>,
) -> Result<(StatusCode, Answer<Cancellation>), Failure> {
    let done = app.blocking(move |service| Ok(service.state.cancel(caller.0.id, id, words::stop(request.how))?)).await?;
    Ok((StatusCode::ACCEPTED, Answer(Cancellation { ended: done == Cancelled::AtOnce })))
}

/// Delete a job that ended, with all that was kept of it
#[utoipa::path(
    delete, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 204, description = "It is gone"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn remove(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<StatusCode, Failure> {
    app.blocking(move |service| Ok(service.state.delete_job(caller.0.id, id)?)).await?;
    Ok(StatusCode::NO_CONTENT)
}
