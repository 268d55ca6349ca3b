//! The command line: every mode and option, with the help that `--help` shows.
//!
//! Parses only; knows no file and does nothing.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::name::Name;
use crate::settings::Setting;

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
    /// Run a component here and now: train an adapter
    Run(RunArgs),
    /// Say what a run needs and what is there
    Doctor,
}

/// Base models.
#[derive(Debug, Subcommand)]
pub enum ModelMode {
    /// Import a Hugging Face folder or a .gguf file
    Import {
        /// A folder with config.json and safetensors files, or a .gguf file
        path: PathBuf,
        /// The name to keep it under: letters, digits, - _ .
        #[arg(long)]
        name: Name,
        /// Leave the model's tokenizer out; only data of `tokens` works then
        #[arg(long)]
        no_tokenizer: bool,
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
        #[arg(long)]
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

/// One run.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The component, for example sft.wasm
    pub component: PathBuf,
    /// Name of the base model
    #[arg(long, value_name = "NAME")]
    pub model: Name,
    /// Name of the data set to train on
    #[arg(long, value_name = "NAME")]
    pub data: Name,
    /// What the job may evaluate on.
    #[command(flatten)]
    pub held_out: HeldOutArgs,
    /// A JSON file with the job's parameters
    #[arg(long, value_name = "FILE")]
    pub params: Option<PathBuf>,
    /// One parameter, over those of the file; the value is JSON, else a string. May be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub settings: Vec<Setting>,
    /// Seed of everything random in the job
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// CPU threads; results do not depend on it [default: all]
    #[arg(long)]
    pub threads: Option<std::num::NonZeroUsize>,
    /// A folder for the results; must not exist or be empty
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// At most one way to name a held-out part.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct HeldOutArgs {
    /// Name of a second data set to evaluate on
    #[arg(long, value_name = "NAME")]
    pub held_out: Option<Name>,
    /// Hold this part of the data out, above 0 and below 1; which rows does not depend on the seed
    #[arg(long, value_name = "F", value_parser = fraction)]
    pub held_out_fraction: Option<f64>,
    /// Hold so many rows of the data out
    #[arg(long, value_name = "N")]
    pub held_out_count: Option<std::num::NonZeroUsize>,
}

fn fraction(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value < 1.0 => Ok(value),
        _ => Err("expected a number above 0 and below 1".to_owned()),
    }
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
        assert_eq!((run.model.as_str(), run.data.as_str(), run.seed, run.settings.len()), ("m", "d", 7, 2));
        assert_eq!(run.held_out.held_out_fraction, Some(0.1));
        assert_eq!(cli.data_dir.unwrap().to_str(), Some("store"));
    }

    #[test]
    fn refusals_say_what_would_be_right() {
        assert!(refusal(&["--held-out-fraction", "1.5"]).contains("above 0 and below 1"));
        assert!(refusal(&["--held-out", "x", "--held-out-count", "3"]).contains("cannot be used with"));
        assert!(refusal(&["--set", "rank"]).contains("key=value"));
        assert!(refusal(&["--threads", "0"]).contains("--threads"));
        let bad_name = Cli::try_parse_from(["nodus-host", "model", "import", "x", "--name", "../evil"]).unwrap_err();
        assert!(bad_name.to_string().contains("letters, digits"), "{bad_name}");
        assert_eq!(bad_name.exit_code(), 2);
    }
}
