//! The service's settings: a TOML file, and the command line over it.
//!
//! Knows no default but that of the address: what is not said is decided where it is used.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use nodus_sandbox::Limits;
use nodus_state::Lane;

use super::config_file::{File, file};
use crate::cli::{FloorArgs, ReadyMade, RemoteLane, SandboxArgs, ServeArgs};
use crate::error::{exit_code, user};
use crate::limits::{MAXIMA, over};
use crate::paths::{Paths, shown};

/// Longest file.
const BYTES_MAX: u64 = 1 << 20;
/// Where it listens without a word.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7643);

/// What the operator wants.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) listen: SocketAddr,
    /// Certificate chain and private key.
    pub(super) tls: Option<(PathBuf, PathBuf)>,
    pub(super) is_insecure: bool,
    pub(super) offers_merged: bool,
    /// The lanes that tenants may choose.
    pub(super) lanes: Vec<Lane>,
    /// What tenants may set a job's limits to.
    pub(super) limits: Limits,
    pub(super) components: Vec<ReadyMade>,
    /// Where spans go.
    pub(super) otlp: Option<String>,
    pub(super) floor: FloorArgs,
    pub(super) sandbox: SandboxArgs,
}

/// The command line's, over the file's where one is named.
///
/// # Errors
/// The user's: what is wrong with the file.
pub(super) fn settings(paths: Paths, args: &ServeArgs) -> anyhow::Result<Settings> {
    let file = match &args.config {
        None => File::default(),
        Some(path) => {
            let within = |error: anyhow::Error| if exit_code(&error) == 2 { user(format!("{}: {error}", shown(path))) } else { error };
            let text = String::from_utf8(paths.read(path, BYTES_MAX)?).map_err(|_| within(user("not UTF-8")))?;
            file(&text, path.parent().unwrap_or(Path::new(""))).map_err(within)?
        }
    };
    let tls = match (args.tls_cert.clone().or(file.tls_cert), args.tls_key.clone().or(file.tls_key)) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        _ => return Err(user("TLS needs both a certificate and its key, expected tls_cert and tls_key")),
    };
    // One that the command line names too is the command line's.
    let mut components = args.components.clone();
    components.extend(file.components.into_iter().filter(|made| args.components.iter().all(|given| given.name != made.name)));
    let listen = args.listen.or(file.listen).unwrap_or(LISTEN);
    let (is_insecure, offers_merged) = (args.insecure || file.insecure, args.offer_merged || file.offer_merged);
    let (floor, otlp) = (args.floor.clone().over(file.floor), args.otlp.clone().or(file.otlp));
    let (usual, given) = (SandboxArgs::default(), args.sandbox);
    let sandbox = SandboxArgs {
        require_os_sandbox: given.require_os_sandbox || file.require_os_sandbox,
        // What the command line has without a word is no word.
        guest_silence_ms: file
            .guest_silence_ms
            .filter(|_| given.guest_silence_ms == usual.guest_silence_ms)
            .unwrap_or(given.guest_silence_ms),
        ..given
    };
    let (lanes, limits) = (lanes(&floor.lanes), over(MAXIMA, &file.limits));
    Ok(Settings { listen, tls, is_insecure, offers_merged, lanes, limits, components, otlp, floor, sandbox })
}

fn lanes(named: &[RemoteLane]) -> Vec<Lane> {
    let lane = |lane: &RemoteLane| match lane {
        RemoteLane::Fused => Lane::Fused,
        RemoteLane::Mps => Lane::Mps,
        RemoteLane::Solo => Lane::Solo,
    };
    if named.is_empty() { Lane::ALL.to_vec() } else { named.iter().map(lane).collect() }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use nodus_state::Lane;

    use super::{MAXIMA, settings};
    use crate::cli::{DeviceChoice, FloorArgs, SandboxArgs, ServeArgs};
    use crate::paths::Paths;
    use crate::serve::config_file::{KEYS, tests::TEXT};

    #[test]
    fn every_key_is_read_and_the_command_line_goes_first() {
        assert!(KEYS.iter().all(|key| TEXT.contains(&format!("{key} = ")) || TEXT.contains(&format!("[{key}]"))));
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::new(cap_std::ambient_authority());
        paths.open_dir(root.path()).unwrap().write("serve.toml", TEXT).unwrap();
        let args = ServeArgs { config: Some(root.path().join("serve.toml")), ..ServeArgs::default() };
        let read = settings(paths, &args).unwrap();
        assert_eq!(read.listen.to_string(), "0.0.0.0:80");
        assert_eq!(read.tls.unwrap(), (root.path().join("cert.pem"), "/key.pem".into()));
        assert!(read.is_insecure && read.offers_merged && read.floor.hold && read.sandbox.require_os_sandbox);
        assert_eq!((read.components.len(), &read.components[1].path), (2, &root.path().join("sft.wasm")));
        assert_eq!((read.lanes.as_slice(), read.otlp.as_deref()), (&[Lane::Fused, Lane::Solo][..], Some("http://127.0.0.1:4318")));
        assert_eq!((read.limits.guest_memory_bytes, read.limits.wall_ms, read.limits.handles), (512 << 20, 1000, MAXIMA.handles));
        let FloorArgs { devices, memory, snapshot_every, mps_engines, .. } = &read.floor;
        assert_eq!((devices.as_slice(), *memory), (&[DeviceChoice::Cuda(0), DeviceChoice::Cpu][..], Some(8 << 30)));
        assert_eq!((*snapshot_every, mps_engines.unwrap().get()), (Some(Duration::from_millis(2500)), 8));
        assert_eq!((read.floor.patience, read.sandbox.guest_silence_ms), (Some(Duration::from_secs(30)), 90_000));

        let listen = Some("127.0.0.1:0".parse().unwrap());
        let floor = FloorArgs { memory: Some(1), devices: vec![DeviceChoice::Cpu], ..FloorArgs::default() };
        let sandbox = SandboxArgs { guest_silence_ms: 5000, ..SandboxArgs::default() };
        let args = ServeArgs { listen, components: vec!["sft=own.wasm".parse().unwrap()], floor, sandbox, ..args };
        let read = settings(paths, &args).unwrap();
        assert_eq!((Some(read.listen), read.components.len(), read.components[0].path.as_path()), (listen, 2, Path::new("own.wasm")));
        assert_eq!((read.floor.memory, read.floor.devices.len(), read.sandbox.guest_silence_ms), (Some(1), 1, 5000));
        let usual = settings(paths, &ServeArgs::default()).unwrap();
        assert_eq!((usual.listen.to_string().as_str(), usual.lanes.as_slice()), ("127.0.0.1:7643", Lane::ALL));
        assert_eq!(usual.limits, MAXIMA);
    }
}
