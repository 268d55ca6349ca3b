//! Files that a command names: on the service in the end, under a name or an id.
//!
//! Uploads nothing that the service has already, by its digest.

use std::path::Path;

use anyhow::Context as _;
use nodus_api::{Component, DataSet};
use nodus_protocol::Digest;
use nodus_sandbox::Limits;
use reqwest::Method;

use super::http::{Remote, segment};
use super::upload::{Content, upload};
use super::watch::aloud;
use crate::error::user;
use crate::name::Name;
use crate::paths::{Paths, shown};
use crate::store::digest_of;

/// How a component's file ends, and a data set's.
pub(super) const WASM: &str = ".wasm";
const JSONL: &str = ".jsonl";

/// A component's id or name: what was named, or what its file has become.
pub(super) async fn component(remote: &Remote, paths: Paths, text: &str) -> anyhow::Result<String> {
    if is_path(remote, paths, (text, WASM), "/v1/components").await? {
        return Ok(put_component(remote, paths, Path::new(text)).await?.id);
    }
    Ok(text.to_owned())
}

/// A data set's name: what was named, or what its file has become.
pub(super) async fn data(remote: &Remote, paths: Paths, text: &str) -> anyhow::Result<String> {
    if !is_path(remote, paths, (text, JSONL), "/v1/data").await? {
        return Ok(text.to_owned());
    }
    let set = put_data(remote, paths, Path::new(text), None).await?;
    Ok(set.name)
}

/// A file by its looks: it has a folder or an ending in its name. One that is there and looks like none is said to be.
async fn is_path(remote: &Remote, paths: Paths, (text, ending): (&str, &str), place: &str) -> anyhow::Result<bool> {
    if text.contains('/') || text.ends_with(ending) {
        return Ok(true);
    }
    let there = paths.open(Path::new(text)).is_ok();
    if there && remote.find::<serde_json::Value>(&format!("{place}/{}", segment(text))).await?.is_none() {
        let shown = shown(Path::new(text));
        return Err(user(format!(
            "the service has nothing named {shown}: expected `./{text}` for the file, or a name that ends in {ending}"
        )));
    }
    Ok(false)
}

/// A component's file on the service.
pub(super) async fn put_component(remote: &Remote, paths: Paths, path: &Path) -> anyhow::Result<Component> {
    // Looked at whole, so that what can be no component is refused before it is sent.
    let digest = Digest::of(&paths.read(path, Limits::DEFAULT.component_bytes)?);
    if let Some(there) = remote.find(&format!("/v1/components/{}", segment(&digest.to_string()))).await? {
        return Ok(there);
    }
    let content = Content { file: paths.open(path)?.into_std(), digest, kind: "application/wasm" };
    upload(remote, (Method::POST, "/v1/components"), &content).await
}

/// A data set's file on the service. Without a name it is kept under its own and its digest's beginning, which is said: other content never meets a
/// taken name.
pub(super) async fn put_data(remote: &Remote, paths: Paths, path: &Path, name: Option<&Name>) -> anyhow::Result<DataSet> {
    let (digest, _) = digest_of(paths.open(path)?).with_context(|| format!("reading {}", shown(path)))?;
    let made = name.is_none().then(|| made_name(path, digest));
    let name = made.as_deref().or(name.map(Name::as_str)).unwrap_or_default();
    let place = format!("/v1/data/{}", segment(name));
    let there = remote.find::<DataSet>(&place).await?.filter(|there| there.digest == digest.to_string());
    let set = match there {
        Some(there) => there,
        None => {
            let content = Content { file: paths.open(path)?.into_std(), digest, kind: "application/jsonl" };
            upload(remote, (Method::PUT, &place), &content).await?
        }
    };
    if made.is_some() {
        aloud(&format!("{} is data set `{name}` on the service", shown(path)));
    }
    Ok(set)
}

fn made_name(path: &Path, digest: Digest) -> String {
    let stem: String = path.file_stem().unwrap_or_default().to_string_lossy().chars().take(48).collect();
    let stem: String = stem.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '_' }).collect();
    let name = format!("{}-{}", stem.trim_start_matches(['-', '.']), digest.hex().get(..8).unwrap_or_default());
    name.trim_start_matches('-').to_owned()
}
