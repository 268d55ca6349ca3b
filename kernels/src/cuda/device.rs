//! The device: how it is opened, its buffers and weights, and what every operation takes from it.
//!
//! Never launches anything: each operation is in the module of its name.

use std::collections::HashMap;
use std::sync::Arc;

use half::{bf16, f16};

use super::Precision;
use super::blas::{self, Blas};
use super::compile::{Cache, Compiler, architecture};
use super::driver::{Address, Gpu};
use super::gate_up;
use super::head;
use super::host_side::Event;
use super::library::probe;
use super::linear::Ready;
use super::marks::Marks;
use super::memory::{Block, Owner, Pool};
use super::plan::{Key, Plan};
use super::programs::Kernels;
use super::record::Recorder;
use super::shared::{Shelf, WeightSharing};
use super::staging::{ATTENTION_BYTES, Staging};
use super::tables::TableCache;
use super::verdict::GateReport;
use crate::{DType, DeviceError, Use};

/// What a CUDA device is opened with.
#[derive(Default)]
pub struct CudaOptions {
    /// Where NVRTC and cuBLASLt are looked for after the system: the `lib` folders of NVIDIA's Python wheels, say.
    pub library_folders: Vec<String>,
    /// Where compiled kernels are kept; without it each start compiles them.
    pub cache: Option<Box<dyn Cache>>,
    /// A plan made earlier on this device; another library, card or precision than it was made for is refused.
    pub plan: Option<Plan>,
    /// Bytes of buffers at most, weights not counted; without it, what the card has.
    pub buffer_bytes_max: Option<u64>,
}

impl std::fmt::Debug for CudaOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaOptions")
            .field("library_folders", &self.library_folders)
            .field("cache", &self.cache.is_some())
            .finish_non_exhaustive()
    }
}

/// An NVIDIA card.
#[derive(Debug)]
pub struct CudaDevice {
    pub(super) gpu: Arc<Gpu>,
    pub(super) pool: Arc<Pool>,
    pub(super) kernels: Kernels,
    pub(super) staging: Staging,
    pub(super) blas: Blas,
    pub(super) plan: Plan,
    /// Products that have run.
    pub(super) prepared: HashMap<(Key, usize), Ready>,
    pub(super) precision: Precision,
    pub(super) recorder: Recorder,
    pub(super) marks: Marks,
    /// What the gate found of it.
    pub(super) verdict: Option<GateReport>,
    /// Whether products run as the library likes, which depends on the number of rows.
    pub(super) unpinned: bool,
    /// Rows from which on gate and up go through SwiGLU in one kernel, where that is planned.
    pub(super) gate_up_rows: usize,
    /// Whether products that are not planned are planned by the fixed-tile kernel, without asking the library.
    pub(super) plans_fixed_tiles: bool,
    pub(super) tables: TableCache,
    scratch: HashMap<&'static str, Block>,
    turn: usize,
}

/// Bytes of scratch that are kept free: a chunk's logits in float32, their gradient, and what is added up of its product; what attention adds up.
const SCRATCH_BYTES: usize = 5 * head::LOGITS_BYTES / 2 + ATTENTION_BYTES;

/// How elements of a buffer are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    Bf16,
}

/// An array on the card.
#[derive(Debug)]
pub struct CudaBuffer {
    pub(super) block: Arc<Block>,
    pub(super) element: Element,
    pub(super) len: usize,
    /// Where its rows are, if those of others stand between them.
    pub(super) beside: Option<Beside>,
}

/// The place of a buffer's rows in rows that several buffers have between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Beside {
    /// Elements before the first.
    pub(super) first: usize,
    /// Elements from row to row.
    pub(super) pitch: usize,
}

/// A frozen weight on the card: a matrix in the activations' type, or a vector in float32 and in the activations' type.
#[derive(Debug)]
pub struct CudaWeight {
    /// In the activations' type; weights that were loaded together have one.
    pub(super) block: Arc<Block>,
    /// Bytes of the block before it.
    pub(super) offset: usize,
    /// Which it is of those, and how many there are.
    pub(super) place: (usize, usize),
    /// A vector also in float32.
    pub(super) wide: Option<Block>,
    /// Rows and columns; a vector is one row.
    pub(super) shape: (usize, usize),
}

impl CudaWeight {
    pub(super) fn address(&self) -> Address {
        self.block.address() + self.offset as u64
    }

