//! A report's two files, read and written.
//!
//! Never leaves a file half written.

use std::path::Path;

use anyhow::Context as _;
use cap_std::fs::Dir;

use super::html;
use super::report::{FORMAT, Report};
use crate::error::user;
use crate::paths::{Paths, shown};
use crate::store::write_synced;
use crate::text::escape;

/// Largest report that is read.
const REPORT_BYTES_MAX: u64 = 256 << 20;

/// Reads a `report.json`.
///
/// # Errors
/// The user's: it is none, or of another layout.
pub(super) fn read(paths: Paths, path: &Path) -> anyhow::Result<Report> {
    #[derive(serde::Deserialize)]
    struct Head {
        format: String,
    }
    let text = paths.read(path, REPORT_BYTES_MAX)?;
    let none = |error: serde_json::Error| user(format!("{} is no report of `bench`: {error}", shown(path)));
    let Head { format } = serde_json::from_slice(&text).map_err(none)?;
    if format != FORMAT {
        return Err(user(format!("{} is of the format `{}`, expected `{FORMAT}`", shown(path), escape(&format))));
    }
    serde_json::from_slice(&text).map_err(none)
}

/// Writes `report.json` and `report.html`, in place of what is there.
pub(super) fn write(dir: &Dir, report: &Report) -> anyhow::Result<()> {
    for (name, content) in [("report.json", serde_json::to_vec_pretty(report)?), ("report.html", html::page(report).into_bytes())] {
        let new = format!(".{name}.new");
        write_synced(dir, &new, &content)?;
        dir.rename(&new, dir, name).with_context(|| format!("renaming {new}"))?;
    }
    Ok(())
}
