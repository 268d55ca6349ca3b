//! Why a job ended without success, and who is at fault.
//!
//! Texts here are shown to the job's owner: no path of the host, no address. [`Failure::Internal`] alone is ours, and its chain
//! is for the operator's log only.

use serde::{Deserialize, Serialize};
use wasmtime::component::ResourceTableError;
use wasmtime::{Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use crate::limits::{LimitName, Limits, MESSAGE_BYTES_MAX};

/// Why a job failed.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum Failure {
    /// The guest answered an error.
    #[error("{0}")]
    Returned(String),
    /// The guest answered an error after it was asked to stop.
    #[error("stopped on request: {0}")]
    Cancelled(String),
    /// The guest panicked; its own words.
    #[error("the component panicked: {message}")]
    Panicked {
        /// From its standard error, for example ``src/lib.rs:3:5: index out of bounds``.
        message: String,
    },
    /// The guest left by `exit` in place of returning. WASI tells 0 from others only.
    #[error("the component called exit({code}), expected it to return from `run`")]
    Exited {
        /// 0 or 1.
        code: i32,
    },
    /// The guest did what WebAssembly or the component model forbids.
    #[error("the component trapped: {trap}{}", if backtrace.is_empty() { String::new() } else { format!(" (in {})", backtrace.join(", called by ")) })]
    Trapped {
        /// Which rule it broke.
        trap: String,
        /// Innermost functions first, where the component names them.
        backtrace: Vec<String>,
    },
    /// The guest used too much CPU time.
    #[error("over the limit {limit}: the component used {allowed} ms of CPU time")]
    CpuTime {
        /// `cpu-ms` or `cpu-stretch-ms`.
        #[serde(with = "crate::limits::name")]
        limit: LimitName,
        /// Its value.
        allowed: u64,
    },
    /// The job took too long.
    #[error("over the limit wall-ms: the job ran for {allowed} ms")]
    WallTime {
        /// The limit.
        allowed: u64,
    },
    /// The guest could not go on with the memory it may have.
    #[error("over the limit guest-memory-bytes: {needed} needed, {allowed} allowed")]
    Memory {
        /// What its memories would have been.
        needed: u64,
        /// The limit.
        allowed: u64,
    },
    /// The guest passed too much in one call.
    #[error("over the limit host-call-bytes: one call carried more than {allowed} bytes")]
    HostCallBytes {
        /// The limit.
        allowed: u64,
    },
    /// The guest held too many resources, and the call had no way to say so.
    #[error("over the limit handles: more than {allowed} resources at once")]
    Handles {
        /// The limit.
        allowed: u64,
    },
    /// The component has too many core instances; it was not started.
    #[error("over the limit instances: the component has more than {allowed} core instances")]
    Instances {
        /// The limit.
        allowed: u64,
    },
    /// The guest asked for too many random bytes in one call.
    #[error("over the limit random-bytes: {needed} needed, {allowed} allowed")]
    RandomBytes {
        /// What it asked for.
        needed: u64,
        /// The limit.
        allowed: u64,
    },
    /// The parameters are too long; nothing was started.
    #[error("over the limit parameter-bytes: {needed} needed, {allowed} allowed")]
    ParameterBytes {
        /// Their length.
        needed: u64,
        /// The limit.
        allowed: u64,
    },
    /// The process that the guest ran in ended, or was ended: what else ran in it was its tenant's too.
    #[error("the job's process {how}")]
    Process {
        /// For example `was killed by signal 9 (SIGKILL)`.
        how: String,
    },
    /// A defect of the host, not of the job.
    #[error("internal error of the host")]
    Internal(
        #[source]
        #[serde(with = "chain")]
        anyhow::Error,
    ),
}

