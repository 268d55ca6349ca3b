//! `bench`: the same jobs run in every way, each way's bits held against the dedicated one's, times in a table and in two files.
//!
//! Never prints a ratio of a row whose bits were not equal.

mod activity;
pub(crate) mod arm;
mod audit;
mod compare;
mod files;
mod fleet;
mod floor;
mod html;
mod ledger;
mod overview;
mod published;
mod receipts;
mod report;
mod table;
pub(crate) mod variant;
mod words;
mod work;
mod worker;

use std::io::{BufReader, Write};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;

use crate::app::Surroundings;
use crate::cli::{BenchArgs, BenchMode, Dtype};
use crate::cuda::{ALONE, lasting_name};
use crate::error::{Ending, user};
use crate::machine::unix_ms;
use crate::paths::{Paths, shown};
use crate::process::handover::take;
use crate::process::weights::Link;
use crate::random;
use crate::run::choice::{Chosen, choose};
use crate::run::inputs::{OpenModel, Weights};
use crate::store::Store;
use activity::Activity;
use arm::Arm;
use fleet::{Peer, Yard};
use ledger::Ledger;
use report::{Measurement, Report, Setting};
use variant::Variant;
use work::{Kind, Work};

/// Measures, or holds two measurements against each other. `data` opens the data folder, where one is needed.
///
/// # Errors
/// The user's: what is asked for cannot be done, bits differ, or B is slower than A. Ours: a process failed.
pub(crate) fn run<'a>(
    surroundings: &Surroundings,
    mode: &BenchMode,
    data: impl FnOnce() -> anyhow::Result<(Store, &'a Path)>,
    out: &mut dyn Write,
) -> anyhow::Result<Ending> {
    let asked = match mode {
        BenchMode::Sweep(args) => Asked { kind: Kind::Sweep, args, python: None, tolerance: None },
        BenchMode::Tenants(args) => Asked { kind: Kind::Tenants, args, python: None, tolerance: None },
        BenchMode::Peer { python, tenants, tolerance, args } => {
            let kind = if *tenants { Kind::Tenants } else { Kind::Sweep };
            Asked { kind, args, python: Some(python), tolerance: *tolerance }
        }
        BenchMode::Worker { device, keep, linked } => {
            let (store, _) = data()?;
            let weights = linked.then(linked_by_parent).transpose()?;
            worker::work((&store, surroundings, weights.as_ref()), (*device, keep), &mut BufReader::new(std::io::stdin()), out)?;
            return Ok(Ending::Done);
        }
        BenchMode::Audit { folder, device } => {
            let (store, data_dir) = data()?;
            return audit::audit((&store, surroundings), data_dir, (folder, *device), out);
        }
        BenchMode::Merge { reports, out: into } => return merge(surroundings.paths, reports, into, out),
        BenchMode::Compare { a, b, tolerance } => return compare(surroundings.paths, (a, b), *tolerance, out),
    };
    let (store, data_dir) = data()?;
    measure(&store, surroundings, data_dir, &asked, out)
}

/// Whom a worker shares weights with: what its parent sends before anything else.
fn linked_by_parent() -> anyhow::Result<Link> {
    let input = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let link = take(&input).context("a worker that is linked is started by its parent")?.pop();
    Ok(Link::new(link.context("no socket for weights came")?.into()))
}

/// A measurement as it was asked for.
struct Asked<'a> {
    kind: Kind,
    args: &'a BenchArgs,
    /// Where PyTorch is measured too.
    python: Option<&'a Path>,
    tolerance: Option<f64>,
}

impl Asked<'_> {
    /// The command, with all that decides what is measured.
    fn command(&self) -> String {
        let verb = match (self.python.is_some(), self.kind) {
            (true, Kind::Sweep) => "peer",
            (true, Kind::Tenants) => "peer --tenants",
            (false, Kind::Sweep) => "sweep",
            (false, Kind::Tenants) => "tenants",
        };
        let BenchArgs { model, layers, jobs, shape, labelled, batches, epochs, warmup, rank, seed, variant, foreground, .. } = self.args;
        let variant = if *variant == Variant::Base { String::new() } else { format!(" --variant {}", variant.name()) };
        let foreground = if *foreground { " --foreground" } else { "" };
        format!(
            "nodus-host bench {verb} --model {model} --layers {layers} --jobs {jobs} --shape {shape} --labelled {labelled} --batches {batches} \
             --epochs {epochs} --warmup {warmup} --rank {rank} --seed {seed}{variant}{foreground}"
        )
    }
}

