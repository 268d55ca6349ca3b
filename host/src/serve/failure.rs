//! What a request is refused with: a code and what would be right for the caller, the cause for our log.
//!
//! Never shows a cause of ours to a caller, nor a path of this host's.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use nodus_api::{Code, Problem};
use nodus_state::StateError;

use super::gauges;
use crate::error::exit_code;
use crate::text::escape_lines;

/// Characters of a detail that are sent.
const DETAIL_CHARS_MAX: usize = 4000;

/// A request that is not answered as it asked.
#[derive(Debug)]
pub(crate) struct Failure {
    code: Code,
    detail: Option<String>,
    retry_after_s: Option<u64>,
    cause: Option<anyhow::Error>,
}

impl Failure {
    /// The caller's to put right.
    pub(super) fn new(code: Code, detail: impl Into<String>) -> Self {
        let detail = Some(escape_lines(&detail.into(), DETAIL_CHARS_MAX));
        Self { code, detail, retry_after_s: None, cause: None }
    }

    /// Not there, or not theirs. One text for both.
    pub(super) fn not_found(what: &str) -> Self {
        Self::new(Code::NotFound, format!("there is no such {what}"))
    }

    /// Ours.
    pub(super) fn ours(cause: anyhow::Error) -> Self {
        Self { code: Code::Internal, detail: None, retry_after_s: None, cause: Some(cause) }
    }

    pub(super) fn retry_after(self, seconds: u64) -> Self {
        Self { retry_after_s: Some(seconds), ..self }
    }

    /// A user's error under this code, any other ours.
    pub(super) fn of(code: Code, error: anyhow::Error) -> Self {
        if exit_code(&error) == 2 { Self::new(code, error.to_string()) } else { Self::ours(error) }
    }
}

impl From<StateError> for Failure {
    fn from(error: StateError) -> Self {
        let code = match &error {
            StateError::NotFound(what) => return Self::not_found(what),
            StateError::Taken(_) => Code::NameTaken,
            StateError::KeyReused => Code::KeyReused,
            StateError::WrongState { .. } => Code::WrongState,
            StateError::Upload(_) => Code::UploadConflict,
            StateError::Quota { .. } => Code::QuotaExceeded,
            StateError::Sweep { .. } => Code::TooLarge,
            StateError::Full => Code::StorageFull,
            StateError::ReadOnly | StateError::Broken(_) | StateError::Unwritten(_) => Code::Unavailable,
            _ => return Self::ours(error.into()),
        };
        Self::new(code, error.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        gauges::refused(self.code);
        let mut problem = Problem::new(self.code, self.detail);
        if let Some(cause) = self.cause {
            let instance = uuid::Uuid::now_v7().to_string();
            tracing::error!(instance, "a request failed: {cause:#}");
            problem.instance = Some(instance);
        }
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.code == Code::Unauthenticated {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
