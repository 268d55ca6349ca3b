//! Errors as RFC 9457 writes them: `application/problem+json` with a stable code.
//!
//! Never says whether what is not there is somebody else's.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Declares the codes with their HTTP status and title.
macro_rules! codes {
    ($($(#[$doc:meta])+ $name:ident = $text:literal, $status:literal, $title:literal;)+) => {
        /// What went wrong, for programs. A code keeps its meaning for good.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        pub enum Code { $($(#[$doc])+ #[serde(rename = $text)] $name,)+ }

        impl Code {
            /// Every code.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// Its text.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)+ }
            }

            /// The HTTP status that it comes with.
            #[must_use]
            pub fn status(self) -> u16 {
                match self { $(Self::$name => $status,)+ }
            }

            /// What it means, for people.
            #[must_use]
            pub fn title(self) -> &'static str {
                match self { $(Self::$name => $title,)+ }
            }
        }
    };
}

codes! {
    /// No token, or one that opens nothing.
    Unauthenticated = "unauthenticated", 401, "A valid token is needed";
    /// The operator's token where a tenant's is needed, or the other way round.
    WrongBearer = "wrong-bearer", 403, "This token is not for this";
    /// Not there, or not yours.
    NotFound = "not-found", 404, "There is no such thing";
    /// No route of this path.
    UnknownRoute = "unknown-route", 404, "The service has no such route";
    /// The route has other methods.
    WrongMethod = "wrong-method", 405, "The route does not have this method";
    /// The request's body is not what it should be.
    BadBody = "bad-body", 400, "The body is not what was expected";
    /// A part of the path, the query or a header is not what it should be.
    BadParameter = "bad-parameter", 400, "A parameter is not what was expected";
    /// The body's type is not what it should be.
    WrongMediaType = "wrong-media-type", 415, "The body is of another type than expected";
    /// The body is longer than it may be.
    TooLarge = "too-large", 413, "The body is too large";
    /// The body did not come in time.
    TooSlow = "too-slow", 408, "The body did not come in time";
    /// The component is no training job.
    ComponentRefused = "component-refused", 422, "The component is refused";
    /// The data set is not in the form that is read.
    DataRefused = "data-refused", 422, "The data set is refused";
    /// What the job names or asks for is not there or not right.
    JobRefused = "job-refused", 422, "The job is refused";
    /// The name is taken by other content.
    NameTaken = "name-taken", 409, "The name is taken";
    /// The idempotency key came with another request.
    KeyReused = "key-reused", 409, "The idempotency key was used for another request";
    /// The job is not in a state that this can be done in.
    WrongState = "wrong-state", 409, "The job is in another state";
    /// What is there of an upload is not what was said, or is being uploaded.
    UploadConflict = "upload-conflict", 409, "The upload cannot go on like this";
    /// A quota does not allow it.
    QuotaExceeded = "quota-exceeded", 403, "A quota does not allow it";
    /// The operator does not offer it.
    NotOffered = "not-offered", 403, "The operator does not offer this";
    /// Too many requests; `Retry-After` says when to come again.
    RateLimited = "rate-limited", 429, "Too many requests";
    /// The service's disk is full. Nothing was changed.
    StorageFull = "storage-full", 507, "The service's disk is full";
    /// The service cannot do it now; `Retry-After` says when to come again.
    Unavailable = "unavailable", 503, "The service cannot do this now";
    /// Our fault; the service's log has the request's id.
    Internal = "internal", 500, "The service failed";
}

/// An error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// `urn:nodus:problem:` and the code.
    #[serde(rename = "type")]
    pub kind: String,
    /// What the code means.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What went wrong, for programs.
    pub code: Code,
    /// What is wrong here, and what would be right.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub detail: Option<String>,
    /// The request's id in the service's log, where the fault is ours.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub instance: Option<String>,
}

impl Problem {
    /// An error of this code.
    #[must_use]
    pub fn new(code: Code, detail: Option<String>) -> Self {
        let kind = format!("urn:nodus:problem:{}", code.as_str());
        Self { kind, title: code.title().to_owned(), status: code.status(), code, detail, instance: None }
    }
}

#[cfg(test)]
mod tests {
    use super::{Code, Problem};

    #[test]
    fn codes_are_what_json_has_and_statuses_are_errors() {
        for code in Code::ALL {
            let problem = Problem::new(*code, Some("x".into()));
            let json = serde_json::to_value(&problem).unwrap();
            assert_eq!(json["code"], code.as_str());
            assert_eq!(json["type"], format!("urn:nodus:problem:{}", code.as_str()));
            assert!((400..600).contains(&code.status()), "{code:?}");
            assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
        }
    }
}
