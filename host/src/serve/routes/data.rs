//! Data sets: uploaded, checked line by line, kept under a name.
//!
//! Never shows a row.

use std::io::BufReader;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Json;
use nodus_api::{Code, DataSet, DataSetList, Problem};
use nodus_formats::{FormatError, data};
use nodus_state::{Item, ItemKind, NewItem, Owner, Reference, TenantId, Whole};
use serde_json::json;

use super::usual::{App, Caller, Failure, Service, Text};
use crate::name::Name;
use crate::serve::{upload, words};

/// A data set's one file.
const FILE: &str = "data.jsonl";
/// Longest data set; the tenant's quota may say less.
const BYTES_MAX: u64 = 16 << 30;

/// Upload a data set
///
/// The body is JSON Lines: each line one of `{"text"}`, `{"prompt", "completion"}`, `{"messages"}` or `{"tokens", "weights"}`. The same content
/// under the same name again is what is there already; other content under a taken name is refused.
#[utoipa::path(
    put, path = "/v1/data/{name}", tag = "data",
    params(("name" = String, Path, description = "1 to 64 letters, digits, `-`, `_` and `.`"), ("upload-digest" = Option<String>, Header, description = "The content's digest: the upload can then be gone on with where it breaks off"), ("upload-offset" = Option<u64>, Header, description = "How many bytes came before, as `/v1/uploads/DIGEST` says")),
    request_body(content = String, content_type = "application/jsonl"),
    responses(
        (status = 201, body = DataSet, description = "It is new"),
        (status = 200, body = DataSet, description = "It was there"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn put(
    State(app): State<App>,
    caller: Caller,
    Text(name): Text,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<DataSet>), Failure> {
    let name: Name = name.parse().map_err(|error: crate::name::NameError| Failure::new(Code::BadParameter, error.to_string()))?;
    let of = caller.0.id;
    let (item, is_new) =
        upload::upload(&app, of, (&headers, body), (BYTES_MAX, &app.reading), move |service, whole| keep(service, of, &name, whole))
            .await?;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(words::data_set(item))))
}

fn keep(service: &Service, of: TenantId, name: &Name, whole: Whole) -> Result<(Item, bool), Failure> {
    let checked = data::check(BufReader::new(whole.open()?), name.as_str()).map_err(|error| match error {
        FormatError::Read { .. } | FormatError::Write { .. } => Failure::ours(error.into()),
        _ => Failure::new(Code::DataRefused, error.to_string()),
    })?;
    let about = json!({ "rows": checked.rows, "form": checked.form.to_string() });
    let blob = whole.keep()?;
    let digest = blob.digest();
    let files = [(FILE.to_owned(), blob)];
    let name = Some(name.as_str());
    let new = NewItem { kind: ItemKind::Data, owner: Owner::Tenant(of), name, digest, about: &about, files: &files };
    Ok(service.state.add_item(&new)?)
}

/// List your data sets
#[utoipa::path(
    get, path = "/v1/data", tag = "data",
    responses(
        (status = 200, body = DataSetList),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn list(State(app): State<App>, caller: Caller) -> Result<Json<DataSetList>, Failure> {
    let items = app.blocking(move |service| Ok(service.state.items(caller.0.id, ItemKind::Data)?)).await?;
    Ok(Json(DataSetList { data: items.into_iter().map(words::data_set).collect() }))
}

/// Look a data set up
#[utoipa::path(
    get, path = "/v1/data/{name}", tag = "data",
    params(("name" = String, Path, description = "Its name")),
    responses(
        (status = 200, body = DataSet),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn get(State(app): State<App>, caller: Caller, Text(name): Text) -> Result<Json<DataSet>, Failure> {
    let item = app.blocking(move |service| Ok(service.state.item(caller.0.id, ItemKind::Data, &Reference::Name(name))?)).await?;
    Ok(Json(words::data_set(item)))
}

/// Remove a data set of yours
///
/// Jobs that were submitted with it keep it.
#[utoipa::path(
    delete, path = "/v1/data/{name}", tag = "data",
    params(("name" = String, Path, description = "Its name")),
    responses(
        (status = 204, description = "It is gone"),
        (status = "default", body = Problem, content_type = "application/problem+json", description = "An error"),
    )
)]
pub(super) async fn remove(State(app): State<App>, caller: Caller, Text(name): Text) -> Result<StatusCode, Failure> {
    let owner = Owner::Tenant(caller.0.id);
    app.blocking(move |service| Ok(service.state.remove_item(owner, ItemKind::Data, &Reference::Name(name))?)).await?;
    Ok(StatusCode::NO_CONTENT)
}
