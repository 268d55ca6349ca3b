//! `fetch`: what was kept of a job as a folder, like the one that `run` leaves; `audit verify` checks it.
//!
//! Writes nowhere but into the folder it was given, whatever the service sends.

use std::io::{self, Read, Seek as _, Write};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};
use cap_std::fs::{Dir, OpenOptions};
use nodus_api::{Job, SigningKey};
use nodus_receipts::{KnownKeys, PublicKey};
use reqwest::{Method, Response};
use serde_json::json;

use super::http::{Remote, segment};
use super::landing::Landing;
use super::watch;
use crate::audit;
use crate::cli::FetchArgs;
use crate::error::user;
use crate::name::Name;
use crate::paths::{Paths, shown};
use crate::store::copy;
use crate::text::escape;

/// The archive while it comes in.
const ARCHIVE: &str = ".results.tar";
/// The folder of a merged model.
const MERGED: &str = "merged";

/// Downloads a job's results, or those of a sweep's members into folders of their names.
pub(super) async fn fetch(remote: &Remote, paths: Paths, args: &FetchArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let (jobs, _) = watch::jobs_of(remote, &args.id).await?;
    if let Some(job) = jobs.iter().find(|job| !job.state.is_ended()) {
        return Err(user(format!("job {} is {}: wait until it ends (`nodus-host watch`)", job.id, job.state.as_str())));
    }
    let landing = Landing::open(paths, &args.out)?;
    for job in &jobs {
        let dir = if jobs.len() == 1 { landing.dir().try_clone()? } else { member(landing.dir(), &job.name)? };
        let place = format!("/v1/jobs/{}", segment(&job.id));
        archive(remote, &format!("{place}/artifacts.tar"), &dir).await?;
        if args.merged && job.receipt {
            dir.create_dir(MERGED).context("making a folder for the merged model")?;
            let folder = dir.open_dir(MERGED).context("opening the folder for the merged model")?;
            archive(remote, &format!("{place}/merged.tar"), &folder).await?;
        }
    }
    landing.settle()?;
    let kept = jobs.iter().filter(|job| job.receipt).count();
    if args.remote.json {
        for Job { id, name, state, receipt, .. } in &jobs {
            let folder = if jobs.len() == 1 { args.out.clone() } else { args.out.join(name) };
            writeln!(out, "{}", json!({ "id": id, "name": name, "state": state, "receipt": receipt, "folder": folder }))?;
        }
    } else {
        writeln!(out, "{kept} of {} jobs have a receipt; in {}", jobs.len(), shown(&args.out))?;
    }
    match (args.verify, kept) {
        (false, _) => Ok(()),
        (true, 0) => Err(user("there is no receipt, and so nothing to verify: only jobs that succeeded or stopped have one")),
        (true, _) => verify(remote, paths, args, out).await,
    }
}

/// Checks the receipts that came.
async fn verify(remote: &Remote, paths: Paths, args: &FetchArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let known = keys(remote, paths, &args.keys, (args.remote.json, out)).await?;
    audit::check(paths, &args.out, (&known, None), (args.remote.json, out)).map(drop)
}

/// The keys that are believed: those named, else the service's own word.
pub(super) async fn keys(
    remote: &Remote,
    paths: Paths,
    named: &[PathBuf],
    (as_json, out): (bool, &mut dyn Write),
) -> anyhow::Result<KnownKeys> {
    if named.is_empty() {
        let SigningKey { keyid, pem } = remote.get("/v1/key").await?;
        let key = PublicKey::from_pem(&pem).map_err(|error| user(format!("the service's key: {error}")))?;
        let keyid = escape(&keyid);
        if as_json {
            writeln!(out, "{}", json!({ "key": keyid, "by": "the service's own word" }))?;
        } else {
            writeln!(out, "believing the service's own word that its key is {keyid}; --key goes by what you have from its operator")?;
        }
        return Ok([key].into_iter().collect());
    }
    audit::known(paths, named)
}

/// A member's own folder.
fn member(whole: &Dir, name: &str) -> anyhow::Result<Dir> {
    // `learning_rate=0.0001,rank=4`: a name as the host makes them, and one folder.
    let is_plain = !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    if !is_plain && name.parse::<Name>().is_err() {
        bail!("the service sent a member's name that cannot be a folder's");
    }
    whole.create_dir(name).and_then(|()| whole.open_dir(name)).context("making a member's folder")
}

/// Downloads an archive and unpacks it.
pub(super) async fn archive(remote: &Remote, place: &str, dir: &Dir) -> anyhow::Result<()> {
    let response = remote.send(remote.request(Method::GET, place)).await?;
    keep(response, dir).await.with_context(|| format!("downloading {place}"))
}

async fn keep(mut response: Response, dir: &Dir) -> anyhow::Result<()> {
    let mut file = dir.open_with(ARCHIVE, OpenOptions::new().read(true).write(true).create_new(true))?;
    while let Some(bytes) = response.chunk().await? {
        file.write_all(&bytes)?;
    }
    file.rewind()?;
    unpack(file, dir)?;
    Ok(dir.remove_file(ARCHIVE)?)
}

/// Regular files with plain paths; whatever else an archive may hold is refused.
fn unpack(archive: impl Read, dir: &Dir) -> anyhow::Result<()> {
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let is_plain = entry.header().entry_type().is_file() && path.components().all(|part| matches!(part, Component::Normal(_)));
        if !is_plain {
            bail!("the archive holds what is no plain file: {}", shown(&path));
        }
        if let Some(parent) = path.parent().filter(|parent| *parent != Path::new("")) {
            dir.create_dir_all(parent)?;
        }
        let mut keep = || -> io::Result<()> {
            let mut file = dir.open_with(&path, OpenOptions::new().write(true).create_new(true))?;
            copy(&mut entry, &mut file)
        };
        keep().with_context(|| format!("writing {}", shown(&path)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::unpack;

    fn archive(path: &[u8], kind: tar::EntryType) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.set_mode(0o644);
        header.set_entry_type(kind);
        header.as_mut_bytes()[..path.len()].copy_from_slice(path);
        header.set_cksum();
        let mut builder = tar::Builder::new(Vec::new());
        builder.append(&header, &b"x"[..]).unwrap();
        builder.into_inner().unwrap()
    }

    #[test]
    fn an_archive_writes_into_its_folder_alone() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        root.create_dir("in").unwrap();
        let dir = root.open_dir("in").unwrap();
        unpack(archive(b"adapter/weights", tar::EntryType::Regular).as_slice(), &dir).unwrap();
        assert_eq!(dir.read_to_string("adapter/weights").unwrap(), "x");
        for (path, kind) in [
            (&b"../out"[..], tar::EntryType::Regular),
            (b"/tmp/out", tar::EntryType::Regular),
            (b"link", tar::EntryType::Symlink),
            (b"adapter/weights", tar::EntryType::Regular),
        ] {
            assert!(unpack(archive(path, kind).as_slice(), &dir).is_err(), "{}", String::from_utf8_lossy(path));
        }
        assert_eq!(root.entries().unwrap().count(), 1);
    }
}
