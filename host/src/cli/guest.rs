//! The options of sandboxes, and the verbs that this program starts itself with.
//!
//! Parses only.

use clap::Args;
use nodus_sandbox::Limits;

/// How strangers' code is kept apart. None of it changes a result.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct SandboxArgs {
    /// Run components within this process, for debugging; by default they have a process of their own that the kernel locks down
    #[arg(long, conflicts_with = "require_os_sandbox")]
    pub in_process: bool,
    /// Refuse to run where the kernel does not lock that process down wholly (landlock, seccomp, ...), in place of a warning
    #[arg(long)]
    pub require_os_sandbox: bool,
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

/// A limit in place of its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSetting {
    name: String,
    value: u64,
}

impl std::str::FromStr for LimitSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('=').and_then(|(name, value)| Some((name.trim().to_owned(), value.trim().parse().ok()?)));
        let Some((name, value)) = parsed else { return Err("expected NAME=NUMBER, for example cpu-ms=60000".to_owned()) };
        let mut known = Limits::DEFAULT;
        known.set(&name, value).map_err(|error| error.to_string())?;
        Ok(Self { name, value })
    }
}

impl LimitSetting {
    /// The limits of a job that is given these.
    ///
    /// # Errors
    /// A limit that there is not, which parsing has refused already.
    pub fn all(settings: &[Self]) -> anyhow::Result<Limits> {
        let mut limits = Limits::DEFAULT;
        for setting in settings {
            limits.set(&setting.name, setting.value)?;
        }
        Ok(limits)
    }
}
