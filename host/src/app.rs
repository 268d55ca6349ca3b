//! The program, told once: one match that names every mode.
//!
//! Takes its authority and its environment from `main`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::books::Books;
use crate::cli::{AuditMode, Cli, DataMode, Mode, ModelMode};
use crate::client::ServiceEnv;
use crate::cuda::DeviceEnv;
use crate::error::{Ending, user};
use crate::import::RANDOM;
use crate::paths::{Paths, shown};
use crate::random::Recipe;
use crate::store::Store;
use crate::text::bytes;
use crate::{audit, bench, client, doctor, engine, guest, import, run, serve, tenants};

/// What `main` knows of where the program runs.
#[derive(Clone)]
pub struct Surroundings {
    /// The right to open what the user names.
    pub paths: Paths,
    /// The data folder where `--data-dir` does not name one: `NODUS_DATA_DIR`, else the platform's usual place.
    pub data_dir: Option<PathBuf>,
    /// Whether standard error is a terminal.
    pub is_terminal: bool,
    /// What the environment says of devices.
    pub devices: DeviceEnv,
    /// What the environment says of the service that verbs talk to.
    pub service: ServiceEnv,
}

/// Does what the command line says; results go to `out`.
///
/// # Errors
/// See [`crate::error`]: the user's, or ours.
pub fn run(cli: &Cli, surroundings: &Surroundings, out: &mut dyn Write) -> anyhow::Result<Ending> {
    // Processes that this program starts itself have no data folder, and no environment to look for one in; others look at files alone.
    match &cli.mode {
        Mode::Guest(args) => return guest::serve_guests(args).map(|()| Ending::Done),
        Mode::Compile(args) => return guest::serve_compile(args, out).map(|()| Ending::Done),
        Mode::Engine => return engine::serve(surroundings).map(|()| Ending::Done),
        // The data folder is the service's.
        Mode::Client(mode) => return client::run(surroundings, mode, out),
        Mode::Openapi => return serve::openapi(out).map(|()| Ending::Done),
        // What looks at reports needs no data folder.
        Mode::Bench(mode) => {
            let data = || data_dir(cli, surroundings).and_then(|dir| Ok((open(surroundings.paths, dir, &cli.mode)?, dir)));
            return bench::run(surroundings, mode, data, out);
        }
        _ => {}
    }
    if let Mode::Audit(AuditMode::Job(args)) = &cli.mode
        && !args.replay
    {
        return client::audit(surroundings, args, out).map(|_| Ending::Done);
    }
    let data_dir = data_dir(cli, surroundings)?;
    let paths = surroundings.paths;
    if matches!(cli.mode, Mode::Doctor) {
        return doctor::report(surroundings, data_dir, out).map(|()| Ending::Done);
    }
    if let Mode::Audit(AuditMode::Verify(args)) = &cli.mode {
        // An auditor's machine need not be a host: nothing is made.
        return audit::verify(paths, data_dir, args, out);
    }
    if let Mode::Tenant(mode) = &cli.mode {
        return tenants::run(paths, data_dir, mode, out).map(|()| Ending::Done);
    }
    if let Mode::State(mode) = &cli.mode {
        return serve::state(paths, data_dir, mode, out).map(|()| Ending::Done);
    }
    let store = open(paths, data_dir, &cli.mode)?;
    if let Mode::Serve(args) = &cli.mode {
        return serve::serve(store, surroundings, data_dir, args, out);
    }
    let said = match &cli.mode {
        Mode::Model(ModelMode::Import { path, name, no_tokenizer, random, seed, dtype }) => {
            let model = match (path, random) {
                (Some(path), _) => import::model(&store, paths, path, name, *no_tokenizer)?,
                (None, Some(shape)) => import::random(&store, &Recipe::new(*shape, *seed, *dtype), name)?,
                (None, None) => return Err(user("give a folder or file to import, or --random SHAPE")),
            };
            let (summary, size) = (&model.summary, bytes(model.bytes));
            let text = if summary.tokenizer { "with a tokenizer" } else { "without a tokenizer: only data of `tokens` works" };
            vec![format!("model `{name}`: {}, {} parameters, {size}, {text}", summary.architecture, summary.parameters)]
        }
        Mode::Model(ModelMode::List) => list_models(&store)?,
        Mode::Model(ModelMode::Rm { name }) => {
            store.remove_model(name)?;
            vec![format!("removed model `{name}`")]
        }
        Mode::Data(DataMode::Put { file, name }) => {
            let data = import::dataset(&store, paths, file, name)?;
            vec![format!("data set `{name}`: {} rows of {}, {}", data.rows, data.form, bytes(data.bytes))]
        }
        Mode::Data(DataMode::List) => list_datasets(&store)?,
        Mode::Data(DataMode::Rm { name }) => {
            store.remove_dataset(name)?;
            vec![format!("removed data set `{name}`")]
        }
        Mode::Run(args) => return run::run(&store, surroundings, args, out),
        Mode::Audit(AuditMode::Replay(args)) => return audit::replay(&store, surroundings, args, out),
        Mode::Audit(AuditMode::Job(args)) => {
            let known = client::audit(surroundings, args, out)?;
            return audit::replay_fetched(&store, surroundings, (args, &known), out);
        }
        Mode::Audit(AuditMode::Ledger(args)) => return audit::ledger(&store, args, out),
        Mode::Audit(AuditMode::Verify(_)) | Mode::Doctor | Mode::Guest(_) | Mode::Compile(_) | Mode::Engine => Vec::new(),
        Mode::Serve(_) | Mode::Tenant(_) | Mode::State(_) | Mode::Client(_) | Mode::Openapi | Mode::Bench(_) => Vec::new(),
    };
    for line in said {
        writeln!(out, "{line}").context("writing to standard output")?;
    }
    Ok(Ending::Done)
}

