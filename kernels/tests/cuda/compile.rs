//! What can be checked without a card: the sources, for every architecture, and what is said where something is missing.

use nodus_kernels::DeviceError;
use nodus_kernels::cuda::{CudaDevice, CudaOptions, Found, Precision, compile_everything, probe};

use super::{cache, folders, skip};

#[test]
fn every_kernel_compiles_for_every_architecture() {
    if probe(&folders()).nvrtc == Found::Missing {
        return skip("every_kernel_compiles_for_every_architecture", "NVRTC is in none of NODUS_CUDA_LIBRARIES");
    }
    let check = |architecture: &str| {
        let compiled = compile_everything(architecture, &folders(), cache()).unwrap_or_else(|error| panic!("{architecture}: {error}"));
        let bytes: usize = compiled.iter().map(|(_, bytes)| bytes).sum();
        println!("{architecture}: {} programs, {bytes} bytes", compiled.len());
        assert!(compiled.iter().all(|(_, bytes)| *bytes > 1000), "{compiled:?}");
    };
    std::thread::scope(|scope| {
        let threads = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"].map(|architecture| scope.spawn(move || check(architecture)));
        for thread in threads {
            thread.join().unwrap();
        }
    });
    let refused = compile_everything("sm_9x", &folders(), None).unwrap_err();
    assert!(refused.to_string().contains("does not compile"), "{refused}");
}

#[test]
fn a_missing_library_is_a_refusal_that_says_what_to_install() {
    let found = probe(&folders());
    if found.missing().is_empty() {
        // All is there; the refusal is for elsewhere.
        assert!(found.refusal().is_none());
        return;
    }
    let refusal = CudaDevice::open(0, Precision::F32, CudaOptions { library_folders: folders(), ..CudaOptions::default() });
    let Err(DeviceError::Unsupported(text)) = refusal else { panic!("{refusal:?}") };
    for library in found.missing() {
        assert!(text.contains(library.name()) && text.contains(library.remedy()), "{text}");
        assert!(found.to_string().contains("missing"), "{found}");
    }
}