fn measure(store: &Store, surroundings: &Surroundings, data_dir: &Path, asked: &Asked<'_>, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let Asked { kind, args, python, .. } = *asked;
    let paths = surroundings.paths;
    let model = OpenModel::open(store, &args.model)?;
    let chosen = choose(store, surroundings, (args.device.device, args.device.dtype), std::iter::once(&model))?;
    let card = chosen.card().map(lasting_name);
    let on_card = card.is_some();
    let work = work(kind, args, &model)?;
    let arms = arms(args, &work, python.is_some(), on_card)?;
    let folder = folder(paths, &args.out)?;
    let private = folder.join(".mps");
    let keep = folder.join("adapters");
    for made in [&private, &keep] {
        paths.create_dir_all(made)?;
    }
    let peer = python.map(|python| peer(store, data_dir, python, &model, &chosen)).transpose()?;
    let tolerance = asked.tolerance.unwrap_or(if chosen.dtype() == Dtype::Bf16 { 5e-2 } else { 1e-3 });
    let activity = card.as_deref().and_then(Activity::open);
    let yard = Yard { peer, activity, data_dir, keep: &keep, private: &private, device: args.device, variant: args.variant, card };
    let mut setting = setting(&work, args, &model, chosen.name())?;
    let peak = args.peak.map(|tera| tera * 1e12).or_else(|| floor::known_rate(&setting.device));
    let alone =
        args.foreground.then(|| yard.run_beside(Arm::Dedicated, &work, say)).transpose().context("running the foreground job alone")?;
    let mut rows = Vec::new();
    for arm in arms {
        let taken = yard.run(arm, &work, say).with_context(|| format!("running the arm `{}`", arm.name()))?;
        if let (true, Some(ready)) = (rows.is_empty(), taken.ready.first()) {
            setting.device_class.clone_from(&ready.class);
        }
        let mut ledger = Ledger { work: &work, setting: &setting, on_card, tolerance, model: &model.config, peak, rows };
        ledger.enter(arm, taken);
        if let Some(alone) = alone.as_ref().filter(|_| arm.is_at_once()) {
            let beside =
                yard.run_beside(arm, &work, say).with_context(|| format!("running the arm `{}` with a foreground job", arm.name()))?;
            ledger.enter_foreground(alone, &beside);
        }
        rows = ledger.rows;
    }
    let (version, command) = (env!("CARGO_PKG_VERSION").to_owned(), asked.command());
    let measured = Measurement { version, command, unix_ms: unix_ms(), work, setting, rows };
    let dir = paths.open_dir(&folder)?;
    dir.remove_dir_all(".mps").context("removing the MPS daemon's folder")?;
    tell(&table::lines(&measured), out)?;
    let failed: Vec<&str> = measured.rows.iter().filter(|row| !row.check.passed()).map(|row| row.arm.name()).collect();
    let failed = failed.join(", ");
    receipts::seal(&dir, &store.dir()?, &measured)?;
    files::write(&dir, &Report::of(vec![measured]))?;
    tell(&[format!("kept in {}: report.json, report.html, receipts/, adapters/", shown(&args.out))], out)?;
    if failed.is_empty() { Ok(Ending::Done) } else { Err(user(format!("bits differ from the dedicated arm's in: {failed}"))) }
}

fn tell(lines: &[String], out: &mut dyn Write) -> anyhow::Result<()> {
    lines.iter().try_for_each(|line| writeln!(out, "{line}")).context("writing to standard output")
}

fn say(text: &str) {
    drop(writeln!(std::io::stderr(), "{text}"));
}

fn work(kind: Kind, args: &BenchArgs, model: &OpenModel) -> anyhow::Result<Work> {
    let number = |number: usize| u32::try_from(number).map_err(|_| user(format!("{number} is too many")));
    let length = args.shape.length;
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a length")]
    let labelled = ((length as f64 * args.labelled).round() as usize).clamp(1, length);
    let work = Work {
        kind,
        model: args.model.to_string(),
        layers: args.layers.0.clone(),
        jobs: number(args.jobs.get())?,
        sequences: args.shape.sequences,
        length,
        labelled,
        batches: number(args.batches.get())?,
        epochs: number(args.epochs.get())?,
        warmup: args.warmup,
        rank: number(args.rank.get())?,
        seed: args.seed,
    };
    // What does not fit the model is said before any process starts.
    work.step(&model.config, 0, 0).map_err(|error| user(format!("{error}")))?;
    Ok(work)
}

