//! cuBLASLt: one product at a time by an algorithm that is given, and the algorithms that never split the inner dimension.
//!
//! Never times, never falls back, never lets the library choose at the time of the product.
#![expect(unsafe_code, reason = "calls cuBLASLt")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};

use super::Precision;
use super::driver::{Address, Gpu};
use super::memory::{Block, Owner, Pool};
use super::plan::{Key, Product, Slices};
use crate::DeviceError;

/// Our own workspace: one stream, one workspace, so that no result depends on what else the library does.
const WORKSPACE_BYTES: usize = 32 << 20;

/// How many algorithms the heuristic is asked for; the first that does not split is taken.
const CANDIDATES: usize = 16;

fn failed(what: &str, error: &result::CublasError) -> DeviceError {
    DeviceError::Failed(format!("cuBLASLt: {what}: {:?}", error.0))
}

/// The version of the library.
pub(crate) fn version() -> usize {
    // SAFETY: no preconditions; the caller has probed for the library.
    unsafe { sys::cublasLtGetVersion() }
}

/// The library's handle and its workspace.
#[derive(Debug)]
pub(crate) struct Blas {
    gpu: Arc<Gpu>,
    handle: sys::cublasLtHandle_t,
    workspace: Block,
}

// SAFETY: the handle may be used from any thread, by one at a time: every use takes the device by unique reference or is read-only.
unsafe impl Send for Blas {}

/// The shapes of one product with a number of rows, as the library wants them: columns first.
#[derive(Debug)]
pub(crate) struct Prepared {
    operation: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    biased: bool,
    /// What the addresses of weight and x are a multiple of.
    aligned: u32,
}

// SAFETY: descriptions in host memory that belong to this value alone.
unsafe impl Send for Prepared {}

/// What a product reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operands {
    pub(crate) weight: Address,
    pub(crate) x: Address,
    pub(crate) bias: Address,
    pub(crate) out: Address,
    /// Whether the result is added to what `out` holds.
    pub(crate) accumulate: bool,
    /// What else is added, of out's shape; or 0.
    pub(crate) added: Address,
}

/// How an algorithm does a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    pub(crate) workspace_bytes: usize,
    /// Its tiles, over the multiprocessors.
    pub(crate) waves: f32,
}

/// Elements from row to row of logits.
pub(crate) fn logits_pitch(outputs: usize) -> usize {
    outputs.next_multiple_of(8)
}

/// One operand: a matrix with its rows `pitch` elements apart, or several of them `stride` elements apart.
struct Matrix {
    kind: sys::cudaDataType,
    width: usize,
    rows: usize,
    pitch: usize,
    count: usize,
    stride: usize,
}

impl Matrix {
    fn one(kind: sys::cudaDataType, width: usize, rows: usize, pitch: usize) -> Self {
        Self { kind, width, rows, pitch, count: 1, stride: 0 }
    }

    fn describe(&self) -> Result<sys::cublasLtMatrixLayout_t, DeviceError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let layout = result::create_matrix_layout(self.kind, self.width as u64, self.rows as u64, self.pitch as i64)
            .map_err(|e| failed("a layout", &e))?;
        let (count, stride) = (self.count as i32, self.stride as i64);
        // SAFETY: the layout was just created; a count is 4 bytes.
        let counted = unsafe {
            let count: *const c_void = (&raw const count).cast();
            result::set_matrix_layout_attribute(layout, Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count, size_of::<i32>())
        };
        // SAFETY: as above; a stride is 8 bytes.
        let strided = unsafe {
            let stride: *const c_void = (&raw const stride).cast();
            result::set_matrix_layout_attribute(layout, Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride, size_of::<i64>())
        };
        if let Err(e) = counted.and(strided) {
            // SAFETY: created above, and handed to nobody.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
            return Err(failed("a layout", &e));
        }
        Ok(layout)
    }
}

/// Weight, x and out of a product, each as the library sees it.
fn matrices(key: Key, rows: usize, activation: sys::cudaDataType) -> [Matrix; 3] {
    let Key { product, outputs, inputs } = key;
    let (pitch, wide) = (logits_pitch(outputs), sys::cudaDataType::CUDA_R_32F);
    let weight = Matrix::one(activation, inputs, outputs, inputs);
    let slices = Slices::new(outputs, inputs);
    match product {
        Product::Linear | Product::LinearBias => {
            [weight, Matrix::one(activation, inputs, rows, inputs), Matrix::one(activation, outputs, rows, outputs)]
        }
        Product::Logits => [weight, Matrix::one(activation, inputs, rows, inputs), Matrix::one(wide, outputs, rows, pitch)],
        Product::LinearBackward => [weight, Matrix::one(activation, outputs, rows, outputs), Matrix::one(activation, inputs, rows, inputs)],
        Product::LogitsBackward => {
            let Slices { count, width, .. } = slices;
            [
                Matrix { rows: width, count, stride: width * inputs, ..weight },
                Matrix { count, stride: width, ..Matrix::one(activation, width, rows, pitch) },
                Matrix { count, stride: rows * inputs, ..Matrix::one(wide, inputs, rows, inputs) },
            ]
        }
        Product::LogitsBackwardRest => {
            let weight = Matrix { rows: slices.rest, ..weight };
            [weight, Matrix::one(activation, slices.rest, rows, pitch), Matrix::one(wide, inputs, rows, inputs)]
        }
    }
}

