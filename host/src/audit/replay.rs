//! `audit replay`: a finished job once more, alone, from its receipt; every loss bit and every adapter byte compared.
//!
//! Writes nothing into the run's folder and nothing into the host's books.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_receipts::envelope::{ENVELOPE_BYTES_MAX, EnvelopeError};
use nodus_receipts::{Envelope, KnownKeys};
use nodus_sandbox::{JobEnd, Limits, Outcome, Sandbox, SandboxOptions};
use serde_json::json;

use super::brought::{Brought, INPUTS};
use super::compare::{Difference, Equal, compare};
use super::recorded::{From, job, refuse_foreign};
use super::trust::trust;
use crate::app::Surroundings;
use crate::cli::{AuditJobArgs, DeviceArgs, DeviceChoice, Dtype, Lane, ReplayArgs};
use crate::error::{Ending, exit_code, user};
use crate::guest::{Terms, Workshop};
use crate::paths::{Paths, shown};
use crate::receipt::{FILE, Statement};
use crate::run::Folder;
use crate::run::choice::{asked, choose};
use crate::run::course::Ended;
use crate::run::crew::{Crew, Post};
use crate::run::device::{Class, Rig};
use crate::run::display::Display;
use crate::run::record::Figures;
use crate::run::stop::Stopper;
use crate::store::Store;
use crate::text::{bytes, count, one_line};

/// Most of a guest's message that is shown.
const MESSAGE_CHARS_MAX: usize = 500;

/// Runs a job again and says whether it is bit-identical.
///
/// # Errors
/// The user's: the receipt is not to be trusted, an input is missing, the device class is another, or the first difference.
pub(crate) fn replay(store: &Store, surroundings: &Surroundings, args: &ReplayArgs, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let data_dir = PathBuf::from("the data folder");
    let known = if args.keys.is_empty() { own(store)? } else { trust(surroundings.paths, &data_dir, &args.keys, None)?.known };
    again((store, None), surroundings, (args, &known), (false, out))
}

/// The same of a job that was fetched from a service with its inputs, and whose receipt one of these keys is to have signed.
///
/// # Errors
/// As [`replay`].
pub(crate) fn replay_fetched(
    store: &Store,
    surroundings: &Surroundings,
    (args, known): (&AuditJobArgs, &KnownKeys),
    out: &mut dyn Write,
) -> anyhow::Result<Ending> {
    let paths = surroundings.paths;
    let component = args.component.as_deref().map(|path| paths.read(path, Limits::DEFAULT.component_bytes)).transpose()?;
    let brought = Brought { inputs: paths.open_dir(&args.out.join(INPUTS))?, component };
    let AuditJobArgs { out: path, device, threads, sandbox, .. } = args;
    let as_json = args.remote.json;
    let args = ReplayArgs { path: path.clone(), keys: Vec::new(), device: *device, threads: *threads, sandbox: *sandbox };
    again((store, Some(&brought)), surroundings, (&args, known), (as_json, out))
}

fn again(
    from: From<'_>,
    surroundings: &Surroundings,
    (args, known): (&ReplayArgs, &KnownKeys),
    out: (bool, &mut dyn Write),
) -> anyhow::Result<Ending> {
    let (store, _) = from;
    let (paths, stopper) = (surroundings.paths, Stopper::listen()?);
    let recorded = paths.open_dir(&args.path)?;
    let statement = signed(paths, args, known)?;
    refuse_foreign(&statement.predicate)?;
    let class = &statement.predicate.device_class;
    let chosen = choose(store, surroundings, recorded_device(class, asked(args.device, surroundings)?), std::iter::empty())
        .map_err(|error| elsewhere(class, error))?;
    let sandbox = Arc::new(Sandbox::new(SandboxOptions { upload: statement.predicate.limits })?);
    let terms = Terms::from(args.sandbox);
    let workshop = Workshop::open(store, &sandbox, terms)?;
    let job = Arc::new(job(from, &workshop, &statement.predicate)?);
    let stop_at = job.stop_at;

    let workspace = store.workspace()?;
    let copy = workspace.dir().try_clone().context("opening the replay's folder")?;
    let post = Post { job, folder: Arc::new(Folder::new(copy, PathBuf::from("the replay"))) };
    let device_args = DeviceArgs { threads: args.threads, ..DeviceArgs::default() };
    let rig = Rig { chosen: &chosen, args: device_args, buffer_bytes_max: u64::MAX, expected: Some(class), weights: None };
    let crew = Crew::start(sandbox, terms, (Display::new(surroundings.is_terminal, 1), stopper, None), 1, rig)?;
    let (mut fared, _) = crew.run(&[post], Lane::Solo, 1, rig);
    let fared = fared.pop().context("the replay did not run")?;
    fared.engine.context("the engine failed during the replay")?;
    let Some(figures) = finished(fared.ended?, stop_at)? else { return Ok(Ending::Interrupted) };
    tell(&recorded, &statement, workspace.dir(), &figures, out)
}