    /// A vector in float32: a norm's weight.
    pub(super) fn vector(&self, width: usize) -> Address {
        let wide = self.wide.as_ref().filter(|_| self.shape == (1, width));
        let Some(wide) = wide else { panic!("a weight of shape {:?}; a vector of {width} was expected", self.shape) };
        wide.address()
    }
}

impl Element {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl CudaBuffer {
    pub(super) fn address(&self) -> Address {
        let first = self.beside.map_or(0, |beside| beside.first * self.element.bytes());
        self.block.address() + first as u64
    }

    /// Elements from row to row, where rows are so wide.
    pub(super) fn pitch(&self, width: usize) -> usize {
        self.beside.map_or(width, |beside| beside.pitch)
    }

    /// The block of a buffer that has it to itself.
    pub(super) fn whole(&self) -> &Block {
        assert!(self.beside.is_none(), "rows of other buffers stand between this one's");
        &self.block
    }
}

impl CudaDevice {
    /// Opens card `ordinal` (0 is the first). Compiles the kernels where the cache has none.
    ///
    /// # Errors
    /// `Unsupported` where a library is missing (the text says which and how to get it), there is no such card, the card is too old or the
    /// plan is another device's.
    pub fn open(ordinal: usize, precision: Precision, options: CudaOptions) -> Result<Self, DeviceError> {
        if let Some(refusal) = probe(&options.library_folders).refusal() {
            return Err(DeviceError::Unsupported(refusal));
        }
        let gpu = Gpu::open(ordinal)?;
        let compiler = Compiler::new(architecture(gpu.properties.capability), options.cache)?;
        let header = header(&gpu, precision);
        let plan = options.plan.unwrap_or_else(|| Plan::new(header.clone()));
        if plan.header != header {
            return Err(DeviceError::Unsupported(format!("the plan was made for {:?}; this is {header:?}", plan.header)));
        }
        let pool = Pool::new(&gpu, options.buffer_bytes_max.unwrap_or(u64::MAX));
        Ok(Self {
            kernels: Kernels::new(&gpu, compiler, precision)?,
            staging: Staging::new(&gpu, &pool)?,
            blas: Blas::new(&gpu, &pool)?,
            plan,
            prepared: HashMap::new(),
            precision,
            unpinned: false,
            gate_up_rows: gate_up::ROWS_MIN,
            plans_fixed_tiles: false,
            recorder: Recorder::new(),
            marks: Marks::new(&gpu)?,
            verdict: None,
            tables: TableCache::default(),
            scratch: HashMap::new(),
            turn: 0,
            pool,
            gpu,
        })
    }

    /// How the weights that are loaded from here on are held, until [`Device::share_weights`](crate::Device::share_weights).
    ///
    /// # Errors
    /// What was handed over cannot be mapped.
    pub fn hold_weights(&mut self, sharing: WeightSharing) -> Result<(), DeviceError> {
        self.pool.open_shelf(Shelf::new(&self.gpu, sharing)?);
        Ok(())
    }

    /// The algorithms pinned so far: those of every weight loaded.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The plan's products with the number, tile and stages of each algorithm. For measurements.
    #[doc(hidden)]
    #[must_use]
    pub fn described_products(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.plan.write_products(&mut text, blas::describe);
        text
    }

    /// Whether the library chooses the algorithm of each product for its number of rows, as it would for anybody: results are not exact then.
    /// For measuring what exactness costs.
    #[doc(hidden)]
    pub fn unpin(&mut self, unpinned: bool) {
        self.unpinned = unpinned;
        self.prepared.clear();
        self.forget_graphs();
    }

    /// Waits for all work.
    ///
    /// # Errors
    /// Where any of it failed.
    pub fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.gpu.synchronize()
    }

    /// Milliseconds that the card spends on what `work` launches.
    ///
    /// # Errors
    /// Those of `work`, or a failed device.
    pub fn milliseconds(&mut self, work: impl FnOnce(&mut Self) -> Result<(), DeviceError>) -> Result<f32, DeviceError> {
        let (start, end) = (Event::new(&self.gpu)?, Event::new(&self.gpu)?);
        start.record()?;
        work(self)?;
        end.record()?;
        end.wait()?;
        end.since(&start)
    }

    pub(super) fn element(&self, usage: Use) -> Element {
        match (usage, self.precision) {
            (Use::Activation, Precision::Bf16) => Element::Bf16,
            _ => Element::F32,
        }
    }

    /// The address of a buffer that must be of this use, and whose rows follow one another.
    pub(super) fn read(&self, what: &str, buffer: &CudaBuffer, usage: Use) -> Address {
        assert!(buffer.beside.is_none(), "{what} has rows of other buffers between its own");
        self.read_rows(what, buffer, usage)
    }

