//! The command line: every mode and option, with the help that `--help` shows.
//!
//! Parses only; knows no file and does nothing.

mod audit;
mod bench;
mod client;
mod device;
mod floor;
mod guest;
mod run;
mod serve;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

pub use audit::{AuditJobArgs, AuditMode, LedgerArgs, ReplayArgs, VerifyArgs};
pub use bench::{BatchShape, BenchArgs, BenchMode, Layers};
pub use client::{
    CancelArgs, ClientMode, FetchArgs, JobsArgs, ListArgs, LogsArgs, MetricsArgs, RemoteArgs, RemoteLane, RmArgs, SubmitArgs, UploadArgs,
    WatchArgs,
};
pub use device::{DeviceArgs, DeviceChoice, DeviceChoiceError, Dtype};
pub use floor::FloorArgs;
pub(crate) use floor::parse_memory;
pub use guest::{CompileArgs, GuestArgs, SandboxArgs};
pub use run::{HeldOutArgs, Lane, RunArgs};
pub use serve::{Bound, ReadyMade, ServeArgs, StateMode, TenantMode};

use crate::name::Name;
use crate::random::Shape;

/// Many LoRA training jobs on one device, each result exactly what it would have been alone.
#[derive(Debug, Parser)]
#[command(name = "nodus-host", version, about, arg_required_else_help = true)]
pub struct Cli {
    /// Where models and data are kept [default: NODUS_DATA_DIR, else the platform's usual place, e.g. ~/.local/share/nodus]
    #[arg(long, global = true, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub mode: Mode,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Mode {
    /// Import, list and remove base models
    #[command(subcommand)]
    Model(ModelMode),
    /// Put, list and remove data sets
    #[command(subcommand)]
    Data(DataMode),
    /// Run a component here and now: train an adapter, the members of a sweep, or the jobs of a manifest
    Run(Box<RunArgs>),
    /// Check receipts, repeat runs, read the ledger
    #[command(subcommand)]
    Audit(AuditMode),
    /// Measure: the same jobs alone, in processes at once, and together in one engine, with every bit compared
    #[command(subcommand)]
    Bench(Box<BenchMode>),
    /// Serve many tenants: take jobs over HTTP, run them, keep their results
    Serve(Box<ServeArgs>),
    /// Add, list, bound and disable the service's tenants
    #[command(subcommand)]
    Tenant(TenantMode),
    /// Check the service's state, or clean it up
    #[command(subcommand)]
    State(StateMode),
    /// Verbs that talk to a service.
    #[command(flatten)]
    Client(ClientMode),
    /// Print the OpenAPI document of the service
    Openapi,
    /// Say what a run needs and what is there
    Doctor,
    /// Run strangers' components; started by this program itself
    #[command(hide = true)]
    Guest(GuestArgs),
    /// Hold a model on a device and train adapters on it; started by this program itself
    #[command(hide = true)]
    Engine,
    /// Compile a stranger's component; started by this program itself
    #[command(hide = true)]
    Compile(CompileArgs),
}

/// Base models.
#[derive(Debug, Subcommand)]
pub enum ModelMode {
    /// Import a Hugging Face folder or a .gguf file, or name random weights in the shape of a known model
    Import {
        /// A folder with config.json and safetensors files, or a .gguf file
        #[arg(required_unless_present = "random", conflicts_with = "random")]
        path: Option<PathBuf>,
        /// The name to keep it under: letters, digits, - _ .
        #[arg(long, allow_hyphen_values = true)]
        name: Name,
        /// Leave the model's tokenizer out; only data of `tokens` works then
        #[arg(long, conflicts_with = "random")]
        no_tokenizer: bool,
        /// A model of random weights in this shape, for benchmarks. A recipe is stored, and the device makes the weights at load; there is no tokenizer, so that only data of `tokens` works
        #[arg(long, value_enum, value_name = "SHAPE")]
        random: Option<Shape>,
        /// Seed of the random weights
        #[arg(long, default_value_t = 0, requires = "random")]
        seed: u64,
        /// Type of the random weights
        #[arg(long, value_enum, default_value_t = Dtype::Bf16, requires = "random")]
        dtype: Dtype,
    },
    /// List the models
    List,
    /// Remove a model
    Rm {
        /// Its name
        name: Name,
    },
}

