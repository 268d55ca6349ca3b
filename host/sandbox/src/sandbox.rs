//! The process's one wasmtime engine: its configuration, its ticker and what guests may link to.
//!
//! Never holds anything of a job. One for a process: types of two engines must not mix.

use std::hash::{Hash as _, Hasher};
use std::time::Duration;

use nodus_protocol::Digest;
use sha2::{Digest as _, Sha256};
use wasmtime::component::{HasSelf, Linker};
use wasmtime::{Config, Engine, OptLevel, Strategy, WasmFeatures};
use wasmtime_wasi::p2::bindings::{clocks, random};

use crate::bindings::TrainingJob;
use crate::component::{ValidComponent, compile};
use crate::limits::{ASYNC_STACK_BYTES, Limits, WASM_STACK_BYTES};
use crate::precompiled::Precompiled;
use crate::refusal::ComponentRefusal;
use crate::state::State;
use crate::ticker::{Running, Ticker};

/// How often the ticker is looked at.
const WATCH: Duration = Duration::from_secs(1);

/// How a sandbox is set up.
#[derive(Clone, Copy, Debug, Default)]
pub struct SandboxOptions {
    /// What an upload may be at most; the limits of a job come with the job.
    pub upload: Limits,
}

/// A sandbox that cannot be set up. Ours, not a tenant's.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// wasmtime refuses its configuration or its imports.
    #[error("wasmtime cannot be set up on this machine")]
    Wasmtime(#[source] anyhow::Error),
    /// The ticker cannot be started.
    #[error("the sandbox's ticker thread cannot be started")]
    Ticker(#[source] std::io::Error),
}

/// Validates components and runs them. Create one in a process.
pub struct Sandbox {
    pub(crate) engine: Engine,
    pub(crate) linker: Linker<State>,
    ticker: Ticker,
    options: SandboxOptions,
}

impl Sandbox {
    /// Sets up the engine, starts its ticker and links what guests may import.
    ///
    /// # Errors
    /// Where wasmtime does not support the machine or no thread can be started.
    pub fn new(options: SandboxOptions) -> Result<Self, SandboxError> {
        let wasmtime = |error: wasmtime::Error| SandboxError::Wasmtime(error.into());
        let engine = Engine::new(&config()).map_err(wasmtime)?;
        let linker = linker(&engine).map_err(wasmtime)?;
        let ticker = Ticker::start(&engine).map_err(SandboxError::Ticker)?;
        Ok(Self { engine, linker, ticker, options })
    }

    /// Checks an upload and compiles it. Takes CPU time in proportion to its size (about 0.3 s for a small one), so call it where
    /// blocking is allowed.
    ///
    /// # Errors
    /// The first reason found why it is no training job.
    pub fn validate(&self, bytes: &[u8]) -> Result<ValidComponent, ComponentRefusal> {
        ValidComponent::new(self, bytes, &self.options.upload)
    }

    /// Checks an upload as [`Self::validate`] does; the machine code, to be sealed and loaded elsewhere.
    ///
    /// # Errors
    /// Ours: wasmtime cannot write the code down. Inside: why it is no training job.
    pub fn compile(&self, bytes: &[u8]) -> anyhow::Result<Result<Vec<u8>, ComponentRefusal>> {
        Ok(match compile(self, bytes, &self.options.upload) {
            Ok((_, component)) => Ok(component.serialize()?),
            Err(refusal) => Err(refusal),
        })
    }

    /// A component that this host compiled before. Takes a fraction of a millisecond for a small one.
    ///
    /// # Errors
    /// Ours: it was compiled with other settings.
    pub fn load(&self, precompiled: &Precompiled) -> anyhow::Result<ValidComponent> {
        Ok(ValidComponent::load(self, precompiled)?)
    }

    /// Digest of everything that machine code depends on beside its component, and of what an upload may be: code of other settings is
    /// not to be loaded, and a component of other limits to be checked again.
    #[must_use]
    pub fn settings(&self) -> Digest {
        let mut hasher = Hashed(Sha256::new());
        env!("CARGO_PKG_VERSION").hash(&mut hasher);
        self.engine.precompile_compatibility_hash().hash(&mut hasher);
        self.options.upload.entries().hash(&mut hasher);
        Digest::from_bytes(hasher.0.finalize().into())
    }

    /// What an upload may be at most.
    #[must_use]
    pub fn upload_limits(&self) -> Limits {
        self.options.upload
    }

    /// Has `on_dead` called once the ticker is found dead: then nothing stops a guest that spins, and the process must end.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn watch_ticker(&self, on_dead: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        self.ticker.watch(WATCH, on_dead)
    }

    /// Whether something would stop a guest that spins.
    pub(crate) fn is_guarded(&self) -> bool {
        self.ticker.is_alive()
    }

    /// A guest is about to run: from now on it is looked at.
    pub(crate) fn running(&self) -> Running {
        self.ticker.running()
    }
}

