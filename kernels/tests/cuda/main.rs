//! The CUDA device against its twin and against itself. Where there is no card, each test says in one line that it was skipped.
//!
//! `NODUS_CUDA_LIBRARIES` names folders that hold NVRTC and cuBLASLt, separated by colons; `NODUS_REQUIRE_CUDA` turns skipping into failing;
//! `NODUS_CUDA_CACHE` names a folder in which kernels that compiled are kept;
//! `NODUS_CUDA_CASES` is the number of random shapes (24; fewer under a sanitizer); `NODUS_CUDA_ONLY` names the one operation to compare (racecheck takes
//! minutes for some).
#![expect(clippy::disallowed_methods, reason = "a test has no main to hand it the environment")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]
#![expect(clippy::print_stdout, reason = "skips and tables are for people")]

mod beside;
mod compile;
mod exact;
mod gate_up;
mod memory;
mod twins;

use std::path::PathBuf;

use nodus_kernels::DeviceError;
use nodus_kernels::cuda::{Cache, CudaDevice, CudaOptions, Precision};

/// Folders to look for libraries in.
fn folders() -> Vec<String> {
    std::env::var("NODUS_CUDA_LIBRARIES").map(|text| text.split(':').map(str::to_owned).collect()).unwrap_or_default()
}

/// A folder of compiled kernels.
struct Folder(PathBuf);

impl Cache for Folder {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        let draft = self.0.join(format!("{name}.{}", std::process::id()));
        std::fs::write(&draft, bytes).unwrap();
        std::fs::rename(draft, self.0.join(name)).unwrap();
    }
}

/// What is kept of earlier runs, where a folder for it is named.
fn cache() -> Option<Box<dyn Cache>> {
    std::env::var_os("NODUS_CUDA_CACHE").map(|folder| Box::new(Folder(folder.into())) as Box<dyn Cache>)
}

/// Says that a test is skipped, or fails where skipping is not allowed.
fn skip(test: &str, why: &str) {
    assert!(std::env::var_os("NODUS_REQUIRE_CUDA").is_none(), "{test}: {why}");
    println!("skipped {test}: {why}");
}

/// Card 0, or none where there is none.
fn open(test: &str, precision: Precision) -> Option<CudaDevice> {
    match CudaDevice::open(0, precision, CudaOptions { library_folders: folders(), cache: cache(), ..CudaOptions::default() }) {
        Ok(device) => Some(device),
        Err(DeviceError::Unsupported(why)) => {
            skip(test, &why);
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// How many random shapes.
fn cases() -> u32 {
    std::env::var("NODUS_CUDA_CASES").map_or(24, |text| text.parse().unwrap())
}

/// The one operation to compare, where one is named.
fn only() -> Option<String> {
    std::env::var("NODUS_CUDA_ONLY").ok()
}

const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];