/// The device to replay on, and the type to compute in: as the receipt's class has them, unless the user names another device.
fn recorded_device(class: &Class, asked: DeviceChoice) -> (Option<DeviceChoice>, Option<Dtype>) {
    let is = |key: &str, value: &str| class.get(key).is_some_and(|found| found == value);
    let device = match asked {
        DeviceChoice::Auto if is("backend", "cuda") => DeviceChoice::Cuda(0),
        DeviceChoice::Auto => DeviceChoice::Cpu,
        named => named,
    };
    let dtype = if is("precision", "bf16") { Dtype::Bf16 } else { Dtype::F32 };
    (Some(device), matches!(device, DeviceChoice::Cuda(_)).then_some(dtype))
}

/// The receipt's device cannot be had here.
fn elsewhere(class: &Class, error: anyhow::Error) -> anyhow::Error {
    if exit_code(&error) != 2 {
        return error;
    }
    let name = |key: &str| class.get(key).map_or_else(String::new, |value| one_line(value, MESSAGE_CHARS_MAX));
    user(format!("the job ran on {} {}: {error}", name("backend"), name(if class.contains_key("gpu") { "gpu" } else { "cpu" })))
}

fn own(store: &Store) -> anyhow::Result<KnownKeys> {
    crate::books::own_key(&store.dir()?)?.context("the data folder has no key")
}

/// The receipt's statement, whose signature holds.
fn signed(paths: Paths, args: &ReplayArgs, known: &KnownKeys) -> anyhow::Result<Statement> {
    let path = args.path.join(FILE);
    if !paths.open_dir(&args.path)?.exists(FILE) {
        return Err(user(format!("{} holds no {FILE}: give the folder of one job", shown(&args.path))));
    }
    let refuse = |error: &dyn std::fmt::Display| user(format!("{}: {error}", shown(&path)));
    let envelope = Envelope::parse(&paths.read(&path, ENVELOPE_BYTES_MAX as u64)?).map_err(|error| refuse(&error))?;
    envelope.verify(known).map_err(|error| match error {
        EnvelopeError::UnknownKey { .. } => refuse(&format!("{error}; give the public key of the host that signed it with --key")),
        _ => refuse(&error),
    })?;
    nodus_receipts::statement::Statement::parse(envelope.payload()).map_err(|error| refuse(&error))?;
    serde_json::from_slice(envelope.payload()).map_err(|error| refuse(&format!("not a receipt that this version can replay: {error}")))
}

/// The figures of a replay that ended as the recorded run did, which learnt at the call `stop_at` that it was to stop; none where the
/// replay was interrupted.
fn finished(ended: Option<Ended>, stop_at: Option<u64>) -> anyhow::Result<Option<Figures>> {
    match ended {
        None => Ok(None),
        Some(ended) if ended.stopped_at().is_some_and(|call| stop_at.is_none_or(|recorded| call < recorded)) => Ok(None),
        Some(Ended { end: Some(JobEnd { outcome: Outcome::Completed, .. }), figures, .. }) => Ok(Some(figures)),
        Some(Ended { end: Some(JobEnd { outcome: Outcome::Failed(failure), .. }), figures, .. }) => {
            let (steps, why) = (count(figures.steps, "step"), one_line(&failure.to_string(), MESSAGE_CHARS_MAX));
            Err(user(format!("not bit-identical: the job completed, the replay failed after {steps}: {why}")))
        }
        Some(Ended { end: None, .. }) => Ok(None),
    }
}

fn tell(
    recorded: &Dir,
    statement: &Statement,
    replayed: &Dir,
    figures: &Figures,
    (as_json, out): (bool, &mut dyn Write),
) -> anyhow::Result<Ending> {
    match compare(recorded, statement, replayed, figures).context("reading the replay's files")? {
        Ok(Equal { losses, held_out, files, bytes: total }) => {
            if as_json {
                let told = json!({ "replay": "bit-identical", "losses": losses, "evaluations": held_out, "files": files, "bytes": total });
                writeln!(out, "{told}").context("writing to standard output")?;
                return Ok(Ending::Done);
            }
            let (losses, evaluations) = (count(losses, "loss").replace("losss", "losses"), count(held_out, "evaluation"));
            let text = format!("bit-identical: {losses}, {evaluations}, {} of {}", count(files, "file"), bytes(total));
            writeln!(out, "{text}").context("writing to standard output")?;
            Ok(Ending::Done)
        }
        Err(Difference { what, expected, got }) => Err(user(format!("not bit-identical: {what}: expected {expected}, got {got}"))),
    }
}