/// SHA-256 for whatever implements `Hash`.
struct Hashed(Sha256);

impl Hasher for Hashed {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = self.0.clone().finalize().into();
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

/// The one configuration.
///
/// Memory comes from the on-demand allocator, not from the pooling one: a training job starts once and runs for minutes, so 20 us
/// saved at its start are nothing, while a pool is shared by tenants (one can fill it, and its slots are reused, which has leaked
/// before: CVE-2026-34988). The ceilings a pool would give come from the limiter, summed per job.
fn config() -> Config {
    // Whatever no compiler needs for a training job is surface only. Some of it is not even built into wasmtime.
    let off = WasmFeatures::THREADS
        | WasmFeatures::SHARED_EVERYTHING_THREADS
        | WasmFeatures::MEMORY64
        | WasmFeatures::MULTI_MEMORY
        | WasmFeatures::CUSTOM_PAGE_SIZES
        | WasmFeatures::TAIL_CALL
        | WasmFeatures::RELAXED_SIMD
        | WasmFeatures::WIDE_ARITHMETIC
        | WasmFeatures::FUNCTION_REFERENCES
        | WasmFeatures::GC
        | WasmFeatures::EXCEPTIONS
        | WasmFeatures::LEGACY_EXCEPTIONS
        | WasmFeatures::STACK_SWITCHING;
    let mut config = Config::new();
    config
        .strategy(Strategy::Cranelift)
        .cranelift_opt_level(OptLevel::Speed)
        // NaN bits are the one thing WebAssembly leaves open; results must not depend on the machine.
        .cranelift_nan_canonicalization(true)
        .wasm_features(off, false)
        .epoch_interruption(true)
        .consume_fuel(false)
        .wasm_component_model(true)
        // No asynchronous functions in the world yet; without them a call is 0.1 us cheaper.
        .concurrency_support(false)
        .shared_memory(false)
        .max_wasm_stack(WASM_STACK_BYTES)
        .async_stack_size(ASYNC_STACK_BYTES)
        .async_stack_zeroing(true)
        .guard_before_linear_memory(true)
        // Copying the data segments at a job's start takes microseconds; images would take files in memory.
        .memory_init_cow(false);
    config
}

/// What guests may import: WASI 0.2 without HTTP, and `nodus:gpu`. All of WASI is linked, because every guest with a standard
/// library imports all of it; the context denies what it reaches for.
fn linker(engine: &Engine) -> wasmtime::Result<Linker<State>> {
    type Own = HasSelf<State>;
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    linker.allow_shadowing(true);
    clocks::monotonic_clock::add_to_linker::<_, Own>(&mut linker, |state| state)?;
    random::random::add_to_linker::<_, Own>(&mut linker, |state| state)?;
    random::insecure::add_to_linker::<_, Own>(&mut linker, |state| state)?;
    random::insecure_seed::add_to_linker::<_, Own>(&mut linker, |state| state)?;
    linker.allow_shadowing(false);
    TrainingJob::add_to_linker::<_, Own>(&mut linker, |state| state)?;
    Ok(linker)
}
