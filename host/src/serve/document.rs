//! The OpenAPI document: made of the same annotations that the routes are made of, so that it cannot leave one out.
//!
//! Describes; decides nothing.

use utoipa::openapi::OpenApi as Document;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::routes;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Nodus",
        description = "Many LoRA training jobs on one device, each result exactly what it would have been alone. \
            Every error is `application/problem+json` with a stable `code`. What is not there and what is another tenant's are the same 404.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    modifiers(&Bearer),
    security(("bearer" = [])),
    tags(
        (name = "components", description = "WebAssembly components: what runs"),
        (name = "data", description = "Data sets: JSON Lines"),
        (name = "models", description = "Frozen base models, the operator's"),
        (name = "jobs", description = "Jobs and sweeps"),
        (name = "results", description = "What jobs tell and leave"),
        (name = "service", description = "The service itself")
    )
)]
struct Base;

struct Bearer;

impl Modify for Bearer {
    fn modify(&self, document: &mut Document) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("`nodus-host tenant add` shows one")).build();
        let components = document.components.get_or_insert_with(Default::default);
        components.add_security_scheme("bearer", SecurityScheme::Http(scheme));
    }
}

/// What the routes' annotations are added to.
pub(super) fn base() -> Document {
    Base::openapi()
}

/// The whole document.
#[must_use]
pub(super) fn openapi() -> Document {
    let mut document = routes::documented().into_openapi();
    // What axum calls `{*path}` takes slashes; OpenAPI has no word for that.
    let paths = std::mem::take(&mut document.paths.paths);
    document.paths.paths = paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
    document
}

/// The document as the file `docs/openapi.json` holds it.
///
/// # Errors
/// None that is known; serde's.
pub(super) fn text() -> serde_json::Result<String> {
    serde_json::to_string_pretty(&openapi()).map(|text| text + "\n")
}

#[cfg(test)]
mod tests {
    use nodus_api::{Code, EventKind, How, JobState, Lane, Priority};
    use serde_json::json;

    #[test]
    fn the_document_has_the_words_that_are_sent() {
        let document = serde_json::to_value(super::openapi()).unwrap();
        let documented = |name: &str| document["components"]["schemas"][name]["enum"].clone();
        assert_eq!(documented("Code"), json!(Code::ALL));
        assert_eq!(documented("JobState"), json!(JobState::ALL));
        assert_eq!(documented("EventKind"), json!(EventKind::ALL));
        assert_eq!(documented("Lane"), json!(Lane::ALL));
        assert_eq!(documented("Priority"), json!(Priority::ALL));
        assert_eq!(documented("How"), json!(How::ALL));
    }
}
