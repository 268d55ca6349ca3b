//! Says what a run needs and what this machine has.
//!
//! Looks and never changes: it makes no folder and starts no job.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context as _;
use nodus_kernels::Device as _;
use nodus_kernels::cpu::CpuDevice;
use nodus_sandbox::{Sandbox, SandboxOptions};

use crate::guest;
use crate::machine;
use crate::paths::{Paths, shown};
use crate::store::Store;
use crate::text::bytes;

/// Writes the report.
///
/// # Errors
/// Ours: standard output cannot be written.
pub(crate) fn report(paths: Paths, data_dir: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let lines = [
        ("version", format!("nodus-host {}", env!("CARGO_PKG_VERSION"))),
        ("data folder", data_folder(paths, data_dir)),
        ("threads", std::thread::available_parallelism().map_or_else(|error| format!("not known: {error}"), |n| n.to_string())),
        ("memory", memory(paths)),
        ("sandbox", sandbox()),
        ("guests", guest::probe::report()),
    ];
    let write = || -> io::Result<()> {
        for (name, value) in lines {
            writeln!(out, "{name:<12} {value}")?;
        }
        match CpuDevice::new(1) {
            Ok(device) => {
                writeln!(out, "device class (bits are promised inside one class only)")?;
                device.class().iter().try_for_each(|(name, value)| writeln!(out, "  {name:<12} {value}"))
            }
            Err(error) => writeln!(out, "{:<12} failed: {error}", "device"),
        }
    };
    write().context("writing to standard output")
}

fn data_folder(paths: Paths, data_dir: &Path) -> String {
    let place = shown(data_dir);
    if paths.entries(data_dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return format!("{place}, made at the first import");
    }
    let counted = || -> anyhow::Result<(usize, usize)> {
        let store = Store::open(paths.open_dir(data_dir)?)?;
        Ok((store.models()?.len(), store.datasets()?.len()))
    };
    match counted() {
        Ok((models, data)) => format!("{place}, models: {models}, data sets: {data}"),
        Err(error) => format!("{place}: {error:#}"),
    }
}

/// Memory of the machine; a run needs the model's weights in float32 and about 1 GB.
fn memory(paths: Paths) -> String {
    match machine::memory(paths) {
        Some(memory) => {
            let (total, free) = (bytes(memory.total), bytes(memory.available));
            format!("{total}, {free} free; a run needs the weights in float32 and about 1 GB")
        }
        None => "not known on this system".to_owned(),
    }
}

fn sandbox() -> String {
    match Sandbox::new(SandboxOptions::default()) {
        Ok(_) => "ready".to_owned(),
        Err(error) => format!("cannot start: {:#}", anyhow::Error::from(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::report;
    use crate::paths::Paths;

    #[test]
    fn it_reports_and_makes_nothing() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::new(cap_std::ambient_authority());
        let mut out = Vec::new();
        report(paths, &root.path().join("absent"), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for expected in ["made at the first import", "sandbox      ready", "backend", "kernels"] {
            assert!(text.contains(expected), "`{expected}` is missing in {text}");
        }
        assert_eq!(paths.entries(root.path()).unwrap(), 0);
    }
}
