//! Why an upload is no training job. The tenant's fault, always, and shown to the tenant.

use serde::{Deserialize, Serialize};

use crate::limits::LimitName;

/// Why a component was refused: what is wrong, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum ComponentRefusal {
    /// Larger than `component-bytes`.
    #[error("the component is {bytes} bytes long, expected at most {allowed} (component-bytes)")]
    TooLarge {
        /// Its length.
        bytes: u64,
        /// The limit.
        allowed: u64,
    },
    /// The text format.
    #[error("this is WebAssembly text (.wat): upload the binary component (.wasm)")]
    Text,
    /// A core module.
    #[error("this is a core module: build for wasm32-wasip2, or wrap it with `wasm-tools component new`")]
    CoreModule,
    /// Native code, perhaps wasmtime's own (.cwasm).
    #[error("this is precompiled native code: upload the WebAssembly component (.wasm), the host compiles it itself")]
    Precompiled,
    /// Neither of these.
    #[error("this is no WebAssembly component: it begins with {begin}, expected 00 61 73 6d 0d 00 01 00")]
    NotWasm {
        /// Its first bytes in hexadecimal.
        begin: String,
    },
    /// Truncated, malformed, or using a feature that is off.
    #[error("the component is invalid: {reason}")]
    Invalid {
        /// What wasmtime says, with the offset.
        reason: String,
    },
    /// The compiler died of it, or was ended.
    #[error("the component cannot be compiled: the process that compiles it {how} (limits: {ms} ms, {bytes} bytes of memory)")]
    Compiler {
        /// For example `was killed by signal 11 (SIGSEGV)`.
        how: String,
        /// The limit on time.
        ms: u64,
        /// The limit on memory.
        bytes: u64,
    },
    /// Imports that no training job has.
    #[error("the component imports what the host does not offer: {}\nexpected only nodus:gpu@0.1 and WASI 0.2 (cli, clocks, filesystem, io, random, sockets)", imports.join(", "))]
    ForeignImports {
        /// All of them.
        imports: Vec<String>,
    },
    /// An import of the right name that is not what the host has under it.
    #[error("an import of the component does not fit the host: {reason}")]
    WrongImport {
        /// Which one and how.
        reason: String,
    },
    /// No `run`.
    #[error("the component exports no `run`: expected `export run: func() -> result<_, string>`, the world nodus:gpu/training-job")]
    NoRun,
    /// `run` of another type.
    #[error("the component's `run` is {found}: expected func() -> result<_, string>, the world nodus:gpu/training-job")]
    WrongRun {
        /// What it is.
        found: String,
    },
    /// Imports core modules, so that what it needs cannot be told.
    #[error("the component imports core modules, so what it needs cannot be told: expected a component that holds its own")]
    UnknownNeeds,
    /// Has more parts than a component may have; it was not compiled.
    #[error("the component has {found} {limit}, expected at most {allowed}")]
    TooManyParts {
        /// The limit's name.
        #[serde(with = "crate::limits::name")]
        limit: LimitName,
        /// What it has.
        found: u64,
        /// The limit.
        allowed: u64,
    },
    /// Needs more from the start than a job may have.
    #[error("the component needs {needed} {limit} from the start, expected at most {allowed}")]
    NeedsTooMuch {
        /// The limit's name.
        #[serde(with = "crate::limits::name")]
        limit: LimitName,
        /// What it needs.
        needed: u64,
        /// The limit.
        allowed: u64,
    },
}

impl ComponentRefusal {
    /// The refusal's name, for machines; it never changes. A limit's is the limit's own name.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "component-bytes",
            Self::Text => "component-text",
            Self::CoreModule => "component-core-module",
            Self::Precompiled => "component-precompiled",
            Self::NotWasm { .. } => "component-no-wasm",
            Self::Invalid { .. } => "component-invalid",
            Self::Compiler { .. } => "component-compiler",
            Self::ForeignImports { .. } => "component-foreign-imports",
            Self::WrongImport { .. } => "component-wrong-import",
            Self::NoRun => "component-no-run",
            Self::WrongRun { .. } => "component-wrong-run",
            Self::UnknownNeeds => "component-unknown-needs",
            Self::TooManyParts { limit, .. } | Self::NeedsTooMuch { limit, .. } => limit,
        }
    }
}
