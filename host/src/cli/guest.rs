//! The options of sandboxes, and the verbs that this program starts itself with.
//!
//! Parses only.

use clap::Args;
use nodus_sandbox::limits::GUEST_SILENCE_MS_MAX;

/// How strangers' code is kept apart. None of it changes a result.
#[derive(Clone, Copy, Debug, Args)]
pub struct SandboxArgs {
    /// Run components within this process, for debugging; by default they have a process of their own that the kernel locks down
    #[arg(long, conflicts_with = "require_os_sandbox")]
    pub in_process: bool,
    /// Refuse to run where the kernel does not lock that process down wholly (landlock, seccomp, ...), in place of a warning
    #[arg(long)]
    pub require_os_sandbox: bool,
    /// Milliseconds that such a process may give no sign of life before it is ended, with the jobs in it
    #[arg(long, value_name = "MS", default_value_t = GUEST_SILENCE_MS_MAX, value_parser = clap::value_parser!(u64).range(1000..))]
    pub guest_silence_ms: u64,
}

impl Default for SandboxArgs {
    /// As the command line has it without a word.
    fn default() -> Self {
        Self { in_process: false, require_os_sandbox: false, guest_silence_ms: GUEST_SILENCE_MS_MAX }
    }
}

/// `guest`.
#[derive(Clone, Copy, Debug, Args)]
pub struct GuestArgs {
    /// Threads that run guests
    #[arg(long)]
    pub threads: usize,
    /// Memory that it may write to
    #[arg(long)]
    pub data_bytes: u64,
    /// CPU time that it may use
    #[arg(long)]
    pub cpu_seconds: u64,
}

/// `compile`.
#[derive(Clone, Debug, Args)]
pub struct CompileArgs {
    /// Limits as JSON
    #[arg(long)]
    pub limits: String,
}
