//! Which service is talked to, and with which token: the command line, the environment, a profile file.
//!
//! Never takes a token from the command line, where others could read it.

use std::path::PathBuf;

use serde::Deserialize;

use crate::app::Surroundings;
use crate::cli::RemoteArgs;
use crate::error::user;
use crate::paths::shown;

/// Longest profile or certificate.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What the environment says of the service.
#[derive(Clone, Debug, Default)]
pub struct ServiceEnv {
    /// `NODUS_URL`.
    pub url: Option<String>,
    /// `NODUS_TOKEN`.
    pub token: Option<String>,
    /// `NODUS_PROFILE`, else where a profile usually is.
    pub profile: Option<PathBuf>,
}

/// A profile file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    url: Option<String>,
    token: Option<String>,
}

/// Which service, with which token.
pub(super) struct Profile {
    pub(super) url: String,
    pub(super) token: String,
    /// A certificate to trust besides the system's, PEM.
    pub(super) ca: Option<Vec<u8>>,
}

/// Puts them together.
pub(super) fn profile(surroundings: &Surroundings, args: &RemoteArgs) -> anyhow::Result<Profile> {
    let (paths, env) = (surroundings.paths, &surroundings.service);
    let file = match (&args.profile, &env.profile) {
        (Some(path), _) => Some((path, paths.read(path, FILE_BYTES_MAX)?)),
        // The usual place may be empty.
        (None, Some(path)) => paths.read(path, FILE_BYTES_MAX).ok().map(|text| (path, text)),
        (None, None) => None,
    };
    let file = file.map(|(path, bytes)| {
        let text = String::from_utf8(bytes).map_err(|_| user(format!("{}: not UTF-8", shown(path))))?;
        toml::from_str::<File>(&text).map_err(|error| user(format!("{}: {error}", shown(path))))
    });
    let File { url, token } = file.transpose()?.unwrap_or_default();
    let url = args.url.clone().or_else(|| env.url.clone()).or(url);
    let url = url.ok_or_else(|| user("there is no service: give --url, set NODUS_URL, or write `url` and `token` into a profile file"))?;
    let token = env.token.clone().or(token);
    let token = token.ok_or_else(|| user("there is no token: set NODUS_TOKEN, or write `token` into a profile file"))?;
    let ca = args.ca.as_deref().map(|path| paths.read(path, FILE_BYTES_MAX)).transpose()?;
    Ok(Profile { url: url.trim_end_matches('/').to_owned(), token, ca })
}
