//! The kernel sources, embedded, and which kernels are in each.
//!
//! Never compiles anything.

use std::collections::HashMap;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::compile::{Cache, Compiler, hex};
use super::driver::{Gpu, Kernel, Module};
use super::head::CLUSTER_BYTES;
use super::library::{Library, probe};
use super::tiles::PRODUCT_BYTES;
use super::{Found, Precision};
use crate::DeviceError;

/// A source file.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) source: &'static str,
    kernels: &'static [&'static str],
}

/// What sources include.
pub(crate) const HEADERS: [(&str, &str); 12] = [
    ("common.cuh", include_str!("../../cu/common.cuh")),
    ("tile.cuh", include_str!("../../cu/tile.cuh")),
    ("philox.cuh", include_str!("../../cu/philox.cuh")),
    ("attention.cuh", include_str!("../../cu/attention.cuh")),
    ("attention_fast.cuh", include_str!("../../cu/attention_fast.cuh")),
    ("attention_hopper.cuh", include_str!("../../cu/attention_hopper.cuh")),
    ("wgmma.cuh", include_str!("../../cu/wgmma.cuh")),
    ("tma.cuh", include_str!("../../cu/tma.cuh")),
    ("product.cuh", include_str!("../../cu/product.cuh")),
    ("lora.cuh", include_str!("../../cu/lora.cuh")),
    ("swiglu.cuh", include_str!("../../cu/swiglu.cuh")),
    ("head_loss.cuh", include_str!("../../cu/head_loss.cuh")),
];

macro_rules! program {
    ($name:literal: $($kernel:literal),+) => {
        Program { name: $name, source: include_str!(concat!("../../cu/", $name)), kernels: &[$($kernel),+] }
    };
}

/// Compiled once for a precision.
const PROGRAMS: [Program; 13] = [
    program!("adamw.cu": "adamw_squares", "adamw_norms", "adamw_update"),
    program!("embed.cu": "embed"),
    program!("gemm.cu": "gemm", "gemm_transposed"),
    program!("head_loss.cu": "head_loss", "head_gradient"),
    program!("lora.cu": "lora_shrink", "lora_shrink_drop", "lora_expand"),
    program!("lora_backward.cu": "lora_backward_shrink", "lora_backward_shrink_high", "lora_backward_expand", "lora_backward_expand_drop"),
    program!("lora_gradient.cu": "lora_gradient", "lora_gradient_drop", "lora_gradient_sum"),
    program!("lora_swiglu.cu": "lora_swiglu", "lora_backward_swiglu"),
    program!("rms_norm.cu": "rms_norm_32", "rms_norm_128", "rms_norm_256", "rms_norm_backward_32", "rms_norm_backward_128", "rms_norm_backward_256"),
    program!("rope.cu": "rope"),
    program!("rows.cu": "add", "gather", "scatter_add", "add_state", "gather_state", "scatter_add_state"),
    program!("swiglu.cu": "swiglu", "swiglu_backward"),
    program!("support.cu": "fill_uniform", "fill_uniform_state", "fill_cancelling", "fill_word", "count_unequal", "busy"),
];

/// Compiled for bf16 where the blocks of a cluster read one another's shared memory.
const CLUSTERED: Program = program!("head_loss_cluster.cu": "head_loss_1", "head_loss_2", "head_loss_4", "head_loss_8", "head_loss_8_wide");

/// Compiled for bf16 where four warps multiply tiles at once.
const WGMMA: Program = program!("gate_up.cu": "gate_up");

/// Whether an architecture (as "sm_90a") has clusters: from compute capability 9.0 on.
fn has_clusters(architecture: &str) -> bool {
    let number: String = architecture.chars().filter(char::is_ascii_digit).collect();
    number.parse::<u32>().is_ok_and(|number| number >= 90)
}

/// Whether an architecture multiplies tiles by four warps at once: Hopper does, and nothing before or after it in this way.
fn has_wgmma(architecture: &str) -> bool {
    architecture == "sm_90a"
}

/// Compiled for each size of head that is asked for: forward, backward, and what backward needs besides.
const ATTENTION: [Program; 3] =
    [program!("attention.cu": "attention"), program!("attention_backward.cu": "attention_dq", "attention_dkv"), SUMS];
