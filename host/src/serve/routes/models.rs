//! Base models: the operator's, listed.
//!
//! `nodus-host model import` brings them; no tenant can.

use axum::extract::State;
use axum::response::Json;
use nodus_api::{ModelList, Problem};

use super::usual::{App, Caller, Failure};
use crate::serve::words;

/// List the models
#[utoipa::path(
    get, path = "/v1/models", tag = "models",
    responses(
        (status = 200, body = ModelList),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn list(State(app): State<App>, _caller: Caller) -> Result<Json<ModelList>, Failure> {
    let models = app.blocking(|service| service.store.models().map_err(Failure::ours)).await?;
    Ok(Json(ModelList { models: models.into_iter().map(|(name, manifest)| words::model(name.to_string(), manifest)).collect() }))
}
