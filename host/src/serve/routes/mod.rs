//! Every route. All are documented by the annotation that makes them.
//!
//! A handler reads its request, calls the state or the store, and answers; what is decided is decided there.

mod artifacts;
mod audit;
mod components;
mod data;
mod events;
mod jobs;
mod merged;
mod metrics;
mod models;
mod page;
mod service;
mod uploads;

use axum::Router;
use axum::extract::Request;
use axum::http::{Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use nodus_api::Code;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::document;
use super::failure::Failure;
use super::gauges;
use super::linger;
use super::service::App;

pub(super) use components::FILE as COMPONENT_FILE;

/// What routes are made of.
mod usual {
    pub(super) use crate::serve::auth::{Caller, Operator};
    pub(super) use crate::serve::body::{Id, Json, Query, Text};
    pub(super) use crate::serve::download;
    pub(super) use crate::serve::failure::Failure;
    pub(super) use crate::serve::service::{App, Service};
}

/// The routes with what is said of them.
pub(super) fn documented() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(document::base())
        .routes(routes!(components::upload, components::list))
        .routes(routes!(components::get, components::remove))
        .routes(routes!(data::put, data::get, data::remove))
        .routes(routes!(data::list))
        .routes(routes!(uploads::get, uploads::remove))
        .routes(routes!(models::list))
        .routes(routes!(jobs::submit, jobs::list))
        .routes(routes!(jobs::get, jobs::remove))
        .routes(routes!(jobs::cancel))
        .routes(routes!(jobs::cohort))
        .routes(routes!(events::of_job))
        .routes(routes!(events::of_cohort))
        .routes(routes!(metrics::json))
        .routes(routes!(metrics::csv))
        .routes(routes!(metrics::log))
        .routes(routes!(artifacts::list))
        .routes(routes!(artifacts::get))
        .routes(routes!(artifacts::archive))
        .routes(routes!(artifacts::receipt))
        .routes(routes!(audit::inputs))
        .routes(routes!(audit::ledger))
        .routes(routes!(merged::merged))
        .routes(routes!(service::usage))
        .routes(routes!(service::key))
        .routes(routes!(service::healthz))
        .routes(routes!(service::readyz))
        .routes(routes!(page::page))
        .routes(routes!(service::metrics))
        .routes(routes!(service::openapi))
}

/// What answers requests.
pub(super) fn router(app: App) -> Router {
    Router::from(documented())
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn(as_they_are))
        .layer(axum::middleware::from_fn(linger::read_on))
        .layer(axum::middleware::from_fn(gauges::count))
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(panicked))
        .with_state(app)
}

/// Takes no body that would have to be unpacked: its size would be whatever its sender likes.
async fn as_they_are(request: Request, next: Next) -> Response {
    let is_packed = request.headers().get_all(header::CONTENT_ENCODING).iter().any(|coding| coding != "identity");
    if is_packed {
        let failure = Failure::new(Code::WrongMediaType, "expected the bytes as they are, without a Content-Encoding");
        return failure.into_response();
    }
    next.run(request).await
}

async fn unknown(uri: Uri) -> Failure {
    let path: String = uri.path().chars().take(200).collect();
    Failure::new(Code::UnknownRoute, format!("there is no route {}: /openapi.json lists all", crate::text::escape(&path)))
}

async fn wrong_method() -> Failure {
    Failure::new(Code::WrongMethod, "/openapi.json lists the methods of every route")
}

#[expect(clippy::needless_pass_by_value, reason = "the layer's signature")]
fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response {
    let what = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    let failure = Failure::ours(anyhow::anyhow!("a request's handler panicked: {}", what.unwrap_or("no message")));
    failure.into_response()
}

#[cfg(test)]
mod tests;
