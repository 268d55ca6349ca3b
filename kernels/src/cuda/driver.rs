//! The driver: one context, one stream, raw memory, modules, launches. A thin floor over cudarc's `result` and `sys`.
//!
//! Never decides what memory is for or what a kernel means: its callers uphold that, each at its own unsafe block.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use cudarc::driver::{result, sys};

use crate::DeviceError;

/// An address in device memory.
pub(crate) type Address = u64;

/// What the driver says of a card.
#[derive(Clone, Debug)]
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) capability: (i32, i32),
    pub(crate) multiprocessors: i32,
    /// Version of CUDA that the driver speaks, 1000 major + 10 minor.
    pub(crate) driver: i32,
}

/// A card in use.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
    /// For work that keeps the card busy beside the stream; the gate's.
    side: sys::CUstream,
    pub(crate) properties: Properties,
    waited_ns: AtomicU64,
}

// SAFETY: the handles name objects of the driver, whose functions may be called from any thread; the context is made current in each.
unsafe impl Send for Gpu {}
// SAFETY: as above; nothing in the struct changes after it is made but an atomic number.
unsafe impl Sync for Gpu {}

/// A kernel that can be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    function: sys::CUfunction,
    pub(crate) parameter_bytes: usize,
}

// SAFETY: the handle names a function of a module that is unloaded only with the device (see `Module`).
unsafe impl Send for Kernel {}

pub(crate) fn failed(what: &str, error: result::DriverError) -> DeviceError {
    DeviceError::Failed(format!("{what}: {error:?}"))
}

/// The lowest driver whose functions are called here.
const DRIVER_MIN: i32 = 12080;

/// Starts the driver: the version of CUDA that it speaks, as in `Properties`, and the number of cards.
pub(crate) fn start() -> Result<(i32, i32), DeviceError> {
    result::init().map_err(|e| failed("the driver does not start", e))?;
    let mut driver = 0;
    // SAFETY: writes one integer that outlives the call.
    unsafe { sys::cuDriverGetVersion(&raw mut driver) }.result().map_err(|e| failed("the driver's version", e))?;
    if driver < DRIVER_MIN {
        let (major, minor) = (driver / 1000, driver % 1000 / 10);
        return Err(DeviceError::Unsupported(format!("the NVIDIA driver speaks CUDA {major}.{minor}; 12.8 or newer is needed")));
    }
    Ok((driver, result::device::get_count().map_err(|e| failed("counting cards", e))?))
}

impl Gpu {
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>, DeviceError> {
        let (driver, count) = start()?;
        let index = i32::try_from(ordinal).ok().filter(|i| *i < count).ok_or_else(|| {
            DeviceError::Unsupported(format!("there is no CUDA device {ordinal}; the driver shows {count}, numbered from 0"))
        })?;
        let device = result::device::get(index).map_err(|e| failed("opening the card", e))?;
        let properties = properties(device, driver)?;
        if properties.capability.0 < 8 {
            return Err(DeviceError::Unsupported(format!("{}: compute capability 8.0 (Ampere) or newer is needed", properties.name)));
        }
        // SAFETY: `device` comes from the driver.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed("the card's context", e))?;
        // SAFETY: `context` was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(|e| failed("the card's context", e))?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(|e| failed("a stream", e))?;
        let side = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(|e| failed("a stream", e))?;
        Ok(Arc::new(Self { device, context, stream, side, properties, waited_ns: AtomicU64::new(0) }))
    }

