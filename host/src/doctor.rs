//! Says what a run needs and what this machine has.
//!
//! Looks and never changes: it makes no folder and starts no job.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context as _;
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::cuda::{Cache, CudaDevice, CudaOptions, Found, Precision, cards, probe};
use nodus_kernels::{AttentionShape, Device as _, DeviceError};
use nodus_sandbox::{Sandbox, SandboxOptions};

use crate::app::Surroundings;
use crate::cuda::{self, KernelCache};
use crate::guest;
use crate::machine;
use crate::paths::{Paths, shown};
use crate::store::{KERNELS, Store};
use crate::text::bytes;

/// Weights of a 0.5B model, and heads as most models have them; a run checks those of its own model.
const GATE_MATRICES: [(usize, usize); 4] = [(896, 896), (128, 896), (4864, 896), (896, 4864)];
const GATE_HEADS: AttentionShape = AttentionShape { heads: 14, kv_heads: 2, head_dim: 64, window: None };

/// Writes the report.
///
/// # Errors
/// Ours: standard output cannot be written.
pub(crate) fn report(surroundings: &Surroundings, data_dir: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let paths = surroundings.paths;
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
        cuda(surroundings, data_dir).iter().try_for_each(|line| writeln!(out, "{line}"))?;
        match CpuDevice::new(1) {
            Ok(device) => {
                writeln!(out, "device class of the CPU (bits are promised inside one class only)")?;
                device.class(&[]).iter().try_for_each(|(name, value)| writeln!(out, "  {name:<12} {value}"))
            }
            Err(error) => writeln!(out, "{:<12} failed: {error}", "device"),
        }
    };
    write().context("writing to standard output")
}

/// The driver, the libraries, the cards; and of the first card that can be used its class and what the exactness gate says of it.
fn cuda(surroundings: &Surroundings, data_dir: &Path) -> Vec<String> {
    let folders = cuda::folders(surroundings.paths, &surroundings.devices);
    let mut lines = vec!["cuda".to_owned()];
    let found = probe(&folders);
    lines.extend(found.to_string().lines().map(|line| format!("  {line}")));
    if let Some(version) = cuda::driver_version(surroundings.paths) {
        lines.push(format!("  the driver's own version: {version}"));
    }
    match cards() {
        Ok(cards) => lines.extend(cards.iter().map(|card| {
            let (major, minor) = card.capability;
            format!("  card {}: {}, compute capability {major}.{minor}, {} multiprocessors", card.ordinal, card.name, card.multiprocessors)
        })),
        Err(error) if found.driver != Found::Missing => lines.push(format!("  no cards: {error}")),
        Err(_) => {}
    }
    match cuda::card(0, &folders) {
        Err(why) if found.missing().is_empty() => lines.push(format!("  --device auto uses the CPU: {why}")),
        Err(_) => lines.push("  --device auto uses the CPU, since something is missing".to_owned()),
        Ok(card) => {
            lines.push(format!("  --device auto uses cuda:{}", card.ordinal));
            for precision in [Precision::F32, Precision::Bf16] {
                lines.extend(gate(surroundings.paths, data_dir, precision, &folders));
            }
        }
    }
    lines
}

/// Runs the exactness gate over every operation and over the products of a small model's sizes; recalled where it was run before.
fn gate(paths: Paths, data_dir: &Path, precision: Precision, folders: &[String]) -> Vec<String> {
    let kernels = paths.open_dir(&data_dir.join(KERNELS)).ok();
    let options = CudaOptions {
        library_folders: folders.to_vec(),
        cache: kernels.map(|dir| Box::new(KernelCache(dir)) as Box<dyn Cache>),
        ..CudaOptions::default()
    };
    let proved = || -> Result<Vec<String>, DeviceError> {
        let mut device = CudaDevice::open(0, precision, options)?;
        device.plan_matrices(&GATE_MATRICES)?;
        let report = device.prove(&[GATE_HEADS])?.clone();
        let (cases, what) = (report.cases(), format!("{precision:?}").to_lowercase());
        let mut lines = vec![format!("  exactness gate in {what}: {} ({cases} comparisons)", report.verdict())];
        lines.extend(report.furthest().map(|furthest| format!("  beside the CPU in {what}: {furthest}, no operation by more")));
        lines.push(format!("  device class in {what}"));
        lines.extend(device.class(&GATE_MATRICES).iter().map(|(name, value)| format!("    {name:<18} {value}")));
        Ok(lines)
    };
    proved().unwrap_or_else(|error| vec![format!("  exactness gate: failed to run: {error}")])
}

fn data_folder(paths: Paths, data_dir: &Path) -> String {
    let place = shown(data_dir);
    if paths.entries(data_dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return format!("{place}, made at the first import");
    }
    let counted = || -> anyhow::Result<(usize, usize)> {
        let store = Store::open_to_read(paths.open_dir(data_dir)?)?;
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
    use crate::app::Surroundings;
    use crate::cuda::DeviceEnv;
    use crate::paths::Paths;

    #[test]
    fn it_reports_and_makes_nothing() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::new(cap_std::ambient_authority());
        let mut out = Vec::new();
        let surroundings = Surroundings {
            paths,
            data_dir: None,
            is_terminal: false,
            devices: DeviceEnv::default(),
            service: crate::client::ServiceEnv::default(),
        };
        report(&surroundings, &root.path().join("absent"), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        for expected in ["made at the first import", "sandbox      ready", "backend", "kernels", "libcuda", "libnvrtc", "libcublasLt"] {
            assert!(text.contains(expected), "`{expected}` is missing in {text}");
        }
        assert_eq!(paths.entries(root.path()).unwrap(), 0);
    }
}