const ATTENTION_HOPPER: [Program; 3] =
    [program!("attention_hopper.cu": "attention"), program!("attention_backward_hopper.cu": "attention_dq", "attention_dkv"), SUMS];
const SUMS: Program = program!("attention_sums.cu": "attention_delta", "attention_dkv_sum");

/// What attention kernels are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Heads {
    pub(crate) head_dim: usize,
    /// Query heads of a key head.
    pub(crate) group: usize,
}

/// The widest head.
pub(crate) const HEAD_DIM_MAX: usize = 256;

/// Tiles of attention for a size of head: rows of queries and of keys. Bounded by the shared memory of the smallest card (99 KiB a block), or of
/// Hopper where its own products are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    pub(crate) tile: usize,
    /// Whether kernels are Hopper's own, to which tiles are brought by the card's copies.
    pub(crate) wgmma: bool,
    /// Heads that a block of the forward kernel has, all of one key head: their keys and values are read once.
    pub(crate) heads: usize,
    /// Dynamic shared memory of the forward kernel and of both backward kernels.
    pub(crate) forward_bytes: u32,
    pub(crate) backward_bytes: u32,
}

impl Tiling {
    /// For heads so wide, of which `group` have a key head between them.
    pub(crate) fn new(head_dim: usize, group: usize, precision: Precision, architecture: &str) -> Self {
        if precision == Precision::Bf16 && [64, 128].contains(&head_dim) && has_wgmma(architecture) {
            // Wide heads two at a time: else too few rows of queries have room beside their keys and values.
            let heads = if head_dim > 64 && group.is_multiple_of(2) { 2 } else { 1 };
            // Tiles begin at multiples of 1024 bytes.
            let bytes = |tiles: usize| (tiles * 64 * head_dim * precision.bytes() + 1024) as u32;
            return Self { tile: 64, wgmma: true, heads, forward_bytes: bytes(4 + heads), backward_bytes: bytes(6) };
        }
        let wide = head_dim.next_multiple_of(16);
        let tile = match precision {
            Precision::Bf16 => {
                if wide <= 128 {
                    64
                } else {
                    32
                }
            }
            Precision::F32 => {
                if wide <= 128 {
                    32
                } else {
                    16
                }
            }
        };
        // PAD of tile.cuh is 16 bytes. float32 has a tile of probabilities beside those of rows; bf16 has two stages of some.
        let pad = 16 / precision.bytes();
        let bytes = |tiles: usize| tiles * tile * (wide + pad) * precision.bytes();
        let (forward, backward) = match precision {
            Precision::F32 => (bytes(3), bytes(4)),
            Precision::Bf16 => (bytes(4), bytes(if wide <= 64 { 6 } else { 4 })),
        };
        let probabilities = if precision == Precision::F32 { tile * (tile + pad) * precision.bytes() } else { 0 };
        let [forward_bytes, backward_bytes] = [forward, backward].map(|bytes| (bytes + probabilities) as u32);
        Self { tile, wgmma: false, heads: 1, forward_bytes, backward_bytes }
    }

    fn defines(self, head_dim: usize) -> Vec<String> {
        let values = [("HEAD_DIM", head_dim), ("TILE", self.tile), ("HEADS", self.heads)];
        values.map(|(name, value)| format!("{name}={value}")).to_vec()
    }

    fn programs(self) -> [&'static Program; 3] {
        if self.wgmma { ATTENTION_HOPPER.each_ref() } else { ATTENTION.each_ref() }
    }

    /// Threads of a block that owns a tile of one head.
    pub(crate) fn threads(self) -> u32 {
        self.tile as u32 * 2
    }
}

fn precision_define(precision: Precision) -> String {
    format!("NODUS_BF16={}", u8::from(precision == Precision::Bf16))
}

/// What an architecture has of the programs that are compiled once for a precision.
fn programs(architecture: &str, precision: Precision) -> Vec<&'static Program> {
    let bf16 = precision == Precision::Bf16;
    let (clustered, wgmma) =
        ((bf16 && has_clusters(architecture)).then_some(&CLUSTERED), (bf16 && has_wgmma(architecture)).then_some(&WGMMA));
    PROGRAMS.iter().chain(clustered).chain(wgmma).collect()
}

