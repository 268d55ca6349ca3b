//! `bench audit`: every job of a measurement run again, alone, in a process of its own, and held against the receipts of all arms.
//!
//! Calls nothing audited but what was replayed here bit for bit from a receipt whose signature holds.

use std::io::Write;
use std::path::Path;

use anyhow::Context as _;

use super::arm::Arm;
use super::fleet::Yard;
use super::receipts::{self, Predicate};
use super::report::{Check, Measurement};
use super::words::JobDone;
use super::{files, say, tell};
use crate::app::Surroundings;
use crate::cli::DeviceArgs;
use crate::cuda::lasting_name;
use crate::error::{Ending, user};
use crate::name::Name;
use crate::paths::shown;
use crate::run::choice::choose;
use crate::run::inputs::OpenModel;
use crate::store::Store;

/// What a row says of its audit once every job of its receipt was replayed.
const AUDITED: &str = "audited: every job of its receipt replayed alone in another process, all bits equal";
const FAILED: &str = "AUDIT FAILED: the replay's bits differ";

/// Replays the measurement of a folder and writes down what was found.
///
/// # Errors
/// The user's: a receipt is missing or does not hold, the device is another, or bits differ. Ours: a process failed.
pub(super) fn audit(
    (store, surroundings): (&Store, &Surroundings),
    data_dir: &Path,
    (folder, device): (&Path, DeviceArgs),
    out: &mut dyn Write,
) -> anyhow::Result<Ending> {
    let paths = surroundings.paths;
    let dir = paths.open_dir(folder)?;
    let mut report = files::read(paths, &folder.join("report.json"))?;
    let [measured] = report.measurements.as_mut_slice() else {
        return Err(user(format!(
            "{} holds several measurements: each is audited in its own folder, before they are merged",
            shown(folder)
        )));
    };
    let known = crate::books::own_key(&store.dir()?)?.context("the data folder has no key")?;
    for row in measured.rows.iter().filter(|row| row.arm.peer().is_none()) {
        if receipts::open(&dir, &known, row.arm)? != Predicate::of(measured, row) {
            return Err(user(format!("the report's row `{}` is not what its receipt says", row.arm.name())));
        }
    }
    let jobs = replay((store, surroundings), data_dir, (folder, device), measured)?;
    let mut failed = Vec::new();
    for row in measured.rows.iter_mut().filter(|row| row.arm.peer().is_none()) {
        let check = Check::bits(&row.jobs, &jobs, true);
        row.audit = if check.passed() { AUDITED } else { FAILED }.to_owned();
        if !check.passed() {
            failed.push(row.arm.name());
            (row.ratio, row.cold_ratio, row.ratio_to_stock_mps) = (None, None, None);
            row.check = check;
        }
    }
    let lines: Vec<String> = measured.rows.iter().map(|row| format!("{}: {}", row.arm.name(), row.audit)).collect();
    files::write(&dir, &report)?;
    tell(&lines, out)?;
    if failed.is_empty() { Ok(Ending::Done) } else { Err(user(format!("not bit-identical in the replay: {}", failed.join(", ")))) }
}

/// Every job once more, alone, on the same class of device.
fn replay(
    (store, surroundings): (&Store, &Surroundings),
    data_dir: &Path,
    (folder, device): (&Path, DeviceArgs),
    measured: &Measurement,
) -> anyhow::Result<Vec<JobDone>> {
    let name: Name = measured.work.model.parse().map_err(|error| user(format!("{error}")))?;
    let model = OpenModel::open(store, &name)?;
    if model.digest != measured.setting.model_digest {
        return Err(user(format!("the model `{name}` is another than the one that was measured ({})", measured.setting.model_digest)));
    }
    let chosen = choose(store, surroundings, (device.device, device.dtype), std::iter::once(&model))?;
    let scratch = folder.join(".audit");
    surroundings.paths.create_dir_all(&scratch)?;
    let yard = Yard {
        data_dir,
        keep: &scratch,
        private: &scratch,
        device,
        variant: measured.setting.variant,
        card: chosen.card().map(lasting_name),
        peer: None,
        activity: None,
    };
    let taken = yard.run(Arm::Dedicated, &measured.work, say);
    surroundings.paths.open_dir(folder)?.remove_dir_all(".audit").context("removing the replay's adapters")?;
    let taken = taken.context("replaying the jobs")?;
    if taken.ready.iter().any(|ready| ready.class != measured.setting.device_class) {
        return Err(user("this device is of another class than the one that was measured: bits are promised within one class only"));
    }
    Ok(taken.done.into_iter().flat_map(|done| done.jobs).collect())
}