/// Data sets.
#[derive(Debug, Subcommand)]
pub enum DataMode {
    /// Check a JSON Lines file and keep it
    ///
    /// Each line is one of {"text"}, {"prompt", "completion"}, {"messages"} or {"tokens", "weights"}.
    Put {
        /// A JSON Lines file
        file: PathBuf,
        /// The name to keep it under: letters, digits, - _ .
        #[arg(long, allow_hyphen_values = true)]
        name: Name,
    },
    /// List the data sets
    List,
    /// Remove a data set
    Rm {
        /// Its name
        name: Name,
    },
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::{Cli, Mode};

    const RUN: [&str; 9] = ["nodus-host", "run", "sft.wasm", "--model", "m", "--data", "d", "--out", "o"];

    fn refusal(extra: &[&str]) -> String {
        Cli::try_parse_from(RUN.iter().chain(extra)).unwrap_err().to_string()
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_run_is_parsed_whole() {
        let extra = ["--set", "rank=8", "--set", "targets=all-linear", "--held-out-fraction", "0.1", "--seed", "7", "--data-dir", "store"];
        let cli = Cli::try_parse_from(RUN.iter().chain(&extra)).unwrap();
        let Mode::Run(run) = cli.mode else { panic!("no run") };
        assert_eq!((run.model.unwrap().as_str(), run.data.unwrap().as_str(), run.seed, run.settings.len()), ("m", "d", 7, 2));
        assert_eq!(run.held_out.held_out_fraction, Some(0.1));
        assert_eq!(cli.data_dir.unwrap().to_str(), Some("store"));
    }

    #[test]
    fn a_manifest_stands_in_place_of_the_options_of_one_job() {
        let manifest = ["nodus-host", "run", "--manifest", "jobs.toml", "--out", "o"];
        assert!(Cli::try_parse_from(manifest).is_ok());
        for extra in
            [&["sft.wasm"][..], &["--model", "m"], &["--data", "d"], &["--set", "rank=8"], &["--sweep", "rank=4,8"], &["--seed", "1"]]
        {
            let error = Cli::try_parse_from(manifest.iter().chain(extra)).unwrap_err().to_string();
            assert!(error.contains("cannot be used with") && error.contains("--manifest"), "{extra:?}: {error}");
        }
        let error = Cli::try_parse_from(["nodus-host", "run", "--out", "o"]).unwrap_err().to_string();
        assert!(error.contains("COMPONENT") && error.contains("--model"), "{error}");
    }

    #[test]
    fn refusals_say_what_would_be_right() {
        assert!(refusal(&["--held-out-fraction", "1.5"]).contains("above 0 and below 1"));
        assert!(refusal(&["--held-out", "x", "--held-out-count", "3"]).contains("cannot be used with"));
        assert!(refusal(&["--set", "rank"]).contains("key=value"));
        assert!(refusal(&["--threads", "0"]).contains("--threads"));
        assert!(refusal(&["--device", "gpu"]).contains("expected cpu, cuda, cuda:N or auto"));
        assert!(refusal(&["--trunk-cache", "much"]).contains("512MiB"));
        assert!(refusal(&["--limit", "cpu-ms=much"]).contains("whole number"));
        assert!(refusal(&["--limit", "cpu=1"]).contains("cpu-ms"));
        assert!(refusal(&["--in-process", "--require-os-sandbox"]).contains("cannot be used with"));
        assert!(refusal(&["--sweep", "rank"]).contains("key=v1,v2"));
        assert!(refusal(&["--sweep", "rank=4,4"]).contains("rank"));
        for name in ["../evil", "-rf", "..", "--"] {
            let bad_name = Cli::try_parse_from(["nodus-host", "model", "import", "x", "--name", name]).unwrap_err();
            assert!(bad_name.to_string().contains("letters, digits"), "{bad_name}");
            assert_eq!(bad_name.exit_code(), 2);
        }
    }
}
