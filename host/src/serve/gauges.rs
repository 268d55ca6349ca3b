//! Numbers for the operator's monitoring, in Prometheus' text form.
//!
//! Counts requests by route, never by what is in them; a tenant appears by name with what it uses, since only the operator reads this.

use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusRecorder};
use nodus_api::Code;
use nodus_state::JobId;
use tracing::{Instrument as _, field};

use super::failure::Failure;
use super::service::Service;
use crate::telemetry::SPANS;

const REQUESTS: &str = "nodus_http_requests_total";
const SECONDS: &str = "nodus_http_request_seconds";
const JOBS: &str = "nodus_jobs";
const STREAMS: &str = "nodus_event_streams";
const DEVICE: &str = "nodus_tenant_device_seconds";
const STORED: &str = "nodus_tenant_stored_bytes";
const HELD: &str = "nodus_tenant_device_bytes";
const REFUSALS: &str = "nodus_refusals_total";
const TURNED_AWAY: &str = "nodus_connections_turned_away_total";
/// Seconds; what a read should stay below is among them.
const BUCKETS: [f64; 10] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5, 10.0];

/// What keeps the numbers.
pub(crate) fn recorder() -> Result<PrometheusRecorder, BuildError> {
    PrometheusBuilder::new().set_buckets_for_metric(Matcher::Full(SECONDS.to_owned()), &BUCKETS).map(PrometheusBuilder::build_recorder)
}

/// Says what each number is. Once the recorder is installed.
pub(super) fn describe() {
    describe_counter!(REQUESTS, "Requests by method, route and status");
    describe_histogram!(SECONDS, metrics::Unit::Seconds, "Time until an answer's head was sent, by route");
    describe_gauge!(JOBS, "Jobs by state");
    describe_gauge!(STREAMS, "Cohorts whose events somebody follows");
    describe_gauge!(DEVICE, metrics::Unit::Seconds, "Time on the device by tenant");
    describe_gauge!(HELD, metrics::Unit::Bytes, "Device memory that running jobs are planned to hold, by tenant");
    describe_counter!(REFUSALS, "Requests that were refused, by code");
    describe_counter!(TURNED_AWAY, "Connections that there was no place for");
    describe_gauge!(STORED, metrics::Unit::Bytes, "Bytes kept by tenant, each content counted once a tenant");
}

/// Counts a connection that there was no place for.
pub(super) fn turned_away() {
    counter!(TURNED_AWAY).increment(1);
}

/// Counts a request, and has it told as a span.
pub(super) async fn count(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    let method = match *request.method() {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        // Whatever a caller calls its method is no label.
        _ => "other",
    };
    let began = Instant::now();
    let job = job_of(request.uri().path());
    let span = tracing::info_span!(
        target: SPANS, "request", otel.name = format!("{method} {route}"), otel.kind = "server", http.route = route, http.request.method = method,
        http.response.status_code = field::Empty, job
    );
    let response = next.run(request).instrument(span.clone()).await;
    span.record("http.response.status_code", response.status().as_u16());
    histogram!(SECONDS, "route" => route.clone()).record(began.elapsed());
    counter!(REQUESTS, "method" => method, "route" => route, "status" => response.status().as_u16().to_string()).increment(1);
    response
}

/// The id of the job that a request is about, if it is about one.
fn job_of(path: &str) -> Option<&str> {
    let id = path.strip_prefix("/v1/jobs/")?.split('/').next()?;
    id.parse::<JobId>().is_ok().then_some(id)
}

/// Counts a refusal.
pub(super) fn refused(code: Code) {
    counter!(REFUSALS, "code" => code.as_str()).increment(1);
}

/// All numbers, those of the state read now.
#[expect(clippy::cast_precision_loss, reason = "gauges are float64")]
pub(super) fn render(service: &Service) -> Result<String, Failure> {
    for (state, count) in service.state.jobs_by_state()? {
        gauge!(JOBS, "state" => state.as_str()).set(count as f64);
    }
    for tenant in service.state.tenants()? {
        let usage = service.state.usage(tenant.id)?;
        gauge!(DEVICE, "tenant" => tenant.name.clone()).set(usage.device_ms as f64 / 1000.0);
        gauge!(HELD, "tenant" => tenant.name.clone()).set(usage.device_bytes as f64);
        gauge!(STORED, "tenant" => tenant.name).set(usage.stored_bytes as f64);
    }
    gauge!(STREAMS).set(service.streams.len() as f64);
    Ok(service.numbers.render())
}
