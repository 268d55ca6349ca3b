//! Weights that several processes hold once on a card: one makes the memory and fills it, the others are handed it.
//!
//! Never lets anybody write what is handed over: all map it for reading alone then, the one that made it too.
#![expect(unsafe_code, reason = "maps device memory")]

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::driver::{Address, Gpu, failed};
use crate::{DeviceError, SharedPlace, SharedWeights};

/// What weights stand at multiples of.
const ALIGN: usize = 512;
/// Bytes of an extent, where no weight needs more.
const EXTENT_BYTES: usize = 256 << 20;
/// A descriptor is what memory can be handed to another process as.
const HANDLE: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// How a device holds its weights.
#[derive(Debug, Default)]
pub enum WeightSharing {
    /// For this process alone.
    #[default]
    Own,
    /// Such that [`Device::share_weights`](crate::Device::share_weights) can hand them over.
    Make,
    /// Those that another process handed over: what is loaded must be the same weights in the same order.
    Given(SharedWeights),
}

/// Where the next weight goes.
#[derive(Debug)]
pub(crate) enum Shelf {
    Own,
    Making { extents: Vec<(Arc<Extent>, usize)>, places: Vec<SharedPlace> },
    Given { extents: Vec<Arc<Extent>>, places: std::vec::IntoIter<SharedPlace> },
}

/// Room for a weight.
pub(crate) struct Room {
    pub(crate) extent: Arc<Extent>,
    pub(crate) address: Address,
    /// Whether the weight is there already.
    pub(crate) is_filled: bool,
}

/// Whether a card's driver can hand memory to other processes.
pub(crate) fn can_share(gpu: &Gpu) -> Result<bool, DeviceError> {
    let which = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    // SAFETY: the device comes from the driver.
    let can = unsafe { result::device::get_attribute(gpu.device(), which) };
    can.map(|can| can != 0).map_err(|e| failed("the card's properties", e))
}

impl Shelf {
    pub(crate) fn new(gpu: &Arc<Gpu>, sharing: WeightSharing) -> Result<Self, DeviceError> {
        match sharing {
            WeightSharing::Make if can_share(gpu)? => Ok(Self::Making { extents: Vec::new(), places: Vec::new() }),
            WeightSharing::Own | WeightSharing::Make => Ok(Self::Own),
            WeightSharing::Given(SharedWeights { extents, places }) => {
                let take = |(descriptor, bytes): (OwnedFd, u64)| Extent::take(gpu, &descriptor, size(bytes)?).map(Arc::new);
                let extents = extents.into_iter().map(take).collect::<Result<_, _>>()?;
                Ok(Self::Given { extents, places: places.into_iter() })
            }
        }
    }

    /// Room for the next weight; none where it is this process's own.
    pub(crate) fn room(&mut self, gpu: &Arc<Gpu>, bytes: usize) -> Result<Option<Room>, DeviceError> {
        match self {
            Self::Own => Ok(None),
            Self::Making { extents, places } => {
                let found = extents.iter().position(|(extent, used)| extent.bytes - used >= bytes);
                let number = found.map_or_else(
                    || {
                        extents.push((Arc::new(Extent::make(gpu, bytes.max(EXTENT_BYTES))?), 0));
                        Ok(extents.len() - 1)
                    },
                    Ok,
                )?;
                let (extent, used) = &mut extents[number];
                let first = *used;
                *used = (first + bytes).next_multiple_of(ALIGN).min(extent.bytes);
                places.push(SharedPlace { extent: number as u64, first: first as u64, bytes: bytes as u64 });
                Ok(Some(Room { extent: Arc::clone(extent), address: extent.address + first as u64, is_filled: false }))
            }
            Self::Given { extents, places } => {
                let other = |what: &str| DeviceError::Failed(format!("the weights that were handed over are not this model's: {what}"));
                let place = places.next().ok_or_else(|| other("there are fewer"))?;
                if place.bytes != bytes as u64 {
                    return Err(other(&format!("one has {} bytes, not {bytes}", place.bytes)));
                }
                let extent = usize::try_from(place.extent).ok().and_then(|number| extents.get(number));
                let room = extent.filter(|extent| place.first.checked_add(place.bytes).is_some_and(|end| end <= extent.bytes as u64));
                let extent = room.ok_or_else(|| other("one lies where there is no memory"))?;
                Ok(Some(Room { extent: Arc::clone(extent), address: extent.address + place.first, is_filled: true }))
            }
        }
    }

