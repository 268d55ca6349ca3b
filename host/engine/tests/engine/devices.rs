//! The devices that tests run on: the CPU's, one that leaks between rows, and the card's, where there is one.
//!
//! `NODUS_CUDA_LIBRARIES` names folders that hold NVRTC and cuBLASLt, separated by colons; `NODUS_REQUIRE_CUDA` turns skipping into failing;
//! `NODUS_CUDA_CACHE` names a folder in which compiled kernels are kept.
#![expect(clippy::disallowed_methods, reason = "a test has no main to hand it the environment")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use nodus_engine::plan::{attention_shape, matrices};
use nodus_kernels::cpu::CpuDevice;
use nodus_kernels::cuda::{Cache, CudaDevice, CudaOptions, GateReport, Precision};
use nodus_kernels::{Device, DeviceError};
use nodus_protocol::ModelConfig;

#[cfg(not(feature = "broken"))]
use crate::apart::Apart;

/// Where a test's devices come from.
pub(crate) trait Devices {
    type Device: Device;

    /// One that nobody else uses.
    fn open(&self, threads: usize) -> Self::Device;

    /// One that is not needed any more.
    fn give_back(&self, device: Self::Device) {
        drop(device);
    }
}

/// The CPU's.
pub(crate) struct Cpu;

impl Devices for Cpu {
    type Device = CpuDevice;

    fn open(&self, threads: usize) -> CpuDevice {
        CpuDevice::new(threads).unwrap()
    }
}

/// One whose results depend on how many rows a pass has; it owns up to it or not.
#[cfg(not(feature = "broken"))]
pub(crate) struct Leaky {
    pub(crate) owns_up: bool,
}

#[cfg(not(feature = "broken"))]
impl Devices for Leaky {
    type Device = Apart;

    fn open(&self, threads: usize) -> Apart {
        Apart { leaks: true, owns_up: self.owns_up, ..Apart::new(CpuDevice::new(threads).unwrap()) }
    }
}

/// Compiled kernels and what the gate found, for all devices of one test.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<HashMap<String, Vec<u8>>>>);

impl Cache for Kept {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        kept.or_else(|| std::fs::read(folder()?.join(name)).ok())
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), bytes.to_vec());
        if let Some(folder) = folder() {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
    }
}

/// Where what is kept outlives the tests.
fn folder() -> Option<PathBuf> {
    std::env::var_os("NODUS_CUDA_CACHE").map(PathBuf::from)
}

/// The first card, its gate run for some models. Opening it takes long, so that devices are used again.
pub(crate) struct Cuda {
    precision: Precision,
    models: Vec<ModelConfig>,
    kept: Kept,
    spare: RefCell<Vec<CudaDevice>>,
    report: Rc<RefCell<Option<GateReport>>>,
}

impl Cuda {
    /// None where there is no card; a line says so.
    pub(crate) fn new(test: &str, precision: Precision, models: Vec<ModelConfig>) -> Option<Self> {
        let cuda = Self { precision, models, kept: Kept::default(), spare: RefCell::default(), report: Rc::default() };
        match cuda.fresh() {
            Ok(device) => cuda.give_back(device),
            Err(DeviceError::Unsupported(why)) => {
                assert!(std::env::var_os("NODUS_REQUIRE_CUDA").is_none(), "{test}: {why}");
                println!("skipped {test}: {why}");
                return None;
            }
            Err(error) => panic!("{test}: {error}"),
        }
        Some(cuda)
    }

    fn fresh(&self) -> Result<CudaDevice, DeviceError> {
        let folders = std::env::var("NODUS_CUDA_LIBRARIES").map(|text| text.split(':').map(str::to_owned).collect());
        let options = CudaOptions {
            library_folders: folders.unwrap_or_default(),
            cache: Some(Box::new(self.kept.clone())),
            ..CudaOptions::default()
        };
        let mut device = CudaDevice::open(0, self.precision, options)?;
        // Nothing may depend on what memory holds before it is written.
        device.poison_passes(true);
        // Alone most jobs go by one kernel or two, in company by the other.
        device.gate_up_from(512);
        self.models.iter().try_for_each(|model| device.plan_matrices(&matrices(model)))?;
        let shapes: Vec<_> = self.models.iter().map(attention_shape).collect();
        *self.report.borrow_mut() = Some(device.prove(&shapes)?.clone());
        Ok(device)
    }

    /// What the gate found.
    pub(crate) fn report(&self) -> GateReport {
        self.report.borrow().clone().unwrap()
    }
}

impl Devices for Cuda {
    type Device = CudaDevice;

    fn open(&self, _: usize) -> CudaDevice {
        let spare = self.spare.borrow_mut().pop();
        spare.unwrap_or_else(|| self.fresh().unwrap())
    }

    fn give_back(&self, device: CudaDevice) {
        self.spare.borrow_mut().push(device);
    }
}
