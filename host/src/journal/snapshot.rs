//! A snapshot's file: what the engine held of a job after so many of its calls.
//!
//! Never seen half-written: it is made under another name, synced, and renamed; and never believed without its digest.

use std::collections::BTreeMap;
use std::io::{self, Write as _};

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::frame::{decode, encode};
use nodus_protocol::{Digest, JobState};

use super::SNAPSHOTS_KEPT;
use crate::store::sync_dir;

const PREFIX: &str = "snapshot-";
/// What is being made.
pub(super) const NEW: &str = "new";
const DIGEST_BYTES: usize = 32;

/// The bytes of one.
///
/// # Errors
/// None that any state has.
pub(super) fn encoded(identity: Digest, calls: u64, state: &JobState) -> anyhow::Result<Vec<u8>> {
    let mut bytes = encode(&(identity, calls, state))?;
    bytes.extend_from_slice(Digest::of(&bytes).as_bytes());
    Ok(bytes)
}

/// Bytes of each of those that are there, by its calls. One that was being written when its process ended goes.
///
/// # Errors
/// What the operating system says.
pub(super) fn sizes(dir: &Dir) -> anyhow::Result<BTreeMap<u64, u64>> {
    match dir.remove_file(NEW) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).context("removing half a snapshot"),
        _ => {}
    }
    let size = |calls: u64| Ok((calls, dir.metadata(name(calls))?.len()));
    all(dir)?.into_iter().map(size).collect::<io::Result<_>>().context("measuring snapshots")
}

/// Writes one, removes those that are not needed any more, and keeps the count of those that are there.
///
/// # Errors
/// What the operating system says; then those before are as they were.
pub(super) fn write(dir: &Dir, calls: u64, bytes: &[u8], sizes: &mut BTreeMap<u64, u64>) -> anyhow::Result<()> {
    let make = || -> io::Result<()> {
        let mut file = dir.create(NEW)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        dir.rename(NEW, dir, name(calls))
    };
    let made = make();
    if made.is_err() {
        // What is half-written takes room, and may be why.
        drop(dir.remove_file(NEW));
    }
    made.context("writing a snapshot")?;
    sizes.insert(calls, bytes.len() as u64);
    sync_dir(dir).context("writing a snapshot")?;
    while sizes.len() > SNAPSHOTS_KEPT
        && let Some(older) = sizes.first_entry()
    {
        dir.remove_file(name(*older.key())).context("removing an older snapshot")?;
        older.remove();
    }
    Ok(())
}

/// Removes those of more calls.
///
/// # Errors
/// What the operating system says.
pub(super) fn cut(dir: &Dir, calls: u64) -> io::Result<()> {
    let after = all(dir).map_err(io::Error::other)?.into_iter().filter(|of| *of > calls);
    after.into_iter().try_for_each(|of| dir.remove_file(name(of)))
}

/// The latest that can be used: whole, of this identity, and of no more calls than the journal has.
///
/// # Errors
/// What the operating system says.
pub(super) fn latest(dir: &Dir, identity: Digest, recorded: u64) -> anyhow::Result<Option<(u64, JobState)>> {
    for calls in all(dir)?.into_iter().rev() {
        let bytes = dir.read(name(calls)).context("reading a snapshot")?;
        match read(&bytes).filter(|(of, within, _)| *of == identity && *within == calls) {
            Some((_, _, state)) if calls <= recorded => return Ok(Some((calls, state))),
            Some(_) => tracing::warn!(calls, recorded, "a snapshot is passed over: the journal lacks replies before it"),
            None => tracing::warn!(calls, "a snapshot is passed over: it is damaged"),
        }
    }
    Ok(None)
}

fn read(bytes: &[u8]) -> Option<(Digest, u64, JobState)> {
    let (body, digest) = bytes.split_at_checked(bytes.len().checked_sub(DIGEST_BYTES)?)?;
    if Digest::of(body).as_bytes() != digest {
        return None;
    }
    decode(body).ok()
}

fn name(calls: u64) -> String {
    format!("{PREFIX}{calls}")
}

/// How many calls each of those that are there has, in order.
fn all(dir: &Dir) -> anyhow::Result<Vec<u64>> {
    let mut found = Vec::new();
    for entry in dir.entries().context("listing snapshots")? {
        let name = entry.context("listing snapshots")?.file_name();
        found.extend(name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u64>().ok()));
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use cap_std::fs::Dir;

    use super::{NEW, name, sizes, write};

    #[test]
    fn half_a_snapshot_goes_and_whole_ones_are_measured() {
        let folder = tempfile::tempdir().unwrap();
        let dir = Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        dir.write(NEW, b"half").unwrap();
        let mut there = sizes(&dir).unwrap();
        assert!(there.is_empty() && !dir.exists(NEW));
        for (calls, bytes) in [(3, &b"one"[..]), (5, b"four"), (9, b"ninth")] {
            write(&dir, calls, bytes, &mut there).unwrap();
            assert_eq!(there, sizes(&dir).unwrap(), "the count is what is there");
        }
        assert_eq!(there, [(5, 4), (9, 5)].into());
        assert!(!dir.exists(name(3)));
    }
}