/// Our own errors as texts, for the way between processes.
mod chain {
    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(error: &anyhow::Error, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{error:#}"))
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<anyhow::Error, D::Error> {
        String::deserialize(from).map(anyhow::Error::msg)
    }
}

/// What a host function ends a job with. It travels through wasmtime as an error and is found again by its type.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    #[error("over {limit}")]
    CpuTime { limit: &'static str, allowed: u64 },
    #[error("over handles")]
    Handles,
    #[error("over random-bytes")]
    RandomBytes { needed: u64 },
    #[error("{0}")]
    Internal(String),
}

/// What is known beside the error itself.
pub(crate) struct Circumstances<'a> {
    pub(crate) limits: &'a Limits,
    /// Whether the component was instantiated.
    pub(crate) is_started: bool,
    /// What the guest's memory would have been when growing was last refused.
    pub(crate) memory_refused: Option<u64>,
    /// The guest's panic message.
    pub(crate) panic: Option<String>,
}

/// wasmtime has no types for these; it is pinned to one version, and a test of each notices another wording.
const FUEL_TEXT: &str = "fuel allocated for hostcalls has been exhausted";
const HANDLE_LIMIT_TEXT: &str = "store handle limit exceeded";
const INSTANCE_LIMIT_TEXT: &str = "instance count too high";

impl Failure {
    /// The failure's name, for machines; it never changes. A limit's is the limit's own name.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Returned(_) => "returned-error",
            Self::Cancelled(_) => "cancelled",
            Self::Panicked { .. } => "panicked",
            Self::Exited { .. } => "exited",
            Self::Trapped { .. } => "trapped",
            Self::CpuTime { limit, .. } => limit,
            Self::WallTime { .. } => "wall-ms",
            Self::Memory { .. } => "guest-memory-bytes",
            Self::HostCallBytes { .. } => "host-call-bytes",
            Self::Handles { .. } => "handles",
            Self::Instances { .. } => "instances",
            Self::RandomBytes { .. } => "random-bytes",
            Self::ParameterBytes { .. } => "parameter-bytes",
            Self::Process { .. } => "guest-process",
            Self::Internal(_) => "internal",
        }
    }

    /// What an error out of wasmtime means.
    pub(crate) fn classify(error: &wasmtime::Error, known: Circumstances<'_>) -> Self {
        let limits = known.limits;
        if let Some(stop) = error.downcast_ref::<Stop>() {
            return match stop {
                Stop::CpuTime { limit, allowed } => Self::CpuTime { limit, allowed: *allowed },
                Stop::Handles => Self::Handles { allowed: limits.handles },
                Stop::RandomBytes { needed } => Self::RandomBytes { needed: *needed, allowed: limits.random_bytes },
                Stop::Internal(text) => Self::Internal(anyhow::anyhow!("{text}")),
            };
        }
        if let Some(I32Exit(code)) = error.downcast_ref() {
            return Self::Exited { code: *code };
        }
        match error.downcast_ref() {
            Some(ResourceTableError::Full) => return Self::Handles { allowed: limits.handles },
            // wasmtime checked the handle; an entry that is missing or of another type is our own mistake.
            Some(other) => return Self::Internal(anyhow::anyhow!("resource table: {other}")),
            None => {}
        }
        let text = error.root_cause().to_string();
        if text.contains(FUEL_TEXT) {
            return Self::HostCallBytes { allowed: limits.host_call_bytes };
        }
        if text.contains(HANDLE_LIMIT_TEXT) {
            return Self::Handles { allowed: limits.handles };
        }
        if text.contains(INSTANCE_LIMIT_TEXT) && !known.is_started {
            return Self::Instances { allowed: limits.instances };
        }
        let trap = error.downcast_ref::<Trap>();
        let is_abort = trap == Some(&Trap::UnreachableCodeReached);
        if let Some(message) = known.panic.filter(|_| is_abort) {
            return Self::Panicked { message };
        }
        // A guest that cannot go on without memory aborts; one whose first memory is refused does not even start.
        if let Some(needed) = known.memory_refused.filter(|_| is_abort || !known.is_started) {
            return Self::Memory { needed, allowed: limits.guest_memory_bytes };
        }
        Self::Trapped { trap: trap_text(trap, &text), backtrace: backtrace(error) }
    }
}

fn trap_text(trap: Option<&Trap>, text: &str) -> String {
    match trap {
        Some(Trap::StackOverflow) => "call stack exhausted: expected less recursion".into(),
        Some(Trap::MemoryOutOfBounds) => {
            "out of bounds memory access (in Rust most often its own stack, 1 MiB, exhausted by recursion or large values)".into()
        }
        _ => shorten(text.strip_prefix("wasm trap: ").unwrap_or(text)),
    }
}

/// Names of the innermost functions, where the component has a name section.
fn backtrace(error: &wasmtime::Error) -> Vec<String> {
    const FRAMES: usize = 4;
    let Some(trace) = error.downcast_ref::<WasmBacktrace>() else { return Vec::new() };
    let names = trace.frames().iter().filter_map(|frame| frame.func_name());
    names.take(FRAMES).map(|name| name.chars().take(120).collect()).collect()
}

/// A text in one line, and at most [`MESSAGE_BYTES_MAX`] of it.
pub(crate) fn one_line(text: &str) -> String {
    shorten(&text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// At most [`MESSAGE_BYTES_MAX`] of a text.
pub(crate) fn shorten(text: &str) -> String {
    text[..text.floor_char_boundary(MESSAGE_BYTES_MAX)].to_owned()
}
