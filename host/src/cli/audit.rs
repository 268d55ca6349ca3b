//! The options of `audit`.
//!
//! Parses only.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use super::{RemoteArgs, SandboxArgs};
use clap::{Args, Subcommand};
use nodus_receipts::ledger::Kind;

use super::device::DeviceChoice;

/// What an auditor does.
#[derive(Debug, Subcommand)]
pub enum AuditMode {
    /// Check a receipt: its signature, the files it speaks of, and its place in the ledger
    ///
    /// Exits with 0 only if all that could be checked is right; what could not be is said.
    Verify(VerifyArgs),
    /// Run a finished job again, alone, from its receipt, and compare every bit
    Replay(ReplayArgs),
    /// List the ledger's entries and sum up adapter bytes
    Ledger(LedgerArgs),
    /// Fetch a job of yours from a service with all that went into it, check its receipt and what the service's ledger says of it, and run it again here
    Job(Box<AuditJobArgs>),
}

/// `audit job`.
#[derive(Debug, Args)]
pub struct AuditJobArgs {
    /// The job's id
    pub id: String,
    /// A folder for what is fetched: the results, and what went in as `inputs/`; must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Run it again, alone, and compare every bit; the model must be in the data folder (`model import`)
    #[arg(long)]
    pub replay: bool,
    /// The component, where it is a ready-made one, which services do not send
    #[arg(long, value_name = "FILE", requires = "replay")]
    pub component: Option<PathBuf>,
    /// Believe this public key (PEM), which the operator gave you, in place of what the service says its key is; may be given many times
    #[arg(long = "key", value_name = "FILE")]
    pub keys: Vec<PathBuf>,
    /// Where to compute; another device class than the receipt's is refused [default: NODUS_DEVICE, else as the receipt says]
    #[arg(long, value_name = "DEVICE", requires = "replay")]
    pub device: Option<DeviceChoice>,
    /// CPU threads; results do not depend on it [default: all]
    #[arg(long, requires = "replay")]
    pub threads: Option<NonZeroUsize>,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
    /// How the component is kept apart.
    #[command(flatten)]
    pub sandbox: SandboxArgs,
}

/// `audit verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// A receipt, the folder of a run, or a folder of such folders
    #[arg(value_name = "RECEIPT|DIR")]
    pub path: PathBuf,
    /// Believe this public key (PEM) in place of this host's; may be given many times
    #[arg(long = "key", value_name = "FILE")]
    pub keys: Vec<PathBuf>,
    /// A folder with the ledger of the host that signed [default: this host's, where this host's key is believed]
    #[arg(long, value_name = "DIR")]
    pub ledger: Option<PathBuf>,
}

/// `audit replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The folder of a run, or of one member of a sweep or manifest
    #[arg(value_name = "DIR")]
    pub path: PathBuf,
    /// Believe this public key (PEM) in place of this host's; may be given many times
    #[arg(long = "key", value_name = "FILE")]
    pub keys: Vec<PathBuf>,
    /// Where to compute; another device class than the receipt's is refused [default: NODUS_DEVICE, else as the receipt says]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
    /// CPU threads; results do not depend on it [default: all]
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// How the component is kept apart.
    #[command(flatten)]
    pub sandbox: SandboxArgs,
}

/// `audit ledger`.
#[derive(Debug, Args)]
pub struct LedgerArgs {
    /// Only entries of this tenant; what `run` does belongs to `local`
    #[arg(long)]
    pub tenant: Option<String>,
    /// Only entries of this kind: key_created, receipt, adapter_bytes or job_failed
    #[arg(long)]
    pub kind: Option<Kind>,
    /// Only entries of this job
    #[arg(long)]
    pub job: Option<String>,
    /// One JSON object a line: the entries, then the sums
    #[arg(long)]
    pub json: bool,
}
