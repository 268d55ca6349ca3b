//! Who asks: a bearer token becomes a tenant, within its rate.
//!
//! Never says why a token opens nothing.

use std::time::Instant;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use nodus_api::Code;
use nodus_protocol::Digest;
use nodus_state::{Bearer, Tenant, TenantId};

use super::failure::Failure;
use super::service::App;

/// The tenant that asks, and the SHA-256 of the token that says so.
pub(super) struct Caller(pub(super) Tenant, pub(super) Digest);

/// Whose request it is, for what is read of it after that was asked.
#[derive(Clone, Copy)]
pub(super) struct Of(pub(super) TenantId);

/// The operator asks.
pub(super) struct Operator;

impl FromRequestParts<App> for Operator {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        match bearer(&parts.headers, app).await?.0 {
            Bearer::Operator => Ok(Self),
            Bearer::Tenant(_) => Err(Failure::new(Code::WrongBearer, "this is a tenant's token, expected the operator's")),
        }
    }
}

impl FromRequestParts<App> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Failure> {
        let (Bearer::Tenant(tenant), token) = bearer(&parts.headers, app).await? else {
            return Err(Failure::new(Code::WrongBearer, "this is the operator's token, expected a tenant's"));
        };
        let rate = tenant.quota.requests_per_second;
        match app.rates.take(tenant.id, rate, Instant::now()) {
            Ok(()) => {
                parts.extensions.insert(Of(tenant.id));
                Ok(Self(*tenant, token))
            }
            Err(wait) => {
                let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
                let detail = format!("at most {} requests a second", rate.unwrap_or_default());
                Err(Failure::new(Code::RateLimited, detail).retry_after(seconds.max(1)))
            }
        }
    }
}

async fn bearer(headers: &HeaderMap, app: &App) -> Result<(Bearer, Digest), Failure> {
    let refused = || {
        Failure::new(
            Code::Unauthenticated,
            "the request has no token, or one that is not valid: expected the header `Authorization: Bearer TOKEN`",
        )
    };
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let (scheme, token) = given.and_then(|value| value.split_once(' ')).ok_or_else(refused)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(refused());
    }
    let token = token.trim().to_owned();
    let digest = Digest::of(token.as_bytes());
    let whose = app.blocking(move |service| Ok(service.state.bearer(&token)?)).await?;
    Ok((whose.ok_or_else(refused)?, digest))
}
