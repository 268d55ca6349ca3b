//! What a run keeps of itself until it has ended, so that it can go on where it is interrupted: who its jobs are, and a journal of each.
//!
//! Never goes on with other jobs than those that began, leaves nothing of a run that has ended, and deletes nothing of one that was interrupted: a run
//! that begins anew sets it aside, as `.NAME.journal.killed`.
//!
//! ```text
//! .NAME.journal/   beside the place of the results
//!   run.json       the version of this program, what the ledger knows the run by, and of each job all that decides its results
//!   journals/N/    the journal of the so-manieth job
//!   stop-N         of one that was asked to stop: how many calls it had made by then
//!   published      what there was of the run when it was cut off is in NAME, if this is what tells that folder from others
//! ```

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::JobSlot;
use nodus_sandbox::services::Trunk;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::claim::{identity, put_aside};
use super::device::Class;
use super::inputs::Job;
use super::rows::Rows;
use crate::books::{Account, Again, Books, fresh_run};
use crate::error::user;
use crate::journal::{self, BegunElsewhere, Scribe, Shelf, Space, Terms};
use crate::paths::shown;
use crate::store::{sync_dir, write_synced};
use crate::text::{count, escape, one_line};

/// Of what stands in `run.json`.
const VERSION: u32 = 2;
const RUN: &str = "run.json";
const NEW: &str = "new";
const PUBLISHED: &str = "published";
/// Whose journals they are: all of one.
const OWNER: u128 = 0;
/// Characters of a value that an error shows.
const SHOWN_CHARS_MAX: usize = 120;

/// Where a run keeps it.
#[derive(Debug)]
pub(super) struct Place {
    parent: Dir,
    name: OsString,
}

impl Place {
    pub(super) fn new(parent: Dir, name: OsString) -> Self {
        Self { parent, name }
    }

    /// Whether a run was interrupted here.
    pub(super) fn is_taken(&self) -> bool {
        self.parent.exists(self.dir().join(RUN))
    }

    /// Whether what is there under the name of the results is what there was of it.
    pub(super) fn has_published(&self, parent: &Dir, name: &Path) -> bool {
        let noted = self.parent.read_to_string(self.dir().join(PUBLISHED));
        noted.is_ok_and(|noted| parent.symlink_metadata(name).is_ok_and(|found| identity(&found) == noted))
    }

    /// Keeps the run under another name; which one.
    fn put_aside(&self) -> anyhow::Result<OsString> {
        let mut name = self.name.clone();
        name.push(".killed");
        put_aside(&self.parent, self.dir(), &name).context("setting aside what an interrupted run had kept")
    }

    /// The receipts of a run that nobody goes on with need not be known any more. Another version's run may not say which those are.
    fn settle(&self, books: &Books) -> anyhow::Result<()> {
        let began = self.parent.read(self.dir().join(RUN)).context("reading what an interrupted run kept")?;
        let Ok(Began { account, jobs, .. }) = serde_json::from_slice(&began) else { return Ok(()) };
        (0..jobs.len()).try_for_each(|number| books.settle(&Account::local(&account, number, Again::Resumed(false)).job))
    }

    /// Forgets the run.
    fn clear(&self) -> anyhow::Result<()> {
        match self.parent.remove_dir_all(&self.name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).context("removing what an interrupted run had kept"),
            _ => Ok(()),
        }
    }

    fn dir(&self) -> &Path {
        Path::new(&self.name)
    }

    fn again(&self) -> anyhow::Result<Self> {
        let parent = self.parent.try_clone().context("opening the folder of a run's journals")?;
        Ok(Self { parent, name: self.name.clone() })
    }
}

/// What is looked at before all else: another version's may look otherwise.
#[derive(Deserialize)]
struct Version {
    version: String,
}

/// A run's jobs, as they were when it began.
#[derive(Serialize, Deserialize)]
struct Began {
    version: String,
    /// Whoever goes on with it enters its jobs under the same names, so that what was entered is not entered again.
    account: String,
    jobs: Vec<Map<String, Value>>,
}

/// What a run keeps of itself.
pub(crate) struct Keep {
    place: Place,
    dir: Dir,
    shelf: Shelf,
    /// How long a job works between two snapshots of it.
    every: Duration,
    /// What the ledger knows the run by.
    account: String,
    /// Whether it goes on.
    is_resumed: bool,
}

