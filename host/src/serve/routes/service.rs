//! The service itself: whether it lives, whether it can work, what it offers, what a tenant uses.
//!
//! Says nothing of one tenant to another, and nothing at all of tenants to those without a token.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Json as Answer, Response};
use nodus_api::{Code, Problem, SigningKey, TenantUsage};

use super::usual::{App, Caller, Failure, Operator, Service};
use crate::books;
use crate::serve::{document, gauges, words};

/// Your usage and quota
#[utoipa::path(
    get, path = "/v1/usage", tag = "service",
    responses(
        (status = 200, body = TenantUsage),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn usage(State(app): State<App>, caller: Caller) -> Result<Answer<TenantUsage>, Failure> {
    let tenant = caller.0;
    let of = tenant.id;
    let usage = app.blocking(move |service| Ok(service.state.usage(of)?)).await?;
    Ok(Answer(TenantUsage { tenant: tenant.name, usage: words::usage(usage), quota: words::quota(tenant.quota) }))
}

/// The key that receipts are signed with
///
/// Whoever checks a receipt should have it from the operator: a service that forged receipts would show another one here.
#[utoipa::path(
    get, path = "/v1/key", tag = "service", security(()),
    responses(
        (status = 200, body = SigningKey),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn key(State(app): State<App>) -> Result<Answer<SigningKey>, Failure> {
    let read = |service: &Service| books::public_key(&service.store.dir().map_err(Failure::ours)?).map_err(Failure::ours);
    let key = app.blocking(read).await?.ok_or_else(|| Failure::not_found("key"))?;
    let pem = key.to_pem().map_err(|error| Failure::ours(error.into()))?;
    Ok(Answer(SigningKey { keyid: key.id().to_string(), pem }))
}

/// Whether the process lives
#[utoipa::path(get, path = "/healthz", tag = "service", security(()), responses((status = 204, description = "It does")))]
pub(super) async fn healthz() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// Whether the service can take work
#[utoipa::path(
    get, path = "/readyz", tag = "service", security(()),
    responses(
        (status = 204, description = "It can"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "It cannot: it ends, or its state cannot be read or written"),
    )
)]
pub(super) async fn readyz(State(app): State<App>) -> Result<StatusCode, Failure> {
    if *app.closing.borrow() {
        return Err(Failure::new(Code::Unavailable, "the service is about to end").retry_after(10));
    }
    if app.state.is_broken() {
        return Err(Failure::new(Code::Unavailable, "the state's database is broken: the service's log says how"));
    }
    if app.state.is_refused() {
        return Err(Failure::new(Code::Unavailable, "the state's database cannot be written: the service's log says how").retry_after(10));
    }
    app.blocking(|service| Ok(service.state.is_ready()?)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The operator's numbers, for Prometheus
///
/// Needs the operator's token: `nodus-host tenant rotate --operator` shows one.
#[utoipa::path(
    get, path = "/metrics", tag = "service",
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn metrics(State(app): State<App>, _operator: Operator) -> Result<String, Failure> {
    app.blocking(gauges::render).await
}

/// This document
#[utoipa::path(get, path = "/openapi.json", tag = "service", security(()), responses((status = 200, body = Object)))]
pub(super) async fn openapi() -> Result<Response, Failure> {
    let text = document::text().map_err(|error| Failure::ours(error.into()))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], text).into_response())
}