    /// All weights are there: from here on they are only read. What to hand to others, where this process made them to be shared.
    pub(crate) fn close(&mut self, gpu: &Gpu) -> Result<Option<SharedWeights>, DeviceError> {
        match std::mem::replace(self, Self::Own) {
            Self::Own => Ok(None),
            Self::Making { extents, places } => {
                gpu.synchronize()?;
                let hand = |(extent, _): &(Arc<Extent>, usize)| {
                    extent.allow(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ)?;
                    Ok((extent.export()?, extent.bytes as u64))
                };
                let extents = extents.iter().map(hand).collect::<Result<_, DeviceError>>()?;
                Ok(Some(SharedWeights { extents, places }))
            }
            Self::Given { places, .. } if places.len() > 0 => {
                Err(DeviceError::Failed("the weights that were handed over are not this model's: there are more".to_owned()))
            }
            Self::Given { .. } => Ok(None),
        }
    }
}

fn size(bytes: u64) -> Result<usize, DeviceError> {
    usize::try_from(bytes).map_err(|_| DeviceError::Failed(format!("an extent of {bytes} bytes was handed over")))
}

/// Memory of the card at an address of this process, and other processes' too.
#[derive(Debug)]
pub(crate) struct Extent {
    gpu: Arc<Gpu>,
    handle: sys::CUmemGenericAllocationHandle,
    address: Address,
    bytes: usize,
}

impl Extent {
    /// New memory of unknown contents.
    fn make(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let asked = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: HANDLE,
            location: location(gpu),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut unit = 0;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: writes one integer that outlives the call.
        let done = unsafe { sys::cuMemGetAllocationGranularity(&raw mut unit, &raw const asked, least) };
        done.result().map_err(|e| failed("the unit of memory that is shared", e))?;
        let (bytes, mut handle) = (bytes.next_multiple_of(unit.max(1)), 0);
        // SAFETY: writes one handle that outlives the call.
        let done = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const asked, 0) };
        done.result().map_err(|e| match e.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::OutOfMemory { needed_bytes: bytes as u64, free_bytes: gpu.free_bytes().unwrap_or(0) }
            }
            _ => failed("allocating memory that is shared", e),
        })?;
        Self::map(gpu, handle, bytes, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    }

    /// Memory that another process made.
    fn take(gpu: &Arc<Gpu>, descriptor: &OwnedFd, bytes: usize) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let (mut handle, descriptor) = (0, descriptor.as_raw_fd() as usize as *mut c_void);
        // SAFETY: for this kind of handle the pointer is the descriptor itself, which is open; writes one handle that outlives the call.
        let done = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, descriptor, HANDLE) };
        done.result().map_err(|e| failed("taking memory that was handed over", e))?;
        Self::map(gpu, handle, bytes, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ)
    }

    /// Gives memory an address; it is this value's to give back from here on.
    fn map(
        gpu: &Arc<Gpu>,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
        access: sys::CUmemAccess_flags,
    ) -> Result<Self, DeviceError> {
        let mut extent = Self { gpu: Arc::clone(gpu), handle, address: 0, bytes };
        // SAFETY: writes one address that outlives the call.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut extent.address, bytes, 0, 0, 0) };
        reserved.result().map_err(|e| failed("an address for memory that is shared", e))?;
        // SAFETY: the range was just reserved, and the memory has as many bytes: the driver refuses more.
        let mapped = unsafe { sys::cuMemMap(extent.address, bytes, 0, handle, 0) };
        mapped.result().map_err(|e| failed("mapping memory that is shared", e))?;
        extent.allow(access)?;
        Ok(extent)
    }

    /// What this process may do with it.
    fn allow(&self, flags: sys::CUmemAccess_flags) -> Result<(), DeviceError> {
        self.gpu.bind()?;
        let access = sys::CUmemAccessDesc { location: location(&self.gpu), flags };
        // SAFETY: the range is mapped; one description is read.
        let done = unsafe { sys::cuMemSetAccess(self.address, self.bytes, &raw const access, 1) };
        done.result().map_err(|e| failed("the access to memory that is shared", e))
    }

    /// A descriptor that holds the memory until it is closed.
    fn export(&self) -> Result<OwnedFd, DeviceError> {
        self.gpu.bind()?;
        let mut descriptor: RawFd = -1;
        // SAFETY: for this kind of handle an integer is written, which outlives the call.
        let done = unsafe { sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), self.handle, HANDLE, 0) };
        done.result().map_err(|e| failed("handing memory over", e))?;
        // SAFETY: the driver has just opened it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

fn location(gpu: &Gpu) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.device() }
}

impl Drop for Extent {
    fn drop(&mut self) {
        // Nothing is left to do with an error here: the memory goes with the process.
        let _ = self.gpu.synchronize();
        if self.address != 0 {
            // SAFETY: nothing that reads it is under way any more; where it was not mapped the driver refuses.
            let _ = unsafe { sys::cuMemUnmap(self.address, self.bytes) };
            // SAFETY: reserved once, with this size.
            let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
        }
        // SAFETY: made or taken once.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}
