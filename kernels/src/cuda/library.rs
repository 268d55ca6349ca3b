//! Finds the driver, NVRTC, cuBLASLt and the cards, and says what is missing and how to get it.
//!
//! Never fails where they are not there, and never reads the environment: folders to look in are handed over.
#![expect(unsafe_code, reason = "loads NVIDIA's libraries")]

use std::fmt;
use std::sync::{Mutex, PoisonError};

use cudarc::{cublaslt, driver, nvrtc};

use super::driver::{Gpu, failed, properties, start};
use super::{blas, compile, shared};
use crate::DeviceError;

/// A library that the CUDA device needs at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`: the driver's own.
    Driver,
    /// `libnvrtc`: compiles the kernels.
    Nvrtc,
    /// `libcublasLt`: the base products.
    CublasLt,
}

/// Where a library was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// By the system's loader.
    System,
    /// In this folder of those handed over.
    Folder(String),
    /// Nowhere.
    Missing,
}

/// What was found; its `Display` is one line a library, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The driver.
    pub driver: Found,
    /// NVRTC.
    pub nvrtc: Found,
    /// cuBLASLt.
    pub cublaslt: Found,
}

impl Library {
    /// Its name to people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "the NVIDIA driver (libcuda)",
            Self::Nvrtc => "NVRTC (libnvrtc)",
            Self::CublasLt => "cuBLASLt (libcublasLt)",
        }
    }

    /// How to get it.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver for this card, 580 or newer",
            Self::Nvrtc => "install the CUDA 13 toolkit, or `pip install nvidia-cuda-nvrtc` (then it is in site-packages/nvidia/cu13/lib)",
            Self::CublasLt => "install the CUDA 13 toolkit, or `pip install nvidia-cublas` (then it is in site-packages/nvidia/cu13/lib)",
        }
    }

    fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &[],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12"],
        }
    }

    /// What a library opens by itself, by a name that the loader then finds: NVRTC's built-in functions, one file for a minor version.
    fn companions(self) -> Vec<String> {
        match self {
            Self::Driver | Self::CublasLt => Vec::new(),
            Self::Nvrtc => {
                [13, 12].into_iter().flat_map(|major| (0..=9).map(move |minor| format!("libnvrtc-builtins.so.{major}.{minor}"))).collect()
            }
        }
    }

    fn present(self) -> bool {
        match self {
            // SAFETY: loads and unloads `libcuda`, whose initialisers have no preconditions; no symbol of it is kept.
            Self::Driver => unsafe { driver::sys::is_culib_present() },
            // SAFETY: as above, for `libnvrtc`.
            Self::Nvrtc => unsafe { nvrtc::sys::is_culib_present() },
            // SAFETY: as above, for `libcublasLt`.
            Self::CublasLt => unsafe { cublaslt::sys::is_culib_present() },
        }
    }

    fn find(self, folders: &[String]) -> Found {
        // What was loaded from a folder stays loaded, and would look like the system's the next time.
        static LOADED: Mutex<Vec<(Library, String)>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, folder)) = loaded.iter().find(|(library, _)| *library == self) {
            return Found::Folder(folder.clone());
        }
        if self.present() {
            return Found::System;
        }
        for folder in folders {
            for file in self.files() {
                if load(folder, file) && self.present() {
                    for companion in self.companions() {
                        load(folder, &companion);
                    }
                    loaded.push((self, folder.clone()));
                    return Found::Folder(folder.clone());
                }
            }
        }
        Found::Missing
    }
}

/// Loads a library from a folder for the life of the process: whoever looks for it by its name then finds it.
fn load(folder: &str, file: &str) -> bool {
    // SAFETY: the initialisers of NVRTC and cuBLASLt have no preconditions. That the file is NVIDIA's is upheld by whoever handed the folder
    // over: the operator's configuration, never a guest's.
    let library = unsafe { libloading::Library::new(format!("{folder}/{file}")) };
    library.map(std::mem::forget).is_ok()
}

