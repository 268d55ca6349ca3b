//! Requests to a service, and its refusals as the user's errors.
//!
//! Never shows what a service says without its control characters escaped.

use std::error::Error;
use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use anyhow::Context as _;
use nodus_api::Problem;
use reqwest::{Method, RequestBuilder, Response};
use rustls::CertificateError;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::profile::Profile;
use crate::error::user;
use crate::text::{escape, escape_lines};

const CONNECT: Duration = Duration::from_secs(10);
/// Longest silence of a service: it shows that it lives every 15 seconds.
const SILENCE: Duration = Duration::from_secs(60);
/// Characters of a service's message that are shown.
const MESSAGE_CHARS_MAX: usize = 2000;

/// Most jobs of one page.
pub(super) const PAGE_MAX: usize = 200;

/// A service.
pub(super) struct Remote {
    http: reqwest::Client,
    url: String,
    token: String,
}

/// Nobody is there: of a service that was there before, it may come back; else the user's to put right.
#[derive(Debug, thiserror::Error)]
#[error("the service at {url} cannot be reached: {why}")]
pub(super) struct Unreachable {
    url: String,
    why: String,
}

/// An error for whoever gave the command: nobody being at an address that they named is theirs to put right.
pub(super) fn at_last(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Unreachable>() {
        Some(unreachable) => user(unreachable.to_string()),
        None => error,
    }
}

/// What an error was made of. An error of the system's hides it from `source`.
fn cause<'a>(error: &&'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    let error: &'a (dyn Error + 'static) = *error;
    match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => error.source(),
    }
}

/// What is wrong with the service's certificate, and what would be right.
fn distrusted(error: &reqwest::Error) -> Option<String> {
    let found =
        std::iter::successors(Some(error as &(dyn Error + 'static)), cause).find_map(|error| error.downcast_ref::<rustls::Error>())?;
    let rustls::Error::InvalidCertificate(fault) = found else { return None };
    Some(match fault {
        CertificateError::UnknownIssuer => {
            "is signed by nobody who is trusted: --ca FILE (or NODUS_CA, or `ca` in the profile) names whom to trust".into()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired".into(),
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "is for another name: expected the address in its subjectAltName".into()
        }
        // The one of its kind that has no name of its own: what `openssl req -x509` makes without a word.
        CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
            "is an authority's (CA:TRUE), expected a server's own: made with -addext basicConstraints=critical,CA:FALSE".into()
        }
        other => format!("cannot be trusted: {other}"),
    })
}

/// A part of a path, escaped so that it stays one.
pub(super) fn segment(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            _ => drop(write!(out, "%{byte:02X}").ok()),
        }
        out
    })
}

impl Remote {
    pub(super) fn new(profile: &Profile) -> anyhow::Result<Self> {
        // A second installation is the same provider.
        drop(rustls::crypto::ring::default_provider().install_default());
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("nodus-host/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT)
            .read_timeout(SILENCE)
            .redirect(reqwest::redirect::Policy::none());
        if !profile.url.starts_with("https:") {
            // A machine need not have certificates to talk in the clear.
            builder = builder.tls_certs_only(std::iter::empty());
        }
        if !profile.ca.is_empty() {
            builder = builder.tls_certs_merge(profile.ca.iter().cloned());
        }
        let http = builder.build().context("making an HTTP client")?;
        Ok(Self { http, url: profile.url.clone(), token: profile.token.clone() })
    }

    /// A request that may be completed before it is sent.
    pub(super) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.url)).bearer_auth(&self.token)
    }

    /// Sends it; what the service refuses is the user's error.
    pub(super) async fn send(&self, request: RequestBuilder) -> anyhow::Result<Response> {
        let response = request.send().await.map_err(|error| self.unsent(error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let retry_after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()).map(str::to_owned);
        let body = response.bytes().await.unwrap_or_default();
        let Ok(problem) = serde_json::from_slice::<Problem>(&body) else {
            anyhow::bail!("the service at {} answered {status} without a reason", self.url);
        };
        let detail = problem.detail.as_deref().unwrap_or(&problem.title);
        let again = retry_after.map(|seconds| format!("; come again in {} s", escape(&seconds))).unwrap_or_default();
        let text = format!("{}: {}{again}", problem.code.as_str(), escape_lines(detail, MESSAGE_CHARS_MAX));
        if status.is_server_error() {
            let instance = problem.instance.map(|instance| format!(" (request {})", escape(&instance))).unwrap_or_default();
            anyhow::bail!("the service failed: {text}{instance}");
        }
        Err(user(text))
    }

    /// Why there is no answer.
    fn unsent(&self, error: reqwest::Error) -> anyhow::Error {
        let url = escape(&self.url);
        if error.is_builder() {
            return user(format!("`{url}` is no address of a service, expected one such as https://nodus.example:7643"));
        }
        if let Some(why) = distrusted(&error) {
            return user(format!("the certificate of the service at {url} {why}"));
        }
        let is_unreachable = error.is_connect();
        let error = anyhow::Error::from(error.without_url());
        if is_unreachable {
            return Unreachable { url, why: escape(&error.root_cause().to_string()) }.into();
        }
        error.context(format!("asking the service at {url}"))
    }

    /// Sends it and reads the JSON that comes back.
    pub(super) async fn json<T: DeserializeOwned>(&self, request: RequestBuilder) -> anyhow::Result<T> {
        self.send(request).await?.json().await.context("reading the service's answer")
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.json(self.request(Method::GET, path)).await
    }

    pub(super) async fn post<T: DeserializeOwned>(&self, path: &str, body: &(impl Serialize + Sync)) -> anyhow::Result<T> {
        self.json(self.request(Method::POST, path).json(body)).await
    }

    /// What is there; none where it is not.
    pub(super) async fn find<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<Option<T>> {
        let sent = self.request(Method::GET, path).send().await.map_err(reqwest::Error::without_url);
        match sent {
            Ok(response) if response.status().as_u16() == 404 => Ok(None),
            // Whatever else it is, it is said the usual way.
            _ => self.get(path).await.map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::segment;

    #[test]
    fn a_part_of_a_path_stays_one() {
        assert_eq!(segment("sft-v1.0_x~"), "sft-v1.0_x~");
        assert_eq!(segment("../a b/ä?#%"), "..%2Fa%20b%2F%C3%A4%3F%23%25");
    }
}
