//! NVIDIA's cards as this machine has them: where their libraries are looked for, which card is meant, and why none can be used.
//!
//! Never computes, and never takes another card than the one that was asked for.

use std::path::PathBuf;

use cap_std::fs::Dir;
use nodus_kernels::DeviceError;
use nodus_kernels::cuda::{Cache, Card, cards, probe};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::paths::Paths;
use crate::text::count;

/// What the environment says of devices; `main` reads it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DeviceEnv {
    /// `NODUS_DEVICE`: what `--device` is where it is not given.
    pub device: Option<String>,
    /// `NODUS_CUDA_LIBRARIES`: folders with NVRTC and cuBLASLt, separated by colons.
    pub libraries: Option<String>,
    /// Roots of CUDA toolkits: `CUDA_HOME`, `CUDA_PATH`.
    pub toolkits: Vec<PathBuf>,
    /// Roots of Python environments: `VIRTUAL_ENV`, `CONDA_PREFIX`, `~/.local`.
    pub pythons: Vec<PathBuf>,
}

/// What has the driver show a process some cards only; without it, it shows all.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The number of a card that is shown alone.
pub(crate) const ALONE: usize = 0;

/// Folders of NVIDIA's wheels below a `site-packages`: those of CUDA 13, then those of CUDA 12.
const WHEELS: [&str; 3] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cublas/lib"];
/// Where Linux says which driver is loaded.
const DRIVER_FILE: &str = "/proc/driver/nvidia/version";

/// Folders that may hold NVRTC and cuBLASLt and are there: those named, toolkits, then wheels.
pub(crate) fn folders(paths: Paths, env: &DeviceEnv) -> Vec<String> {
    let named = env.libraries.iter().flat_map(|text| text.split(':')).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let usual = [PathBuf::from("/usr/local/cuda")];
    let toolkits = env.toolkits.iter().chain(&usual).flat_map(|root| [root.join("lib64"), root.join("lib")]);
    let system = [PathBuf::from("/usr/local"), PathBuf::from("/usr")];
    let mut wheels = Vec::new();
    for lib in env.pythons.iter().chain(&system).map(|root| root.join("lib")) {
        for python in paths.subfolders(&lib, "python3") {
            for packages in ["site-packages", "dist-packages"] {
                wheels.extend(WHEELS.map(|wheel| lib.join(&python).join(packages).join(wheel)));
            }
        }
    }
    let there = |folder: &PathBuf| paths.entries(folder).is_ok();
    named.chain(toolkits).chain(wheels).filter(there).filter_map(|folder| folder.to_str().map(str::to_owned)).collect()
}

/// The card of a number, with all that is needed to use it; else why not, in words for the user.
pub(crate) fn card(ordinal: usize, folders: &[String]) -> Result<Card, String> {
    if let Some(refusal) = probe(folders).refusal() {
        return Err(refusal);
    }
    let cards = cards().map_err(|error| match error {
        DeviceError::Unsupported(why) => why,
        other => other.to_string(),
    })?;
    let there = count(cards.len() as u64, "card");
    let card = cards.into_iter().find(|card| card.ordinal == ordinal);
    let card = card.ok_or_else(|| format!("there is no card {ordinal}: the driver shows {there}, numbered from 0"))?;
    match card.capability {
        (8.., _) => Ok(card),
        (major, minor) => Err(format!("{} has compute capability {major}.{minor}; 8.0 (Ampere) or newer is needed", card.name)),
    }
}

/// What [`VISIBLE`] calls a card: the same in every process, and for a daemon and its clients.
pub(crate) fn lasting_name(card: &Card) -> String {
    // Parts of a card go by another word, and by the name that NVIDIA gives them.
    let word = if card.name.contains(" MIG ") { "MIG" } else { "GPU" };
    format!("{word}-{}", Uuid::from_bytes(card.uuid))
}

/// The driver's version, such as 580.159.04, where the system tells it.
pub(crate) fn driver_version(paths: Paths) -> Option<String> {
    let text = paths.read(DRIVER_FILE.as_ref(), 1 << 16).ok()?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let is_version = |word: &&str| word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.lines().next()?.split_whitespace().find(is_version).map(str::to_owned)
}

/// Compiled kernels and what the exactness gate found, in a folder of the data folder. All of it can be made again.
pub(crate) struct KernelCache(pub(crate) Dir);

impl Cache for KernelCache {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.0.read(name).ok()
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let draft = format!("{name}.{}", std::process::id());
        let kept = self.0.write(&draft, bytes).and_then(|()| self.0.rename(&draft, &self.0, name));
        if let Err(error) = kept {
            tracing::warn!(%error, "a compiled kernel could not be kept; the next start compiles it again");
            drop(self.0.remove_file(&draft));
        }
    }
}

#[cfg(test)]
mod tests {
    use nodus_kernels::cuda::{Cache as _, Card};

    use super::{DeviceEnv, KernelCache, card, folders, lasting_name};
    use crate::paths::Paths;

    #[test]
    fn wheels_and_named_folders_are_found_where_they_are() {
        let root = tempfile::tempdir().unwrap();
        let dir = cap_std::fs::Dir::open_ambient_dir(root.path(), cap_std::ambient_authority()).unwrap();
        for folder in ["venv/lib/python3.12/site-packages/nvidia/cu13/lib", "venv/lib/other", "toolkit/lib64", "named"] {
            dir.create_dir_all(folder).unwrap();
        }
        let env = DeviceEnv {
            libraries: Some(format!("{0}/named:{0}/absent:", root.path().display())),
            toolkits: vec![root.path().join("toolkit")],
            pythons: vec![root.path().join("venv")],
            ..DeviceEnv::default()
        };
        let found = folders(Paths::new(cap_std::ambient_authority()), &env);
        let ours: Vec<_> = found.iter().filter_map(|folder| folder.strip_prefix(root.path().to_str().unwrap())).collect();
        assert_eq!(ours, ["/named", "/toolkit/lib64", "/venv/lib/python3.12/site-packages/nvidia/cu13/lib"]);
    }

    #[test]
    fn a_card_that_is_not_there_is_said_to_be_missing_and_how_to_get_it() {
        let why = card(99, &[]).unwrap_err();
        assert!(why.contains("was not found: install") || why.contains("there is no card 99"), "{why}");
    }

    #[test]
    fn a_card_is_named_as_the_driver_and_its_tools_name_it() {
        let card = |name: &str| Card {
            ordinal: 1,
            name: name.into(),
            capability: (9, 0),
            multiprocessors: 132,
            uuid: std::array::from_fn(|i| i as u8 * 17),
        };
        assert_eq!(lasting_name(&card("NVIDIA H200")), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(lasting_name(&card("NVIDIA H200 MIG 1g.18gb")), "MIG-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn what_is_kept_is_found_again() {
        let cache = KernelCache(cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap().into_dir().unwrap());
        assert_eq!(cache.get("a.cubin"), None);
        cache.put("a.cubin", b"code");
        assert_eq!(cache.get("a.cubin").unwrap(), b"code");
        assert_eq!(cache.0.entries().unwrap().count(), 1);
    }
}
