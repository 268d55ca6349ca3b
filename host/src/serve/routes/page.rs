//! The live page: one file, no outside requests.
//!
//! Holds no secret and no state: the page asks the API with its reader's own token.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use sha2::{Digest as _, Sha256};

const PAGE: &str = include_str!("../page.html");

/// The browser takes the page's own script and style, whose digests are named, and talks to this service alone.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let digest = |inside: &str| base64::engine::general_purpose::STANDARD.encode(Sha256::digest(inside));
    let (script, style) = (digest(between("<script>", "</script>")), digest(between("<style>", "</style>")));
    format!(
        "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
});

fn between(open: &str, close: &str) -> &'static str {
    PAGE.split_once(open).and_then(|(_, rest)| rest.split_once(close)).map_or("", |(inside, _)| inside)
}

/// The live page
///
/// Your jobs, their curves as they train, their results. It asks for a token and keeps it until its tab is closed.
#[utoipa::path(get, path = "/", tag = "service", security(()), responses((status = 200, body = String, content_type = "text/html")))]
pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

#[cfg(test)]
mod tests {
    use super::{PAGE, POLICY, between};

    #[test]
    fn the_page_is_whole_and_asks_nobody_else() {
        assert!(between("<script>", "</script>").len() > 1000 && POLICY.contains("'sha256-"));
        assert_eq!(PAGE.matches("<script").count(), 1);
        // The name of SVG's elements, which is no request.
        let without = PAGE.replace("http://www.w3.org/2000/svg", "");
        for outside in ["http:", "https:", "//cdn", "src=", "innerHTML", "<link", "@import", "url("] {
            assert!(!without.contains(outside), "{outside}");
        }
        assert!(PAGE.contains("<html lang=\"en\">") && PAGE.contains("aria-live=\"polite\""));
    }
}
