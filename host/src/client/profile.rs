//! Which service is talked to, and with which token: the command line, the environment, a profile file.
//!
//! Never takes a token from the command line, where others could read it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::app::Surroundings;
use crate::cli::RemoteArgs;
use crate::error::user;
use crate::paths::{Paths, shown};

/// Longest profile or certificate.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What the environment says of the service.
#[derive(Clone, Debug, Default)]
pub struct ServiceEnv {
    /// `NODUS_URL`.
    pub url: Option<String>,
    /// `NODUS_TOKEN`.
    pub token: Option<String>,
    /// `NODUS_CA`.
    pub ca: Option<PathBuf>,
    /// `NODUS_PROFILE`, else where a profile usually is.
    pub profile: Option<PathBuf>,
}

/// A profile file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    url: Option<String>,
    token: Option<String>,
    /// Relative to the file's folder.
    ca: Option<PathBuf>,
}

/// Which service, with which token.
pub(super) struct Profile {
    pub(super) url: String,
    pub(super) token: String,
    /// Certificates to trust besides the system's.
    pub(super) ca: Vec<reqwest::Certificate>,
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
        let file = toml::from_str::<File>(&text).map_err(|error| user(format!("{}: {error}", shown(path))))?;
        Ok::<_, anyhow::Error>(File { ca: file.ca.map(|ca| path.parent().unwrap_or(Path::new("")).join(ca)), ..file })
    });
    let File { url, token, ca } = file.transpose()?.unwrap_or_default();
    let url = args.url.clone().or_else(|| env.url.clone()).or(url);
    let url = url.ok_or_else(|| user("there is no service: give --url, set NODUS_URL, or write `url` and `token` into a profile file"))?;
    let token = env.token.clone().or(token);
    let token = token.ok_or_else(|| user("there is no token: set NODUS_TOKEN, or write `token` into a profile file"))?;
    let ca = args.ca.clone().or_else(|| env.ca.clone()).or(ca);
    let ca = ca.map(|path| certificates(paths, &path)).transpose()?.unwrap_or_default();
    Ok(Profile { url: url.trim_end_matches('/').to_owned(), token, ca })
}

fn certificates(paths: Paths, path: &Path) -> anyhow::Result<Vec<reqwest::Certificate>> {
    let found = reqwest::Certificate::from_pem_bundle(&paths.read(path, FILE_BYTES_MAX)?).unwrap_or_default();
    if found.is_empty() {
        return Err(user(format!("{}: expected a certificate to trust, as PEM (BEGIN CERTIFICATE)", shown(path))));
    }
    Ok(found)
}
