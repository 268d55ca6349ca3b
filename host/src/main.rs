//! nodus-host: reads arguments and environment, hands authority over, maps errors to exit codes.
//!
//! Does nothing else; the program is `app::run`.
#![expect(clippy::disallowed_methods, reason = "main is where the environment is read")]

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser as _;
use nodus_host::app::{self, Surroundings};
use nodus_host::cli::Cli;
use nodus_host::client::ServiceEnv;
use nodus_host::cuda::DeviceEnv;
use nodus_host::error::{exit_code, is_reader_gone};
use nodus_host::paths::Paths;
use nodus_host::telemetry;
use nodus_host::text::escape_lines;
use tracing_subscriber::EnvFilter;

/// Characters of an error message that are shown.
const ERROR_CHARS_MAX: usize = 4000;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // What is wrong with a certificate is said by the verb that meets it.
    let filter = EnvFilter::try_from_env("NODUS_LOG").unwrap_or_else(|_| EnvFilter::new("warn,rustls_platform_verifier=off"));
    let is_terminal = io::stderr().is_terminal();
    telemetry::begin(filter, is_terminal);
    let (paths, devices) = (Paths::new(cap_std::ambient_authority()), device_env());
    let surroundings = Surroundings { paths, data_dir: data_dir(), is_terminal, devices, service: service_env() };
    match app::run(&cli, &surroundings, &mut io::stdout().lock()) {
        Ok(ending) => ExitCode::from(ending.exit_code()),
        // `nodus-host ... | head`: whoever read our output has seen enough.
        Err(error) if is_reader_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let code = exit_code(&error);
            let text = if code == 2 { format!("error: {error}") } else { format!("error on our side: {error:#}") };
            // File names and what stands in files may hold anything, terminal escapes too.
            let text = escape_lines(&text, ERROR_CHARS_MAX);
            drop(writeln!(io::stderr(), "{text}"));
            ExitCode::from(code)
        }
    }
}

/// What is set, and not to nothing.
fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn device_env() -> DeviceEnv {
    let text = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());
    let local = variable("HOME").map(|home| home.join(".local"));
    DeviceEnv {
        device: text("NODUS_DEVICE"),
        libraries: text("NODUS_CUDA_LIBRARIES"),
        toolkits: ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect(),
        pythons: ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).chain(local).collect(),
    }
}

/// `NODUS_PROFILE`, else a file in the platform's usual place for settings (XDG base directories).
fn service_env() -> ServiceEnv {
    let text = |name: &str| variable(name).map(|value| value.to_string_lossy().into_owned());
    let xdg = variable("XDG_CONFIG_HOME").filter(|dir| dir.is_absolute());
    let usual = || xdg.or_else(|| variable("HOME").map(|home| home.join(".config"))).map(|dir| dir.join("nodus/profile.toml"));
    let (url, token, ca) = (text("NODUS_URL"), text("NODUS_TOKEN"), variable("NODUS_CA"));
    ServiceEnv { url, token, ca, profile: variable("NODUS_PROFILE").or_else(usual) }
}

/// `NODUS_DATA_DIR`, else the platform's usual place for a program's data (XDG base directories; Application Support on a Mac).
fn data_dir() -> Option<PathBuf> {
    let usual = || {
        if cfg!(target_os = "macos") {
            return variable("HOME").map(|home| home.join("Library/Application Support/nodus"));
        }
        let xdg = variable("XDG_DATA_HOME").filter(|dir| dir.is_absolute());
        xdg.or_else(|| variable("HOME").map(|home| home.join(".local/share"))).map(|dir| dir.join("nodus"))
    };
    variable("NODUS_DATA_DIR").or_else(usual)
}
