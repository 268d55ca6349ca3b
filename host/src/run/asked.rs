//! The jobs of a run as they were asked for: one, the members of a sweep, or those of a manifest.
//!
//! Opens no more than the files that hold parameters; what the jobs name is opened later.

use std::path::{Path, PathBuf};

use nodus_sandbox::Limits;
use serde_json::{Map, Value};

use crate::cli::{HeldOutArgs, RunArgs};
use crate::error::{exit_code, user};
use crate::limits::{Limit, over};
use crate::manifest::{self, Entry, MANIFEST_BYTES_MAX, Params};
use crate::name::Name;
use crate::paths::{Paths, shown};
use crate::settings::{INIT_ADAPTER, merge, sorted};
use crate::sweep::{Point, name_of, points};
use crate::text::escape;

/// One job as it was asked for.
pub(crate) struct Asked {
    /// Its folder within the results; none where it has the whole.
    pub(crate) name: Option<String>,
    /// The swept parameters.
    pub(crate) varied: Point,
    pub(crate) component: PathBuf,
    pub(crate) model: Name,
    pub(crate) data: Name,
    pub(crate) held_out: HeldOutArgs,
    pub(crate) parameters: Map<String, Value>,
    pub(crate) seed: u64,
    /// Those given; what is not given is planned or has its default.
    pub(crate) limits: Vec<Limit>,
    /// The members of a sweep have one; any other job has its own.
    pub(crate) cohort: u64,
}

/// The jobs, in order.
///
/// # Errors
/// The user's: what is wrong with the command line, the manifest or a file of parameters.
pub(crate) fn asked(paths: Paths, args: &RunArgs) -> anyhow::Result<Vec<Asked>> {
    match (&args.manifest, &args.component, &args.model, &args.data) {
        (Some(path), ..) => of_manifest(paths, path, &args.limits),
        (None, Some(component), Some(model), Some(data)) => of_sweep(paths, args, (component, model, data)),
        _ => Err(user("a run needs a component, --model and --data, or --manifest")),
    }
}

fn of_sweep(paths: Paths, args: &RunArgs, (component, model, data): (&Path, &Name, &Name)) -> anyhow::Result<Vec<Asked>> {
    for sweep in &args.sweeps {
        if args.settings.iter().any(|setting| setting.key() == sweep.key()) {
            return Err(user(format!("`{}` is both set and swept, expected one of the two", escape(sweep.key()))));
        }
    }
    let file = args.params.as_deref().map(|path| Ok::<_, anyhow::Error>((shown(path), text(paths, path, &args.limits)?))).transpose()?;
    let fixed = merge(file.as_ref().map(|(name, text)| (name.as_str(), text.as_str())), &args.settings)?;
    let member = |point: Point| {
        let mut parameters = fixed.clone();
        parameters.extend(point.clone());
        Asked {
            name: (!args.sweeps.is_empty()).then(|| name_of(&point)),
            varied: point,
            component: component.to_owned(),
            model: model.clone(),
            data: data.clone(),
            held_out: args.held_out.clone(),
            parameters: sorted(parameters),
            seed: args.seed,
            limits: args.limits.clone(),
            cohort: 0,
        }
    };
    Ok(points(&args.sweeps)?.into_iter().map(member).collect())
}

fn of_manifest(paths: Paths, path: &Path, limits: &[Limit]) -> anyhow::Result<Vec<Asked>> {
    let bytes = paths.read(path, MANIFEST_BYTES_MAX)?;
    let within = |error: anyhow::Error| if exit_code(&error) == 2 { user(format!("{}: {error}", shown(path))) } else { error };
    let text = String::from_utf8(bytes).map_err(|error| within(user(format!("not UTF-8: {error}"))))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let entries = manifest::parse(&text).map_err(within)?;
    entries.into_iter().zip(0..).map(|(entry, cohort)| of_entry(paths, (folder, limits), entry, cohort)).collect()
}

/// A job of a manifest; its paths are relative to the manifest's folder, and its limits go over those of all.
fn of_entry(paths: Paths, (folder, limits): (&Path, &[Limit]), mut entry: Entry, cohort: u64) -> anyhow::Result<Asked> {
    entry.limits.splice(..0, limits.iter().cloned());
    let mut parameters = match entry.params {
        Params::Here(parameters) => sorted(parameters),
        Params::File(path) => {
            let path = folder.join(path);
            merge(Some((&shown(&path), &text(paths, &path, &entry.limits)?)), &[])?
        }
    };
    if let Some(Value::String(path)) = parameters.get_mut(INIT_ADAPTER) {
        *path = folder.join(&*path).to_string_lossy().into_owned();
    }
    let Entry { name, component, model, data, held_out, seed, limits, .. } = entry;
    let (name, component) = (Some(name.to_string()), folder.join(component));
    Ok(Asked { name, varied: Point::new(), component, model, data, held_out, parameters, seed, limits, cohort })
}

/// A file of parameters, within the job's own limit.
fn text(paths: Paths, path: &Path, limits: &[Limit]) -> anyhow::Result<String> {
    let bytes = paths.read(path, over(Limits::DEFAULT, limits).parameter_bytes)?;
    String::from_utf8(bytes).map_err(|error| user(format!("{}: not UTF-8: {error}", shown(path))))
}
