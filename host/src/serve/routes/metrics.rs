//! A job's numbers and its log: as JSON page by page, as CSV and text whole.
//!
//! The numbers of steps and evaluations are the engine's; metrics and log are the component's own word.

use std::io::Write;

use axum::extract::State;
use axum::response::{Json as Answer, Response};
use nodus_api::{Code, MetricPage, Problem};
use nodus_state::{Event, EventKind, JobId, Stream, TenantId};
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::IntoParams;

use super::usual::{App, Caller, Failure, Id, Query, Service};
use crate::serve::{download, words};
use crate::text::escape;

const NUMBERS: [EventKind; 3] = [EventKind::Step, EventKind::Evaluation, EventKind::Metric];
const PAGE: u64 = 1000;
const PAGE_MAX: u64 = 10_000;

/// Where to begin.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PageQuery {
    /// Only events after this position: `next` of the page before
    after: Option<u64>,
    /// How many, 1 to 10000; 1000 without a word
    limit: Option<u64>,
}

/// A job's steps, evaluations and metrics
#[utoipa::path(
    get, path = "/v1/jobs/{id}/metrics", tag = "results", params(("id" = String, Path, description = "The job's id"), PageQuery),
    responses(
        (status = 200, body = MetricPage),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn json(
    State(app): State<App>,
    caller: Caller,
    Id(id): Id<JobId>,
    Query(query): Query<PageQuery>,
) -> Result<Answer<MetricPage>, Failure> {
    let (after, limit) = (query.after.unwrap_or(0), query.limit.unwrap_or(PAGE));
    if !(1..=PAGE_MAX).contains(&limit) {
        return Err(Failure::new(Code::BadParameter, format!("limit is {limit}, expected 1 to {PAGE_MAX}")));
    }
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let events = app.blocking(move |service| Ok(service.state.events(caller.0.id, Stream::Job(id), after, &NUMBERS, limit)?)).await?;
    let next = events.last().filter(|_| events.len() == limit).map(|event| event.position);
    Ok(Answer(MetricPage { events: events.into_iter().map(words::event).collect(), next }))
}

/// A job's steps, evaluations and metrics as a table
///
/// Columns: `kind,step,name,value`. A step has a row for each of its numbers, an evaluation too, with the data's name before a dot.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/metrics.csv", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = String, content_type = "text/csv"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn csv(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Response, Failure> {
    let of = caller.0.id;
    app.blocking(move |service| Ok(service.state.job(of, id)?)).await?;
    let work = move |service: &Service, out: &mut dyn Write| {
        writeln!(out, "kind,step,name,value")?;
        each(service, of, id, &NUMBERS, |event| rows(event, out))
    };
    download::written(&app, of, "text/csv; charset=utf-8", work).await
}

/// A job's log
///
/// What the component wrote, a line each, as `level: message`; control characters are escaped.
#[utoipa::path(
    get, path = "/v1/jobs/{id}/log", tag = "results", params(("id" = String, Path, description = "The job's id")),
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn log(State(app): State<App>, caller: Caller, Id(id): Id<JobId>) -> Result<Response, Failure> {
    let of = caller.0.id;
    app.blocking(move |service| Ok(service.state.job(of, id)?)).await?;
    let work = move |service: &Service, out: &mut dyn Write| {
        each(service, of, id, &[EventKind::Log], |event| {
            let body: Map<String, Value> = serde_json::from_str(&event.body).unwrap_or_default();
            let field = |name: &str| body.get(name).and_then(Value::as_str).unwrap_or_default();
            writeln!(out, "{}: {}", escape(field("level")), escape(field("message")))?;
            Ok(())
        })
    };
    download::written(&app, of, "text/plain; charset=utf-8", work).await
}

/// Every event of these kinds, page by page.
fn each(
    service: &Service,
    of: TenantId,
    job: JobId,
    kinds: &[EventKind],
    mut take: impl FnMut(&Event) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut after = 0;
    loop {
        let page = service.state.events(of, Stream::Job(job), after, kinds, 1000)?;
        let Some(last) = page.last() else { return Ok(()) };
        after = last.position;
        page.iter().try_for_each(&mut take)?;
    }
}

/// The numbers of an event, a row each.
fn rows(event: &Event, out: &mut dyn Write) -> anyhow::Result<()> {
    let body: Map<String, Value> = serde_json::from_str(&event.body).unwrap_or_default();
    let text = |name: &str| body.get(name).and_then(Value::as_str);
    let step = body.get("step").and_then(Value::as_u64).unwrap_or_default();
    let prefix = match event.kind {
        EventKind::Metric => {
            let value = body.get("value").map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned));
            let (name, value) = (quoted(text("name").unwrap_or_default()), quoted(&value.unwrap_or_default()));
            writeln!(out, "metric,{step},{name},{value}")?;
            return Ok(());
        }
        EventKind::Evaluation => text("data").map(|data| format!("{data}.")).unwrap_or_default(),
        _ => String::new(),
    };
    for (name, value) in body.iter().filter(|(name, value)| value.is_number() && *name != "step") {
        writeln!(out, "{},{step},{},{value}", event.kind, quoted(&format!("{prefix}{name}")))?;
    }
    Ok(())
}

/// A field of a table. What a spreadsheet would take for a formula is text.
fn quoted(text: &str) -> String {
    let text = escape(text);
    let is_number = text.parse::<f64>().is_ok();
    let text = if text.starts_with(['=', '+', '-', '@']) && !is_number { format!("'{text}") } else { text };
    if text.contains([',', '"', '\'']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn fields_stay_fields_and_formulas_text() {
        for (text, expected) in
            [("loss", "loss"), ("a,b", "\"a,b\""), ("a\"b", "\"a\"\"b\""), ("=1+1", "\"'=1+1\""), ("-0.5", "-0.5"), ("a\nb", "a\\nb")]
        {
            assert_eq!(quoted(text), expected);
        }
    }
}
