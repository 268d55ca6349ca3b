//! Files on their way to a service, gone on with where they broke off.
//!
//! Sends no byte twice that the service has.

use std::io::{Seek as _, SeekFrom};
use std::time::Duration;

use anyhow::Context as _;
use nodus_api::Upload;
use nodus_protocol::Digest;
use reqwest::Method;
use serde::de::DeserializeOwned;

use super::http::{Remote, segment};
use crate::error::exit_code;

/// How often a broken upload is gone on with.
const TRIES: u32 = 8;
/// How long after the first break; each time twice as long.
const AGAIN: Duration = Duration::from_millis(500);

/// A file to be uploaded.
pub(super) struct Content {
    pub(super) file: std::fs::File,
    /// Of all of it.
    pub(super) digest: Digest,
    /// Its media type.
    pub(super) kind: &'static str,
}

/// Uploads it to this place.
///
/// # Errors
/// The user's: the service refuses it. Ours: the service cannot be reached, again and again.
pub(super) async fn upload<T: DeserializeOwned>(remote: &Remote, (method, place): (Method, &str), content: &Content) -> anyhow::Result<T> {
    let mut tries = 0;
    loop {
        match attempt(remote, (method.clone(), place), content).await {
            Err(error) if exit_code(&error) != 2 && tries < TRIES => {
                tracing::warn!("the upload broke off and is gone on with: {error:#}");
                tokio::time::sleep(AGAIN * 2_u32.pow(tries)).await;
                tries += 1;
            }
            done => return done,
        }
    }
}

async fn attempt<T: DeserializeOwned>(remote: &Remote, (method, place): (Method, &str), content: &Content) -> anyhow::Result<T> {
    let digest = content.digest.to_string();
    let Upload { bytes } = remote.get(&format!("/v1/uploads/{}", segment(&digest))).await?;
    let mut file = content.file.try_clone().context("opening an upload")?;
    file.seek(SeekFrom::Start(bytes)).context("going to where an upload broke off")?;
    let request = remote.request(method, place).header("content-type", content.kind);
    let request = request.header("upload-digest", digest).header("upload-offset", bytes);
    // Said beforehand, so that what is too long is refused before it is sent.
    let rest = file.metadata().context("measuring an upload")?.len().saturating_sub(bytes);
    let request = request.header("content-length", rest).body(tokio::fs::File::from_std(file));
    remote.json(request).await
}