    /// Makes the context this thread's.
    pub(crate) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained until this value is dropped.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| failed("the card's context", e))
    }

    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits for all work on the stream, and says if any of it failed.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        self.bind()?;
        let start = Instant::now();
        // SAFETY: the stream lives as long as this value.
        let done = unsafe { result::stream::synchronize(self.stream) }.map_err(|e| failed("work on the card", e));
        self.waited_ns.fetch_add(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
        done
    }

    /// How long the host has waited for the card, in nanoseconds.
    pub(crate) fn waited_ns(&self) -> u64 {
        self.waited_ns.load(Relaxed)
    }

    /// Waits for the side stream.
    pub(crate) fn synchronize_side(&self) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: the stream lives as long as this value.
        unsafe { result::stream::synchronize(self.side) }.map_err(|e| failed("work on the card", e))
    }

    /// Free bytes of the card.
    pub(crate) fn free_bytes(&self) -> Result<u64, DeviceError> {
        self.bind()?;
        result::mem_get_info().map(|(free, _)| free as u64).map_err(|e| failed("free memory", e))
    }

    /// Memory with unknown contents, aligned to 256 bytes at least.
    pub(crate) fn malloc(&self, bytes: usize) -> Result<Address, DeviceError> {
        self.bind()?;
        // SAFETY: the contents are not read before they are written: `memory` zeroes every block before it hands it out.
        unsafe { result::malloc_sync(bytes) }.map_err(|e| match e.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::OutOfMemory { needed_bytes: bytes as u64, free_bytes: self.free_bytes().unwrap_or(0) }
            }
            _ => failed("allocating memory", e),
        })
    }

    /// # Safety
    /// `address` came from `malloc`, is freed once, and no work that uses it is pending.
    pub(crate) unsafe fn free(&self, address: Address) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { result::memory_free(address) }.map_err(|e| failed("freeing memory", e))
    }

    /// Zeroes memory, in the stream's order.
    ///
    /// # Safety
    /// `bytes` from `address` on lie in one live allocation.
    pub(crate) unsafe fn zero(&self, address: Address, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        unsafe { self.fill(address, 0, bytes) }
    }

    /// Fills memory with a byte, in the stream's order.
    ///
    /// # Safety
    /// As `zero`.
    pub(crate) unsafe fn fill(&self, address: Address, byte: u8, bytes: usize) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { result::memset_d8_async(address, byte, bytes, self.stream) }.map_err(|e| failed("filling memory", e))
    }

    /// Copies from pinned host memory, in the stream's order.
    ///
    /// # Safety
    /// `data` is pinned and unchanged until the copy has run; `address` begins at least as many bytes of one live allocation.
    pub(crate) unsafe fn copy_in(&self, data: &[u8], address: Address) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        unsafe { result::memcpy_htod_async(address, data, self.stream) }.map_err(|e| failed("copying to the card", e))
    }

    /// Copies to pinned host memory, in the stream's order.
    ///
    /// # Safety
    /// As `copy_in`, and nobody looks at `data` before the stream is synchronised.
    pub(crate) unsafe fn copy_out(&self, address: Address, data: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        unsafe { result::memcpy_dtoh_async(data, address, self.stream) }.map_err(|e| failed("copying from the card", e))
    }

    /// Copies on the card, in the stream's order.
    ///
    /// # Safety
    /// `bytes` from each address on lie in one live allocation, and do not overlap.
    pub(crate) unsafe fn copy_within(&self, from: Address, to: Address, bytes: usize) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(|e| failed("copying on the card", e))
    }

    /// Launches a kernel whose one parameter is a struct, given as words.
    ///
    /// # Safety
    /// The words hold the kernel's struct, `parameter_bytes` of it; every address in it begins a live allocation as large as the kernel's header
    /// box says for these sizes; what it writes is not used by the host or another stream meanwhile.
    pub(crate) unsafe fn launch_words(
        &self,
        kernel: Kernel,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        words: &[u64],
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        unsafe { self.launch_on(self.stream, kernel, grid, threads, shared, words) }
    }

    /// `launch_words` on the side stream: nothing orders it against the other.
    ///
    /// # Safety
    /// As `launch_words`.
    pub(crate) unsafe fn launch_beside(&self, kernel: Kernel, grid: [u32; 3], threads: u32, words: &[u64]) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        unsafe { self.launch_on(self.side, kernel, grid, threads, 0, words) }
    }

    unsafe fn launch_on(
        &self,
        stream: sys::CUstream,
        kernel: Kernel,
        [x, y, z]: [u32; 3],
        threads: u32,
        shared: u32,
        words: &[u64],
    ) -> Result<(), DeviceError> {
        assert!(size_of_val(words) >= kernel.parameter_bytes, "fewer words than the kernel's parameters have");
        let mut parameters = [words.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the parameters, `parameter_bytes` of them, during the call; the rest is the caller's.
        unsafe { result::launch_kernel(kernel.function, (x, y, z), (threads, 1, 1), shared, stream, &mut parameters) }
            .map_err(|e| failed("launching a kernel", e))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // Nothing is left to do with an error here: the context is going.
        let _ = self.bind();
        // SAFETY: every block, module and event holds this value, so none is left; the stream is not used again.
        let _ = unsafe { result::stream::destroy(self.stream) };
        // SAFETY: as above.
        let _ = unsafe { result::stream::destroy(self.side) };
        // SAFETY: retained once, in `open`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

pub(crate) fn properties(device: sys::CUdevice, driver: i32) -> Result<Properties, DeviceError> {
    use sys::CUdevice_attribute as Attribute;
    let attribute = |which| {
        // SAFETY: `device` comes from the driver.
        unsafe { result::device::get_attribute(device, which) }.map_err(|e| failed("the card's properties", e))
    };
    let name = result::device::get_name(device).map_err(|e| failed("the card's name", e))?;
    Ok(Properties {
        name,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        driver,
    })
}

/// A loaded cubin.
#[derive(Debug)]
pub(crate) struct Module {
    gpu: Arc<Gpu>,
    module: sys::CUmodule,
}

// SAFETY: as `Gpu`: a handle of the driver, callable from any thread.
unsafe impl Send for Module {}

impl Module {
    /// Loads a cubin that NVRTC made for this card.
    pub(crate) fn load(gpu: &Arc<Gpu>, cubin: &[u8]) -> Result<Self, DeviceError> {
        gpu.bind()?;
        // SAFETY: the bytes are a whole ELF image (NVRTC's, or the cache's with its digest checked), which states its own length; the driver copies it.
        let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }.map_err(|e| failed("loading kernels", e))?;
        Ok(Self { gpu: Arc::clone(gpu), module })
    }

    /// One of its kernels, allowed `shared` bytes of dynamic shared memory.
    pub(crate) fn kernel(&self, name: &str, shared: u32) -> Result<Kernel, DeviceError> {
        self.gpu.bind()?;
        let c_name = CString::new(name).map_err(|_| DeviceError::Failed(format!("{name:?} is no kernel's name")))?;
        // SAFETY: the module is loaded until this value is dropped.
        let function = unsafe { result::module::get_function(self.module, c_name) }.map_err(|e| failed(name, e))?;
        if shared > 0 {
            let limit = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            unsafe { result::function::set_function_attribute(function, limit, shared.cast_signed()) }
                .map_err(|e| failed(&format!("{name}: {shared} bytes of shared memory"), e))?;
        }
        let (mut offset, mut parameter_bytes) = (0, 0);
        // SAFETY: writes two integers that outlive the call.
        unsafe { sys::cuFuncGetParamInfo(function, 0, &raw mut offset, &raw mut parameter_bytes) }.result().map_err(|e| failed(name, e))?;
        Ok(Kernel { function, parameter_bytes })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.gpu.synchronize();
        // SAFETY: loaded once; the device drops its modules with its kernels, after the stream has drained.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