impl Prepared {
    pub(crate) fn new(key: Key, rows: usize, precision: Precision) -> Result<Self, DeviceError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let activation = match precision {
            Precision::F32 => sys::cudaDataType::CUDA_R_32F,
            Precision::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        };
        let operation = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)
            .map_err(|e| failed("an operation", &e))?;
        let null = std::ptr::null_mut();
        let biased = key.product == Product::LinearBias;
        // The rest of a vocabulary begins where its slices end, at a multiple of 16 bytes; every other operand begins a row of a block.
        let aligned = if key.product == Product::LogitsBackwardRest { 16 } else { 256 };
        let mut prepared = Self { operation, weight: null, x: null, out: null, biased, aligned };
        let [weight, x, out] = matrices(key, rows, activation);
        prepared.weight = weight.describe()?;
        prepared.x = x.describe()?;
        prepared.out = out.describe()?;
        let transpose = matches!(key.product, Product::Linear | Product::LinearBias | Product::Logits);
        prepared.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, u32::from(transpose))?;
        if biased {
            prepared.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32)?;
        }
        Ok(prepared)
    }

    /// `T` is of the attribute's size: 4 bytes, or 8 for a pointer.
    fn set<T: Copy>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<(), DeviceError> {
        let value: *const c_void = (&raw const value).cast();
        // SAFETY: the operation lives; the library reads `size_of::<T>()` bytes, and refuses a size that is not the attribute's.
        unsafe { result::set_matmul_desc_attribute(self.operation, attribute, value, size_of::<T>()) }
            .map_err(|e| failed("an operation", &e))
    }

    fn set_bias(&self, bias: Address) -> Result<(), DeviceError> {
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        for layout in [self.weight, self.x, self.out] {
            if !layout.is_null() {
                // SAFETY: created once, in `new`.
                let _ = unsafe { result::destroy_matrix_layout(layout) };
            }
        }
        // SAFETY: created once, in `new`.
        let _ = unsafe { result::destroy_matmul_desc(self.operation) };
    }
}

/// What the heuristic may offer.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(aligned: u32, divided: bool) -> Result<Self, DeviceError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Self(result::create_matmul_pref().map_err(|e| failed("a preference", &e))?);
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES as u64)?;
        let none = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        if !divided {
            preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, none)?;
        }
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned)?;
        Ok(preference)
    }

    fn set<T: Copy>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: T) -> Result<(), DeviceError> {
        let value: *const c_void = (&raw const value).cast();
        // SAFETY: the preference lives; the library reads `size_of::<T>()` bytes, and refuses a size that is not the attribute's.
        unsafe { result::set_matmul_pref_attribute(self.0, attribute, value, size_of::<T>()) }.map_err(|e| failed("a preference", &e))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, in `new`.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

/// One number of an algorithm's configuration; none where the algorithm has no such thing.
fn configured(algorithm: &sys::cublasLtMatmulAlgo_t, attribute: sys::cublasLtMatmulAlgoConfigAttributes_t) -> Option<u32> {
    let (mut value, mut written) = (0_u32, 0);
    let out: *mut c_void = (&raw mut value).cast();
    // SAFETY: every attribute asked for here is 4 bytes; both results outlive the call.
    let status = unsafe { sys::cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, out, size_of::<u32>(), &raw mut written) };
    (status.result().is_ok() && written == size_of::<u32>()).then_some(value)
}

fn algorithm(words: [u64; 8]) -> sys::cublasLtMatmulAlgo_t {
    sys::cublasLtMatmulAlgo_t { data: words }
}