/// The arms that are wanted, in their order; the dedicated one always.
fn arms(args: &BenchArgs, work: &Work, with_peers: bool, on_card: bool) -> anyhow::Result<Vec<Arm>> {
    let peers = Arm::PEERS.into_iter().filter(|_| with_peers);
    let wanted = |arm: &Arm| match args.arms.as_slice() {
        [] if with_peers => *arm == Arm::Dedicated || arm.peer().is_some() && (on_card || *arm == Arm::TorchEager),
        [] => work.epochs > 1 || !arm.keeps(),
        named => *arm == Arm::Dedicated || named.contains(arm),
    };
    let arms: Vec<Arm> = Arm::OURS.into_iter().chain(peers).filter(wanted).collect();
    if let Some(arm) = args.arms.iter().find(|arm| !arms.contains(arm)) {
        return Err(user(format!("the arm `{}` is PyTorch's: it is measured by `bench peer`", arm.name())));
    }
    if let Some(arm) = arms.iter().find(|arm| arm.needs_card() && !on_card) {
        return Err(user(format!("the arm `{}` needs a card", arm.name())));
    }
    if work.epochs == 1 && arms.iter().any(|arm| arm.keeps()) {
        return Err(user("an arm with a trunk cache has nothing to keep in one epoch: give --epochs 2 or more, or leave it out of --arms"));
    }
    Ok(arms)
}

/// What PyTorch is given: the model's folder, or the recipe that its weights follow from.
fn peer(store: &Store, data_dir: &Path, python: &Path, model: &OpenModel, chosen: &Chosen) -> anyhow::Result<Peer> {
    let probe = Command::new(python).args(["-c", "import torch, transformers, peft"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        let text = "cannot be started, or does not have torch, transformers and peft; another Python is given with --python";
        return Err(user(format!("{} {text}", shown(python))));
    }
    let (dir, _) = store.model(&model.name)?;
    let recipe = match &model.weights {
        Weights::Random { .. } => Some(serde_json::from_slice(&dir.read(random::FILE).context("reading the model's recipe")?)?),
        Weights::Mapped(_) => None,
    };
    let folder = recipe.is_none().then(|| data_dir.join("models").join(model.name.as_str()));
    Ok(Peer {
        python: python.to_owned(),
        device: chosen.card().map_or("cpu".to_owned(), |_| format!("cuda:{ALONE}")),
        dtype: chosen.dtype().to_string(),
        folder,
        recipe,
    })
}

/// The folder of the results, made.
fn folder(paths: Paths, path: &Path) -> anyhow::Result<PathBuf> {
    paths.create_dir_all(path)?;
    if paths.entries(path).with_context(|| format!("listing {}", shown(path)))? > 0 {
        return Err(user(format!("{} exists and is not empty: choose another folder for --out", shown(path))));
    }
    Ok(path.to_owned())
}

fn setting(work: &Work, args: &BenchArgs, model: &OpenModel, device: String) -> anyhow::Result<Setting> {
    let owners = if work.kind == Kind::Sweep { 1 } else { work.jobs };
    let jobs = || 0..work.jobs;
    Ok(Setting {
        title: work.title(),
        model_digest: model.digest,
        data_digests: (0..owners).map(|job| work.data_digest(&model.config, job)).collect::<Result<_, _>>()?,
        cohorts: if work.kind == Kind::Sweep { vec![jobs().collect()] } else { jobs().map(|job| vec![job]).collect() },
        learning_rates: jobs().map(|job| work.learning_rate(job)).collect(),
        ranks: jobs().map(|job| work.rank(job)).collect(),
        adapter_seeds: jobs().map(|job| work.adapter_seed(job)).collect(),
        unit: "a token position trained on by one job".to_owned(),
        units: work.positions(),
        warmup_units: work.warmup_positions(),
        price_per_hour: args.price,
        host: args.label.to_string(),
        device,
        device_class: std::collections::BTreeMap::new(),
        variant: args.variant,
    })
}

/// Holds measurement B against A.
///
/// # Errors
/// The user's: a file is no report, or B is slower.
fn compare(paths: Paths, (a, b): (&Path, &Path), tolerance: f64, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let changes = compare::compare(&files::read(paths, a)?, &files::read(paths, b)?, tolerance)?;
    tell(&compare::lines(&changes), out)?;
    let slower: Vec<&str> = changes.iter().filter(|change| change.is_regression).map(|change| change.arm.as_str()).collect();
    if slower.is_empty() { Ok(Ending::Done) } else { Err(user(format!("slower by more than {tolerance} %: {}", slower.join(", ")))) }
}

/// Puts measurements side by side in one report.
///
/// # Errors
/// The user's: a file is no report, or `into` is there.
fn merge(paths: Paths, reports: &[PathBuf], into: &Path, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let mut measurements: Vec<Measurement> = Vec::new();
    for path in reports {
        for measured in files::read(paths, path)?.measurements {
            if measurements.contains(&measured) {
                return Err(user(format!("{} holds a measurement that another report given here holds too", shown(path))));
            }
            measurements.push(measured);
        }
    }
    let count = measurements.len();
    files::write(&paths.open_dir(&folder(paths, into)?)?, &Report::of(measurements))?;
    tell(&[format!("{count} measurements in {}: report.json, report.html", shown(into))], out)?;
    Ok(Ending::Done)
}