impl Keep {
    /// Of a run that begins with these jobs. How long a job works between two snapshots of it, and how many bytes all journals may have. Nobody goes on
    /// with an interrupted one whose place it takes.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(super) fn begin(place: &Place, jobs: &[Arc<Job>], terms: (Duration, u64), books: &Books) -> anyhow::Result<Self> {
        if place.is_taken() {
            place.settle(books)?;
            let now = place.put_aside()?;
            tracing::warn!(
                "an earlier run into this folder was interrupted, and this one begins anew: what --resume would have gone on from is now in {}",
                shown(Path::new(&now))
            );
        }
        place.clear()?;
        place.parent.create_dir(&place.name).context("making the folder of a run's journals")?;
        let keep = Self::open(place, terms, (fresh_run(), false))?;
        let began = Began { version: version(), account: keep.account.clone(), jobs: jobs.iter().map(|job| described(job)).collect() };
        write_synced(&keep.dir, NEW, &serde_json::to_vec(&began)?)?;
        // Seen whole, or not at all.
        let seen = keep.dir.rename(NEW, &keep.dir, RUN).and_then(|()| sync_dir(&keep.dir)).and_then(|()| sync_dir(&keep.place.parent));
        seen.context("making the folder of a run's journals")?;
        Ok(keep)
    }

    /// Of a run that was interrupted: these are its jobs. One that had learnt that it is to stop goes on from before: what it did then is forgotten,
    /// and so is the receipt of that.
    ///
    /// # Errors
    /// The user's: they are not. Ours: what was kept is damaged.
    pub(super) fn go_on(place: &Place, jobs: &[Arc<Job>], terms: (Duration, u64), books: &Books) -> anyhow::Result<Self> {
        let began = place.parent.read(place.dir().join(RUN)).context("reading what the interrupted run kept")?;
        let damaged = "what the interrupted run kept is damaged";
        let Version { version: was } = serde_json::from_slice(&began).context(damaged)?;
        same("the version of nodus-host", &json!(was), &json!(version()))?;
        let began: Began = serde_json::from_slice(&began).context(damaged)?;
        let keep = Self::open(place, terms, (began.account, true))?;
        same("the number of jobs", &json!(began.jobs.len()), &json!(jobs.len()))?;
        for (slot, (was, job)) in (0..).map(JobSlot).zip(began.jobs.iter().zip(jobs)) {
            let name = job.name.as_deref().map_or_else(String::new, |name| format!("{}: ", escape(name)));
            for (what, is) in &described(job) {
                same(&format!("{name}{what}"), was.get(what).unwrap_or(&Value::Null), is)?;
            }
            keep.unstop(slot, books)?;
            // One without a journal begins anew, and may come to something else than it did: its stop could not be noted.
            if keep.shelf.identity(&slot.0.to_string()).is_none() {
                books.settle(&keep.account(slot.0 as usize).job)?;
            }
        }
        Ok(keep)
    }

    fn open(place: &Place, (every, bytes): (Duration, u64), (account, is_resumed): (String, bool)) -> anyhow::Result<Self> {
        let place = place.again()?;
        let dir = place.parent.open_dir(&place.name).context("opening the folder of a run's journals")?;
        let shelf = Shelf::open(&dir, Space::of_one(bytes))?;
        Ok(Self { place, dir, shelf, every, account, is_resumed })
    }

    /// What the ledger knows the so-manieth job by.
    pub(super) fn account(&self, number: usize) -> Account {
        Account::local(&self.account, number, Again::Resumed(self.is_resumed))
    }

    /// Stands between a job and its engine from now on; none where all that was kept was taken away. Blocks.
    ///
    /// # Errors
    /// The user's: the job began on another device class. Ours: the disk refuses.
    pub(crate) fn scribe(&self, slot: JobSlot, class: &Class, trunk: &Trunk, cohort: u64) -> anyhow::Result<Option<Scribe>> {
        let book = match self.shelf.book(&slot.0.to_string(), OWNER, journal::identity(class)?) {
            Err(error) => match error.downcast_ref::<BegunElsewhere>() {
                Some(elsewhere) => {
                    return Err(user(format!("--resume: {elsewhere}: go on with it there, or begin anew without --resume")));
                }
                None if !self.place.is_taken() => return Ok(None),
                None => return Err(error),
            },
            Ok(book) => book,
        };
        let terms = Terms { engine: trunk.engine.clone(), job: slot, trunk: trunk.slot, cohort: Some(cohort), every: self.every };
        Ok(Some(Scribe::start(terms, book)))
    }

    /// The job, which has made so many calls, is about to learn that it is to stop. Where that cannot be noted its journal is forgotten, since gone on
    /// with it would contradict what the job does now.
    pub(crate) fn note_stop(&self, slot: JobSlot, calls: u64) {
        if let Err(error) = write_synced(&self.dir, &stop_name(slot), calls.to_string().as_bytes()) {
            tracing::warn!(
                "a job's journal is not kept any more, its stop cannot be noted: interrupted, the job will begin anew: {error:#}"
            );
            self.shelf.remove(&slot.0.to_string());
        }
    }

    /// Forgets what a job did after it had learnt that it is to stop.
    fn unstop(&self, slot: JobSlot, books: &Books) -> anyhow::Result<()> {
        let calls = match self.dir.read_to_string(stop_name(slot)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.context("reading when a job was to stop")?,
        };
        // What a sudden end tore was not told.
        if let Ok(calls) = calls.parse() {
            self.shelf.cut(&slot.0.to_string(), calls)?;
        }
        books.settle(&self.account(slot.0 as usize).job)?;
        self.dir.remove_file(stop_name(slot)).context("going on with a job that was to stop")
    }

    /// The run was cut off, and has left what there was where results are, if that is told from other folders by this; whether it can go on.
    pub(super) fn leave(&self, published: Option<&str>) -> bool {
        let is_there = self.place.is_taken();
        if !is_there {
            tracing::warn!("what would let the run go on was taken away: it must be run anew");
        } else if let Some(Err(error)) = published.map(|published| self.note_published(published)) {
            tracing::warn!("before the run goes on, what is in the place of the results must be moved away: {error:#}");
        }
        is_there
    }

    /// Torn by a sudden end, it tells of no folder.
    fn note_published(&self, published: &str) -> anyhow::Result<()> {
        match self.dir.remove_file(PUBLISHED) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).context("forgetting what was published before"),
            _ => write_synced(&self.dir, PUBLISHED, published.as_bytes()),
        }
    }

    /// The run of so many jobs has ended.
    pub(super) fn end(&self, books: &Books, jobs: usize) {
        // Their receipts last: as long as the run can go on, they are needed to enter none twice.
        let settled = self.place.clear().and_then(|()| (0..jobs).try_for_each(|number| books.settle(&self.account(number).job)));
        if let Err(error) = settled {
            tracing::warn!("{error:#}");
        }
    }
}