/// What an algorithm is, for people: its number, tile, stages.
pub(crate) fn describe(words: [u64; 8]) -> String {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let number = |attribute| configured(&algorithm(words), attribute).map_or("-".to_owned(), |n| n.to_string());
    format!(
        "algorithm {} tile {} stages {} inner {} cluster {}",
        number(Attribute::CUBLASLT_ALGO_CONFIG_ID),
        number(Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID),
        number(Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID),
        number(Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
        number(Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
    )
}

/// The number of an algorithm among the library's.
pub(crate) fn number(words: [u64; 8]) -> Option<u32> {
    configured(&algorithm(words), sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_ID)
}

/// The tile of an algorithm, as the library numbers them (`cublasLtMatmulTile_t`): outputs x rows.
pub(crate) fn tile(words: [u64; 8]) -> Option<u32> {
    configured(&algorithm(words), sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_TILE_ID)
}

/// Whether an algorithm adds each result in one piece.
pub(crate) fn undivided(words: [u64; 8]) -> bool {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let algorithm = algorithm(words);
    configured(&algorithm, Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM).is_some_and(|n| n <= 1)
        && configured(&algorithm, Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) == Some(0)
}

impl Blas {
    /// The caller has probed for the library.
    pub(crate) fn new(gpu: &Arc<Gpu>, pool: &Arc<Pool>) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let handle = result::create_handle().map_err(|e| failed("its start", &e))?;
        Ok(Self { gpu: Arc::clone(gpu), handle, workspace: pool.alloc(WORKSPACE_BYTES, Owner::Device)? })
    }

    /// The heuristic's algorithms that do not split the inner dimension, the best first; none where it knows none.
    pub(crate) fn offers(&self, prepared: &Prepared) -> Result<Vec<[u64; 8]>, DeviceError> {
        Ok(self.heuristic(prepared, false)?.into_iter().filter(|words| undivided(*words)).collect())
    }

    /// The algorithm that the library would choose itself, which may split the inner dimension as it likes: for measuring what exactness costs.
    pub(crate) fn usual(&self, prepared: &Prepared) -> Result<Option<[u64; 8]>, DeviceError> {
        Ok(self.heuristic(prepared, true)?.first().copied())
    }

    fn heuristic(&self, prepared: &Prepared, divided: bool) -> Result<Vec<[u64; 8]>, DeviceError> {
        self.gpu.bind()?;
        if prepared.biased {
            prepared.set_bias(self.workspace.address())?;
        }
        let preference = Preference::new(prepared.aligned, divided)?;
        // SAFETY: integers, a float, and a status whose zero is a valid value.
        let mut offers: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: every description lives; `offers` has as many places as said.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                prepared.operation,
                prepared.weight,
                prepared.x,
                prepared.out,
                prepared.out,
                preference.0,
                CANDIDATES as i32,
                offers.as_mut_ptr(),
                &raw mut count,
            )
        };
        match status.result() {
            Ok(()) => {}
            // Shapes that the library cannot do at all are the fixed-tile kernel's.
            Err(e) if e.0 == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => return Ok(Vec::new()),
            Err(e) => return Err(failed("its heuristic", &e)),
        }
        let offers = offers.iter().take(usize::try_from(count).unwrap_or(0));
        Ok(offers.filter(|offer| offer.state.result().is_ok()).map(|offer| offer.algo.data).collect())
    }

    /// What an algorithm takes for a product, within our workspace; none where it cannot do it.
    pub(crate) fn check(&self, prepared: &Prepared, words: [u64; 8]) -> Option<Fit> {
        // SAFETY: integers, a float, and a status whose zero is a valid value.
        let mut answer: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: every description lives; writes one result that outlives the call.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                prepared.operation,
                prepared.weight,
                prepared.x,
                prepared.out,
                prepared.out,
                &algorithm(words),
                &raw mut answer,
            )
        };
        let can = status.result().is_ok() && answer.state.result().is_ok() && answer.workspaceSize <= WORKSPACE_BYTES;
        can.then_some(Fit { workspace_bytes: answer.workspaceSize, waves: answer.wavesCount })
    }

    /// Where the workspace begins.
    pub(crate) fn workspace(&self) -> Address {
        self.workspace.address()
    }

    /// out = or += x W (+ bias, + added).
    ///
    /// # Safety
    /// Every operand begins live memory, aligned as `prepared` says, of the size that it says; `out` overlaps nothing else.
    pub(crate) unsafe fn run(&self, prepared: &Prepared, words: [u64; 8], operands: Operands) -> Result<(), DeviceError> {
        if prepared.biased {
            prepared.set_bias(operands.bias)?;
        }
        let adds = operands.accumulate || operands.added != 0;
        let (one, beta) = (1.0_f32, f32::from(u8::from(adds)));
        let added = if operands.added == 0 { operands.out } else { operands.added };
        let pointer = |address: Address| address as *mut c_void;
        // SAFETY: the operands are the caller's; the algorithm was checked against these descriptions, and needs no more than the workspace.
        unsafe {
            result::matmul(
                self.handle,
                prepared.operation,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                pointer(operands.weight),
                prepared.weight,
                pointer(operands.x),
                prepared.x,
                pointer(added),
                prepared.out,
                pointer(operands.out),
                prepared.out,
                &algorithm(words),
                pointer(self.workspace.address()),
                WORKSPACE_BYTES,
                self.gpu.stream().cast(),
            )
        }
        .map_err(|e| failed("a product", &e))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _ = self.gpu.synchronize();
        // SAFETY: created once, in `new`; no product is pending.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
