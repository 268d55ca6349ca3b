//! The CUDA device against its twin and against itself. Where there is no card, each test says in one line that it was skipped.
//!
//! `NODUS_CUDA_LIBRARIES` names folders that hold NVRTC and cuBLASLt, separated by colons; `NODUS_REQUIRE_CUDA` turns skipping into failing;
//! `NODUS_CUDA_CASES` is the number of random shapes (24; fewer under a sanitizer).
#![expect(clippy::disallowed_methods, reason = "a test has no main to hand it the environment")]
#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]
#![expect(clippy::print_stdout, reason = "skips and tables are for people")]

mod compile;
mod exact;
mod twins;

use nodus_kernels::DeviceError;
use nodus_kernels::cuda::{CudaDevice, CudaOptions, Precision};

/// Folders to look for libraries in.
fn folders() -> Vec<String> {
    std::env::var("NODUS_CUDA_LIBRARIES").map(|text| text.split(':').map(str::to_owned).collect()).unwrap_or_default()
}

/// Says that a test is skipped, or fails where skipping is not allowed.
fn skip(test: &str, why: &str) {
    assert!(std::env::var_os("NODUS_REQUIRE_CUDA").is_none(), "{test}: {why}");
    println!("skipped {test}: {why}");
}

/// Card 0, or none where there is none.
fn open(test: &str, precision: Precision) -> Option<CudaDevice> {
    match CudaDevice::open(0, precision, CudaOptions { library_folders: folders(), ..CudaOptions::default() }) {
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

const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];