    /// The address of a buffer that must be of this use; `CudaBuffer::pitch` says how its rows follow.
    pub(super) fn read_rows(&self, what: &str, buffer: &CudaBuffer, usage: Use) -> Address {
        assert!(buffer.element == self.element(usage), "{what} holds {:?}; {usage:?} was expected", buffer.element);
        buffer.address()
    }

    /// How long the host has waited for the card, in nanoseconds.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.gpu.waited_ns()
    }

    pub(super) fn multiprocessors(&self) -> usize {
        self.gpu.properties.multiprocessors.unsigned_abs() as usize
    }

    pub(super) fn begin(&mut self) -> Result<(), DeviceError> {
        self.staging.restart_tables()?;
        self.tables.clear();
        self.turn = 0;
        self.pool.begin_pass()?;
        self.begin_recording();
        self.marks.begin()
    }

    pub(super) fn end(&mut self) -> Result<(), DeviceError> {
        let ended = self.end_recording();
        self.tables.clear();
        self.pool.end_pass();
        ended
    }

    /// 0, 1, 2, ... from the beginning of a pass: for taking turns.
    pub(super) fn turn(&mut self) -> usize {
        self.turn += 1;
        self.turn - 1
    }

    /// Bytes that operations will need on the way and do not hold yet: those of the head and the loss, which have the largest arrays.
    pub(super) fn reserved_bytes(&self) -> u64 {
        let held: usize = self.scratch.values().map(Block::bytes).sum();
        SCRATCH_BYTES.saturating_sub(held) as u64
    }

    /// Memory for what an operation needs on the way; what is in it is left from before. One use of a name at a time.
    pub(super) fn scratch(&mut self, name: &'static str, bytes: usize) -> Result<Address, DeviceError> {
        if let Some(block) = self.scratch.get(name).filter(|block| block.bytes() >= bytes) {
            return Ok(block.address());
        }
        // What is recorded may use the block that is about to go.
        self.flush()?;
        self.scratch.remove(name);
        let block = self.pool.alloc(bytes, Owner::Device)?;
        let address = block.address();
        self.scratch.insert(name, block);
        Ok(address)
    }

    /// Elements to `offset` bytes into a block.
    pub(super) fn upload_as(
        &mut self,
        (block, offset): (&Block, usize),
        element: Element,
        from: DType,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let len = bytes.len() / from.bytes();
        self.staging.upload(block, offset, len * element.bytes(), |at, chunk| {
            let first = at / element.bytes();
            let part = &bytes[first * from.bytes()..(first + chunk.len() / element.bytes()) * from.bytes()];
            convert(part, from, chunk, element);
        })
    }
}

/// The header of a plan on this device.
fn header(gpu: &Gpu, precision: Precision) -> Vec<(String, String)> {
    let properties = &gpu.properties;
    [
        ("gpu", properties.name.clone()),
        ("multiprocessors", properties.multiprocessors.to_string()),
        ("cublaslt", blas::version().to_string()),
        ("precision", format!("{precision:?}").to_lowercase()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// Elements from one storage to another. Mapped bytes may stand at any address.
pub(super) fn convert(from: &[u8], dtype: DType, to: &mut [u8], element: Element) {
    match (dtype, element) {
        (DType::F32, Element::F32) | (DType::BF16, Element::Bf16) => to.copy_from_slice(from),
        (DType::F32, Element::Bf16) => each(from, to, |bytes| bf16::from_f32(f32::from_le_bytes(bytes)).to_le_bytes()),
        (DType::F16, Element::Bf16) => each(from, to, |bytes| bf16::from_f32(f16::from_le_bytes(bytes).to_f32()).to_le_bytes()),
        (DType::F16, Element::F32) => each(from, to, |bytes| f16::from_le_bytes(bytes).to_f32().to_le_bytes()),
        (DType::BF16, Element::F32) => each(from, to, |bytes| bf16::from_le_bytes(bytes).to_f32().to_le_bytes()),
    }
}

/// Elements one by one, a loop for each kind: the compiler makes several of them at once.
fn each<const FROM: usize, const TO: usize>(from: &[u8], to: &mut [u8], convert: impl Fn([u8; FROM]) -> [u8; TO]) {
    from.as_chunks().0.iter().zip(to.as_chunks_mut().0).for_each(|(from, to)| *to = convert(*from));
}