/// Every program.
fn all() -> impl Iterator<Item = &'static Program> {
    PROGRAMS.iter().chain([&CLUSTERED, &WGMMA]).chain(&ATTENTION).chain(&ATTENTION_HOPPER[..2])
}

/// Digest of every source and of how it is compiled; part of the device class.
pub(crate) fn digest() -> String {
    let mut hash = Sha256::new();
    for (name, source) in HEADERS.into_iter().chain(all().map(|program| (program.name, program.source))) {
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((source.len() as u64).to_le_bytes());
        hash.update(source);
    }
    if cfg!(feature = "broken-kernel") {
        hash.update("broken");
    }
    if cfg!(feature = "broken-gate-up") {
        hash.update("broken gate and up");
    }
    hex(&hash.finalize())
}

/// The kernels of a device.
#[derive(Debug)]
pub(crate) struct Kernels {
    gpu: Arc<Gpu>,
    pub(crate) compiler: Compiler,
    precision: Precision,
    by_name: HashMap<&'static str, Kernel>,
    attention: HashMap<Heads, HashMap<&'static str, Kernel>>,
    /// Keeps the kernels loaded.
    modules: Vec<Module>,
}

impl Kernels {
    pub(crate) fn new(gpu: &Arc<Gpu>, compiler: Compiler, precision: Precision) -> Result<Self, DeviceError> {
        let mut kernels =
            Self { gpu: Arc::clone(gpu), compiler, precision, by_name: HashMap::new(), attention: HashMap::new(), modules: Vec::new() };
        let programs = programs(&kernels.compiler.architecture, precision);
        let cubins = kernels.compiler.cubins(&programs, &[precision_define(precision)])?;
        for (program, cubin) in programs.into_iter().zip(cubins) {
            let shared = match program.name {
                name if name == CLUSTERED.name => CLUSTER_BYTES,
                name if name == WGMMA.name => PRODUCT_BYTES,
                _ => 0,
            };
            let loaded = kernels.load(program, &cubin, shared)?;
            kernels.by_name.extend(loaded);
        }
        Ok(kernels)
    }

    fn load(&mut self, program: &Program, cubin: &[u8], shared: u32) -> Result<Vec<(&'static str, Kernel)>, DeviceError> {
        let module = Module::load(&self.gpu, cubin)?;
        let kernels = program.kernels.iter().map(|name| Ok((*name, module.kernel(name, shared)?))).collect::<Result<_, DeviceError>>()?;
        self.modules.push(module);
        Ok(kernels)
    }

    /// A kernel by its name.
    pub(crate) fn get(&self, name: &'static str) -> Kernel {
        self.by_name[name]
    }

    #[cfg(feature = "broken-kernel")]
    pub(crate) fn misplace(&mut self, kernel: &'static str, by: &'static str) {
        let by = self.get(by);
        assert_eq!(self.get(kernel).parameter_bytes, by.parameter_bytes, "they take other parameters");
        self.by_name.insert(kernel, by);
    }

    /// A kernel by its name, if this card has it.
    pub(crate) fn find(&self, name: &str) -> Option<Kernel> {
        self.by_name.get(name).copied()
    }

    /// The name of a kernel, for people.
    pub(crate) fn name(&self, kernel: Kernel) -> &'static str {
        let all = self.by_name.iter().chain(self.attention.values().flatten());
        all.into_iter().find(|(_, known)| **known == kernel).map_or("?", |(name, _)| name)
    }

    /// Makes the attention kernels for some heads ready. First use compiles them.
    pub(crate) fn prepare_attention(&mut self, heads: Heads) -> Result<Tiling, DeviceError> {
        let Heads { head_dim, group } = heads;
        if head_dim == 0 || head_dim > HEAD_DIM_MAX {
            return Err(DeviceError::Unsupported(format!("heads {head_dim} wide; 1 to {HEAD_DIM_MAX} are supported")));
        }
        let tiling = Tiling::new(head_dim, group, self.precision, &self.compiler.architecture);
        if !self.attention.contains_key(&heads) {
            let mut defines = vec![precision_define(self.precision)];
            defines.extend(tiling.defines(head_dim));
            let programs = tiling.programs();
            let cubins = self.compiler.cubins(&programs, &defines)?;
            let mut kernels = HashMap::new();
            for ((program, cubin), shared) in programs.into_iter().zip(&cubins).zip([tiling.forward_bytes, tiling.backward_bytes, 0]) {
                kernels.extend(self.load(program, cubin, shared)?);
            }
            self.attention.insert(heads, kernels);
        }
        Ok(tiling)
    }

    /// An attention kernel for heads that were made ready.
    pub(crate) fn attention(&self, heads: Heads, name: &'static str) -> Kernel {
        self.attention[&heads][name]
    }
}

