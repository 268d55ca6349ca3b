//! Components: uploaded, checked, compiled, kept under their digest.
//!
//! Never keeps one that could not run.

use std::io::Read as _;

use anyhow::Context as _;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Json;
use nodus_api::{Bytes, Code, Component, ComponentList, Problem};
use nodus_protocol::Digest;
use nodus_state::{Item, ItemKind, NewItem, Owner, Reference, TenantId, Whole};

use super::usual::{App, Caller, Failure, Service, Text};
use crate::serve::{upload, words};

/// A component's one file.
pub(in crate::serve) const FILE: &str = "component.wasm";

/// Upload a component
///
/// The body is the component's bytes. It is checked and compiled before this answers; the same bytes again are what is there already.
#[utoipa::path(
    post, path = "/v1/components", tag = "components", params(("upload-digest" = Option<String>, Header, description = "The content's digest: the upload can then be gone on with where it breaks off"), ("upload-offset" = Option<u64>, Header, description = "How many bytes came before, as `/v1/uploads/DIGEST` says")),
    request_body(content = Bytes, content_type = "application/wasm"),
    responses(
        (status = 201, body = Component, description = "It is new"),
        (status = 200, body = Component, description = "It was there"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn upload(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<Component>), Failure> {
    let of = caller.0.id;
    let (item, is_new) = upload::upload(&app, of, (&headers, body), (app.upload.component_bytes, &app.compiling), move |service, whole| {
        keep(service, of, whole)
    })
    .await?;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(words::component(item))))
}

fn keep(service: &Service, of: TenantId, whole: Whole) -> Result<(Item, bool), Failure> {
    let mut bytes = Vec::new();
    whole.open()?.read_to_end(&mut bytes).context("reading an upload").map_err(Failure::ours)?;
    let compiled = service.workshop.compiled(&bytes).map_err(Failure::ours)?;
    let code = compiled.map_err(|refusal| Failure::new(Code::ComponentRefused, refusal.to_string()))?;
    let files = [(FILE.to_owned(), whole.keep()?)];
    let about = serde_json::Value::Null;
    let new =
        NewItem { kind: ItemKind::Component, owner: Owner::Tenant(of), name: None, digest: code.digest(), about: &about, files: &files };
    Ok(service.state.add_item(&new)?)
}

/// List your components and the ready-made ones
#[utoipa::path(
    get, path = "/v1/components", tag = "components",
    responses(
        (status = 200, body = ComponentList),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn list(State(app): State<App>, caller: Caller) -> Result<Json<ComponentList>, Failure> {
    let items = app.blocking(move |service| Ok(service.state.items(caller.0.id, ItemKind::Component)?)).await?;
    Ok(Json(ComponentList { components: items.into_iter().map(words::component).collect() }))
}

/// What a component is called in a path: its id, or a ready-made one's name.
fn reference(text: String) -> Reference {
    text.parse::<Digest>().map_or(Reference::Name(text), Reference::Digest)
}

/// Look a component up
#[utoipa::path(
    get, path = "/v1/components/{id}", tag = "components",
    params(("id" = String, Path, description = "Its id, or a ready-made one's name")),
    responses(
        (status = 200, body = Component),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn get(State(app): State<App>, caller: Caller, Text(id): Text) -> Result<Json<Component>, Failure> {
    let item = app.blocking(move |service| Ok(service.state.item(caller.0.id, ItemKind::Component, &reference(id))?)).await?;
    Ok(Json(words::component(item)))
}

/// Remove a component of yours
///
/// Jobs that were submitted with it keep it.
#[utoipa::path(
    delete, path = "/v1/components/{id}", tag = "components",
    params(("id" = String, Path, description = "Its id")),
    responses(
        (status = 204, description = "It is gone"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn remove(State(app): State<App>, caller: Caller, Text(id): Text) -> Result<StatusCode, Failure> {
    let owner = Owner::Tenant(caller.0.id);
    app.blocking(move |service| Ok(service.state.remove_item(owner, ItemKind::Component, &reference(id))?)).await?;
    Ok(StatusCode::NO_CONTENT)
}