fn stop_name(slot: JobSlot) -> String {
    format!("stop-{}", slot.0)
}

/// Of what is written here, and of what decides results beside the jobs.
fn version() -> String {
    format!("{} ({}, journals {}, runs {VERSION})", env!("CARGO_PKG_VERSION"), crate::receipt::CONTRACT, journal::VERSION)
}

/// All that decides a job's results, but for the device class, which its journal knows.
fn described(job: &Job) -> Map<String, Value> {
    let rows = |rows: &Rows| match rows.part_len() {
        None => json!(rows.digest().to_string()),
        Some(len) => json!(format!("{} of {}", count(len, "row"), rows.digest())),
    };
    let limits: Map<String, Value> = job.limits.entries().into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
    let all = [
        ("name", json!(job.name)),
        ("component", json!(job.component.digest().to_string())),
        ("model", json!(job.model.digest.to_string())),
        ("data", rows(&job.train)),
        ("held-out data", job.held_out.as_deref().map_or(Value::Null, rows)),
        ("parameter", Value::Object(job.parameters.clone())),
        ("seed", json!(job.seed)),
        ("limit", Value::Object(limits)),
        ("adapters to load", json!(job.adapters.iter().map(|(digest, _)| digest.to_string()).collect::<Vec<_>>())),
    ];
    all.into_iter().map(|(what, is)| (what.to_owned(), is)).collect()
}

/// The user's error where these are not the same; of objects it names what differs in them.
fn same(what: &str, was: &Value, is: &Value) -> anyhow::Result<()> {
    if was == is {
        return Ok(());
    }
    if let (Some(was), Some(is)) = (was.as_object(), is.as_object()) {
        let none = Value::Null;
        let keys = was.keys().chain(is.keys());
        let differs = keys.map(|key| (key, was.get(key).unwrap_or(&none), is.get(key).unwrap_or(&none))).find(|(_, was, is)| was != is);
        return differs.map_or(Ok(()), |(key, was, is)| same(&format!("{what} `{}`", escape(key)), was, is));
    }
    let shown = |value: &Value| match value {
        Value::Null => "not given".to_owned(),
        value => one_line(&value.to_string(), SHOWN_CHARS_MAX),
    };
    Err(user(format!(
        "--resume: {what} was {} when the run began, and is {} now: expected all to be as it was; without --resume it begins anew",
        shown(was),
        shown(is)
    )))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::same;

    #[test]
    fn what_changed_is_named_by_its_key_with_both_values() {
        let was = json!({ "rank": 8, "layers": { "last": 1 } });
        assert!(same("parameter", &was, &was.clone()).is_ok());
        let error = |is| same("parameter", &was, &is).unwrap_err().to_string();
        assert!(error(json!({ "rank": 4, "layers": { "last": 1 } })).contains("parameter `rank` was 8 when the run began, and is 4 now"));
        assert!(error(json!({ "rank": 8, "layers": { "last": 2 } })).contains("parameter `layers` `last` was 1"));
        assert!(error(json!({ "rank": 8 })).contains("parameter `layers` was {\"last\":1} when the run began, and is not given now"));
        assert!(error(json!({ "rank": 8, "layers": { "last": 1 }, "steps": 3 })).contains("`steps` was not given"));
    }
}
