//! The options of the verbs that talk to a service.
//!
//! Parses only.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand, ValueEnum};
use nodus_api::JobState;

use super::run::fraction;
use crate::limits::Limit;
use crate::name::Name;
use crate::settings::Setting;
use crate::sweep::Sweep;

/// Which service, and as what it answers.
#[derive(Clone, Debug, Default, Args)]
pub struct RemoteArgs {
    /// The service, such as https://nodus.example:7643 [default: NODUS_URL, else the profile's]
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// A file with `url`, `token` and `ca` [default: NODUS_PROFILE, else ~/.config/nodus/profile.toml]. NODUS_TOKEN goes before its token
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// A certificate (PEM) to trust besides the system's [default: NODUS_CA, else the profile's]
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// JSON in place of tables
    #[arg(long)]
    pub json: bool,
}

/// What is asked of a service.
#[derive(Debug, Subcommand)]
pub enum ClientMode {
    /// Submit a job or a sweep to a service
    Submit(Box<SubmitArgs>),
    /// List your jobs on a service
    Jobs(JobsArgs),
    /// Follow a job or a sweep until it ends
    Watch(WatchArgs),
    /// Show a job's log
    Logs(LogsArgs),
    /// Show a job's steps, evaluations and metrics as CSV
    Metrics(MetricsArgs),
    /// Cancel jobs: they end well and keep what they trained
    Cancel(CancelArgs),
    /// Download what was kept of a job or a sweep
    Fetch(FetchArgs),
    /// Upload data sets and components, for jobs to name
    Upload(UploadArgs),
    /// List the data sets and components on a service that your jobs may name
    Uploads(ListArgs),
    /// List the models of a service
    Models(ListArgs),
    /// Show what you use of a service, and what you may
    Usage(ListArgs),
    /// Delete from a service: jobs that ended with all that was kept of them, data sets, components
    Rm(RmArgs),
}

/// `submit`.
#[derive(Debug, Args)]
pub struct SubmitArgs {
    /// A component: a file, which is uploaded (its name ends in .wasm or has a /), or the name of a ready-made one, such as sft
    pub component: String,
    /// Name of the base model on the service
    #[arg(long, value_name = "NAME")]
    pub model: String,
    /// The data set: a JSON Lines file, which is uploaded (its name ends in .jsonl or has a /), or a name on the service
    #[arg(long, value_name = "NAME|FILE")]
    pub data: String,
    /// A second data set to evaluate on: a file, which is uploaded, or a name on the service
    #[arg(long, value_name = "NAME|FILE", group = "held")]
    pub held_out: Option<String>,
    /// Hold this part of the data out, above 0 and below 1; which rows does not depend on the seed
    #[arg(long, value_name = "F", value_parser = fraction, group = "held")]
    pub held_out_fraction: Option<f64>,
    /// Hold so many rows of the data out
    #[arg(long, value_name = "N", group = "held")]
    pub held_out_count: Option<NonZeroUsize>,
    /// A JSON file with the job's parameters
    #[arg(long, value_name = "FILE")]
    pub params: Option<PathBuf>,
    /// One parameter, over those of the file; the value is JSON, else a string. May be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<Setting>,
    /// A parameter and the values to try; with several, all their combinations
    #[arg(long = "sweep", value_name = "KEY=V1,V2")]
    pub sweeps: Vec<Sweep>,
    /// Seed of everything random in the job
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// A limit of each job over its default, such as device-bytes=512MiB. May be given many times
    #[arg(long = "limit", value_name = "NAME=VALUE")]
    pub limits: Vec<Limit>,
    /// How the job shares the device; results do not depend on it
    #[arg(long, value_enum, default_value_t = RemoteLane::Fused)]
    pub lane: RemoteLane,
    /// Go before all jobs of low priority
    #[arg(long)]
    pub high: bool,
    /// Makes a repeated command the same submission [default: none: each is a new one]
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Follow the job until it ends
    #[arg(long)]
    pub watch: bool,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// How a job shares the service's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RemoteLane {
    /// Passes shared with other jobs on the same model.
    Fused,
    /// An engine process of its own beside others.
    Mps,
    /// Nobody else on the device.
    Solo,
}

fn states() -> PossibleValuesParser {
    PossibleValuesParser::new(JobState::ALL.iter().map(|state| state.as_str()))
}

/// `jobs`.
#[derive(Debug, Args)]
pub struct JobsArgs {
    /// Only those in this state
    #[arg(long, value_parser = states())]
    pub state: Option<String>,
    /// Only those of this sweep
    #[arg(long, value_name = "ID")]
    pub cohort: Option<String>,
    /// Only those on this model
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// How many at most
    #[arg(long, value_name = "N", default_value = "50")]
    pub limit: NonZeroUsize,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// The id of a job or of a sweep
    pub id: String,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// The job's id
    pub id: String,
    /// Go on until the job ends
    #[arg(long, short)]
    pub follow: bool,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `metrics`.
#[derive(Debug, Args)]
pub struct MetricsArgs {
    /// The job's id
    pub id: String,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `cancel`.
#[derive(Debug, Args)]
pub struct CancelArgs {
    /// The ids of jobs or sweeps
    #[arg(required = true)]
    pub ids: Vec<String>,
    /// Cut them off; nothing is kept but their records
    #[arg(long)]
    pub now: bool,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `upload`.
#[derive(Debug, Args)]
pub struct UploadArgs {
    /// A component (.wasm) or a JSON Lines file
    pub file: PathBuf,
    /// What the data set is to be called [default: the file's name and the beginning of its digest]
    #[arg(long, value_name = "NAME")]
    pub name: Option<Name>,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `uploads`, `models`, `usage`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// The ids of jobs or sweeps
    #[arg(required_unless_present_any = ["data", "components"])]
    pub ids: Vec<String>,
    /// A data set by its name; jobs that were submitted with it keep it. May be given many times
    #[arg(long, value_name = "NAME")]
    pub data: Vec<String>,
    /// A component by its id; jobs that were submitted with it keep it. May be given many times
    #[arg(long = "component", value_name = "ID")]
    pub components: Vec<String>,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `fetch`.
#[derive(Debug, Args)]
pub struct FetchArgs {
    /// The id of a job or of a sweep; of a sweep, each member has a folder of its own
    pub id: String,
    /// A folder for the results; must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Check what was downloaded: every receipt's signature, and the files that it speaks of
    #[arg(long)]
    pub verify: bool,
    /// Believe this public key (PEM), which the operator gave you, in place of what the service says its key is; may be given many times
    #[arg(long = "key", value_name = "FILE", requires = "verify")]
    pub keys: Vec<PathBuf>,
    /// The adapter merged into its model too, as a model folder `merged/`; where the operator offers it
    #[arg(long)]
    pub merged: bool,
    /// Which service.
    #[command(flatten)]
    pub remote: RemoteArgs,
}