/// The data folder's place: as the command line says, else as the environment does.
fn data_dir<'a>(cli: &'a Cli, surroundings: &'a Surroundings) -> anyhow::Result<&'a Path> {
    let chosen = cli.data_dir.as_deref().or(surroundings.data_dir.as_deref());
    chosen.ok_or_else(|| user("there is no place for data: give --data-dir, or set NODUS_DATA_DIR or HOME"))
}

/// The data folder, as far as a mode needs it: made by what brings something, changed by what runs, and otherwise only read.
fn open(paths: Paths, data_dir: &Path, mode: &Mode) -> anyhow::Result<Store> {
    let brings = matches!(mode, Mode::Model(ModelMode::Import { .. }) | Mode::Data(DataMode::Put { .. }) | Mode::Serve(_));
    let reads = matches!(mode, Mode::Model(ModelMode::List) | Mode::Data(DataMode::List) | Mode::Audit(AuditMode::Ledger(_)));
    if !brings && paths.entries(data_dir).is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        let how = "`nodus-host model import` and `data put` make it";
        return Err(user(format!(
            "there is no data folder {}: {how}; another one is chosen with --data-dir or NODUS_DATA_DIR",
            shown(data_dir)
        )));
    }
    if reads {
        return Store::open_to_read(paths.open_dir(data_dir)?).map_err(|error| user(format!("{}: {error}", shown(data_dir))));
    }
    let dir = if brings { paths.create_dir_all(data_dir)? } else { paths.open_dir(data_dir)? };
    let store = Store::open(dir)?;
    Books::prepare(store.dir()?)?;
    Ok(store)
}

fn list_models(store: &Store) -> anyhow::Result<Vec<String>> {
    let line = |(name, model): (_, crate::store::ModelManifest)| {
        let (summary, size) = (model.summary, bytes(model.bytes));
        let text = match (summary.tokenizer, summary.source == RANDOM) {
            (true, _) => "",
            (false, false) => ", no tokenizer",
            (false, true) => ", random weights, no tokenizer",
        };
        format!("{name}  {}, {} parameters, {size}{text}, {}", summary.architecture, summary.parameters, summary.digest)
    };
    Ok(store.models()?.into_iter().map(line).collect())
}

fn list_datasets(store: &Store) -> anyhow::Result<Vec<String>> {
    let line = |(name, data): (_, crate::store::DatasetManifest)| {
        format!("{name}  {} rows of {}, {}, {}", data.rows, data.form, bytes(data.bytes), data.digest)
    };
    Ok(store.datasets()?.into_iter().map(line).collect())
}