/// Looks for the three libraries: on the system first, then in `folders` in order. Libraries found in a folder are loaded from there.
#[must_use]
pub fn probe(folders: &[String]) -> Probe {
    Probe { driver: Library::Driver.find(folders), nvrtc: Library::Nvrtc.find(folders), cublaslt: Library::CublasLt.find(folders) }
}

/// An NVIDIA card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its number, from 0.
    pub ordinal: usize,
    /// Its name, as the driver has it.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: i32,
    /// What it is known by in every process, whatever its number is there.
    pub uuid: [u8; 16],
}

/// The cards, in the driver's order.
///
/// # Errors
/// `Unsupported` where there is no driver, or one that is too old; the text says what to do. `Failed` where the driver fails.
pub fn cards() -> Result<Vec<Card>, DeviceError> {
    if !Library::Driver.present() {
        return Err(DeviceError::Unsupported(missing(Library::Driver)));
    }
    let (version, count) = start()?;
    let card = |ordinal: i32| {
        let device = driver::result::device::get(ordinal).map_err(|error| failed("opening the card", error))?;
        let properties = properties(device, version)?;
        let (name, capability, multiprocessors) = (properties.name, properties.capability, properties.multiprocessors);
        let uuid = driver::result::device::get_uuid(device).map_err(|error| failed("the card's UUID", error))?;
        let uuid = uuid.bytes.map(|byte| u8::from_ne_bytes(byte.to_ne_bytes()));
        Ok(Card { ordinal: ordinal.unsigned_abs() as usize, name, capability, multiprocessors, uuid })
    };
    (0..count).map(card).collect()
}

/// Free bytes of a card's memory. The caller has seen the card.
///
/// # Errors
/// There is no such card, it is too old, or the driver fails.
pub fn free_bytes(ordinal: usize) -> Result<u64, DeviceError> {
    Gpu::open(ordinal)?.free_bytes()
}

/// Whether processes can share weights on a card. The caller has seen the card.
///
/// # Errors
/// As [`free_bytes`].
pub fn can_share(ordinal: usize) -> Result<bool, DeviceError> {
    shared::can_share(&*Gpu::open(ordinal)?)
}

fn missing(library: Library) -> String {
    format!("{} was not found: {}", library.name(), library.remedy())
}

impl Library {
    /// Its version; of the driver the version of CUDA that it speaks. None where it was not found or does not say.
    #[must_use]
    pub fn version(self, found: &Found) -> Option<String> {
        if *found == Found::Missing {
            return None;
        }
        match self {
            Self::Driver => start().ok().map(|(version, _)| format!("CUDA {}.{}", version / 1000, version % 1000 / 10)),
            Self::Nvrtc => compile::version().ok().map(|(major, minor)| format!("{major}.{minor}")),
            Self::CublasLt => {
                let version = blas::version();
                Some(format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100))
            }
        }
    }
}

impl Probe {
    /// The three, each with where it was found.
    #[must_use]
    pub fn libraries(&self) -> [(Library, &Found); 3] {
        [(Library::Driver, &self.driver), (Library::Nvrtc, &self.nvrtc), (Library::CublasLt, &self.cublaslt)]
    }

    /// Those that are missing.
    #[must_use]
    pub fn missing(&self) -> Vec<Library> {
        self.libraries().into_iter().filter(|(_, found)| **found == Found::Missing).map(|(library, _)| library).collect()
    }

    /// What is missing and how to get it, in one sentence a library; none where all is there.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        let missing: Vec<String> = self.missing().into_iter().map(missing).collect();
        (!missing.is_empty()).then(|| missing.join("; "))
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (library, found) in self.libraries() {
            let version = library.version(found).map_or_else(String::new, |version| format!(" {version}"));
            match found {
                Found::System => writeln!(f, "{}{version}: found on the system", library.name())?,
                Found::Folder(folder) => writeln!(f, "{}{version}: found in {folder}", library.name())?,
                Found::Missing => writeln!(f, "{}: missing; {}", library.name(), library.remedy())?,
            }
        }
        Ok(())
    }
}