/// Compiles every kernel for an architecture (as "sm_90a"), in both precisions and for heads 64, 80, 128 and 256 wide, without a card.
/// Returns what was compiled and its bytes of machine code; what the cache has is not compiled again. This is the check that continuous integration can make.
///
/// # Errors
/// Where NVRTC is missing or refuses a source, with its log.
pub fn compile_everything(
    architecture: &str,
    folders: &[String],
    cache: Option<Box<dyn Cache>>,
) -> Result<Vec<(String, usize)>, DeviceError> {
    if probe(folders).nvrtc == Found::Missing {
        return Err(DeviceError::Unsupported(format!("{} was not found: {}", Library::Nvrtc.name(), Library::Nvrtc.remedy())));
    }
    let compiler = Compiler::new(architecture.to_owned(), cache)?;
    let mut compiled = Vec::new();
    for precision in [Precision::F32, Precision::Bf16] {
        let mut add = |programs: &[&Program], defines: &[String]| {
            let cubins = compiler.cubins(programs, defines)?;
            let names = programs.iter().map(|program| format!("{} {}", program.name, defines.join(" ")));
            compiled.extend(names.zip(cubins.iter().map(Vec::len)));
            Ok::<(), DeviceError>(())
        };
        add(&programs(architecture, precision), &[precision_define(precision)])?;
        // Hopper's own products among them, of one head and of two.
        for (head_dim, group) in [(80, 1), (64, 1), (128, 1), (128, 2), (256, 1)] {
            let mut defines = vec![precision_define(precision)];
            let tiling = Tiling::new(head_dim, group, precision, architecture);
            defines.extend(tiling.defines(head_dim));
            add(&tiling.programs(), &defines)?;
        }
    }
    Ok(compiled)
}

#[cfg(test)]
mod tests {
    use super::{HEAD_DIM_MAX, HEADERS, Precision, Tiling, all, has_clusters};

    #[test]
    fn every_source_names_its_kernels_and_has_a_box() {
        for program in all() {
            let declared = program.source.matches("KERNEL ").count();
            // Some have one form for bf16 and one for float32.
            let forms = program.kernels.iter().map(|kernel| program.source.matches(&format!(" {kernel}(PARAMS")).count());
            assert_eq!(declared, forms.sum::<usize>(), "{}", program.name);
            for kernel in program.kernels {
                assert!(program.source.contains(&format!(" {kernel}(")), "{} has no {kernel}", program.name);
            }
            assert!(program.source.starts_with("// "), "{} begins with its box", program.name);
        }
        for (name, source) in HEADERS {
            assert!(source.lines().nth(1).is_some_and(|line| line.starts_with("// ")), "{name} says what it must never do");
        }
        let all = all().map(|program| program.source).chain(HEADERS.iter().map(|(_, source)| *source));
        for line in all.flat_map(str::lines).filter(|line| line.starts_with("#include")) {
            assert!(HEADERS.iter().any(|(name, _)| line == format!("#include \"{name}\"")), "{line}: no header but our own");
        }
    }

    #[test]
    fn clusters_are_from_hopper_on() {
        let have = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"].map(has_clusters);
        assert_eq!(have, [false, false, true, true, true]);
    }

    #[test]
    fn attention_fits_the_shared_memory_of_every_card() {
        for precision in [Precision::F32, Precision::Bf16] {
            for head_dim in 1..=HEAD_DIM_MAX {
                for (architecture, room) in [("sm_89", 99 << 10), ("sm_90a", 227 << 10)] {
                    let tiling = Tiling::new(head_dim, 2, precision, architecture);
                    // Three static tables of the backward kernel are 12 bytes a row, twice.
                    let most = tiling.forward_bytes.max(tiling.backward_bytes) as usize;
                    assert!(most + 24 * tiling.tile <= room, "{head_dim} {precision:?} {architecture}");
                }
            }
        }
    }
}
