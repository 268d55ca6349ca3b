//! The folder of a run's results, made beside its final place and renamed into it.
//!
//! Never shows a half-written result, and deletes none: DIR is absent (or empty, or holds what there was of a run when it was cut off) until the
//! run has ended. `.NAME.partial` beside it is locked while its run lives; what a killed run left there is set aside by the next one, as
//! `.NAME.killed`.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use cap_std::fs::{Dir, File, OpenOptions};

use super::claim::{beside, claim, identity, put_aside, refuse_taken};
use super::keep::Place;
use crate::error::user;
use crate::paths::{Paths, cannot, shown};
use crate::store::sync_dir;

/// A run's results in the making. Dropping it without [`Output::publish`] removes them, and the folders that were made for it; what
/// could not be published, or was left by a fault of the host, stays.
pub(super) struct Output {
    path: PathBuf,
    parent: Dir,
    name: PathBuf,
    partial: OsString,
    /// Where the run keeps what lets it go on.
    journal: Place,
    dir: Dir,
    /// Whether the results are to stay where they were made.
    stays: AtomicBool,
    /// Whether they are in their place.
    is_published: AtomicBool,
    /// Folders above it that were made for it, from the top down.
    made: Vec<PathBuf>,
    paths: Paths,
    /// Locked as long as the run lives.
    _lock: std::fs::File,
}

impl Output {
    /// Begins a result folder for `path`, perhaps of a run that goes on with one that was interrupted there: the results that that one left stay where
    /// they are until there are others.
    ///
    /// # Errors
    /// The user's: something is there already, another run is making it, or it cannot be made; or there is nothing to go on with.
    pub(super) fn create(paths: Paths, path: &Path, resumes: bool) -> anyhow::Result<Self> {
        let made = paths.missing_above(path);
        let begin = || -> anyhow::Result<Self> {
            let (parent, name) = paths.parent(path)?;
            let journal = Place::new(parent.try_clone().context("opening the folder of the results")?, beside(&name, ".journal"));
            if resumes && !journal.is_taken() {
                let text = "there is no interrupted run to go on with: without --resume one begins";
                return Err(user(format!("--resume: into {} {text}", shown(path))));
            }
            if !(resumes && journal.has_published(&parent, &name)) {
                refuse_taken(&parent, &name, path)?;
            }
            let (partial, killed) = (beside(&name, ".partial"), beside(&name, ".killed"));
            let (dir, lock) = claim(&parent, &partial, &killed).map_err(|error| match error.kind() {
                io::ErrorKind::WouldBlock => user(format!("another run is writing to {}: choose another folder for --out", shown(path))),
                _ => cannot("create", path, &error),
            })?;
            let (stays, is_published, made) = (AtomicBool::new(false), AtomicBool::new(false), made.clone());
            Ok(Self { path: path.to_owned(), parent, name, partial, journal, dir, stays, is_published, made, paths, _lock: lock })
        };
        begin().inspect_err(|_| paths.remove_empty(&made))
    }

    /// Where the run keeps what lets it go on.
    pub(super) fn journal(&self) -> &Place {
        &self.journal
    }

    /// The whole folder in the making, as one job's.
    pub(super) fn folder(&self) -> anyhow::Result<Folder> {
        Ok(Folder { dir: self.dir.try_clone().context("opening the results' folder")?, path: self.path.clone() })
    }

    /// A new folder in it, for one job of several.
    pub(super) fn subfolder(&self, name: &str) -> anyhow::Result<Folder> {
        let make = || -> io::Result<Dir> {
            self.dir.create_dir(name)?;
            self.dir.open_dir(name)
        };
        Ok(Folder { dir: make().with_context(|| format!("creating {name} in {}", shown(&self.path)))?, path: self.path.join(name) })
    }

    /// Takes a job's folder away again.
    pub(super) fn remove_subfolder(&self, name: &str) -> anyhow::Result<()> {
        self.dir.remove_dir_all(name).with_context(|| format!("removing {name} in {}", shown(&self.path)))
    }

    /// Where it will be.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Where it is made, and stays where a fault of the host keeps it from its place.
    pub(super) fn partial_path(&self) -> PathBuf {
        self.path.with_file_name(&self.partial)
    }

    /// Leaves everything where it was made; words for where that is.
    pub(super) fn leave(&self) -> String {
        self.stays.store(true, Ordering::Relaxed);
        format!("{}: move it before the next run into {}", shown(&self.partial_path()), shown(&self.path))
    }

    /// Gives a job's folder a name that no result has.
    pub(super) fn set_aside(&self, name: &str) -> anyhow::Result<()> {
        self.dir.rename(name, &self.dir, unsigned_name(name)).with_context(|| format!("renaming {name} in {}", shown(&self.path)))
    }

    /// Puts all that is in it in its place, at once; what an interrupted run had left there is set aside.
    ///
    /// # Errors
    /// The user's where the place was taken meanwhile or cannot be replaced: the results stay where they were made, and the error says
    /// where that is.
    pub(super) fn publish(&self) -> anyhow::Result<()> {
        let publish = || -> anyhow::Result<()> {
            sync_dir(&self.dir)?;
            if self.journal.has_published(&self.parent, &self.name) {
                let now = put_aside(&self.parent, &self.name, &beside(&self.name, ".killed"))?;
                tracing::warn!("what there was of the run when it was cut off is now in {}", shown(Path::new(&now)));
            }
            refuse_taken(&self.parent, &self.name, &self.path)?;
            self.parent.rename(&self.partial, &self.parent, &self.name)?;
            self.is_published.store(true, Ordering::Relaxed);
            Ok(sync_dir(&self.parent)?)
        };
        publish().map_err(|error| {
            let place = self.leave();
            user(format!("{error}; the results are complete in {place}"))
        })
    }

    /// What tells the results from others that are in their place later; none where they were not put there.
    pub(super) fn published(&self) -> Option<String> {
        let found = self.is_published.load(Ordering::Relaxed).then(|| self.parent.symlink_metadata(&self.name).ok())?;
        found.as_ref().map(identity)
    }
}

/// The folder of one job's results.
#[derive(Debug)]
pub(crate) struct Folder {
    dir: Dir,
    path: PathBuf,
}

impl Folder {
    /// A folder that is not part of an [`Output`]; `path` is how messages name it.
    pub(crate) fn new(dir: Dir, path: PathBuf) -> Self {
        Self { dir, path }
    }

    /// The folder.
    pub(crate) fn dir(&self) -> &Dir {
        &self.dir
    }

    /// Where it will be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A new file in it.
    pub(crate) fn file(&self, name: &str) -> anyhow::Result<File> {
        self.dir
            .open_with(name, OpenOptions::new().write(true).create_new(true))
            .with_context(|| format!("creating {name} in {}", shown(&self.path)))
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.stays.load(Ordering::Relaxed) {
            return;
        }
        match self.parent.remove_dir_all(&self.partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => tracing::warn!(%error, "a temporary result folder stays behind"),
            _ => {}
        }
        self.paths.remove_empty(&self.made);
    }
}

/// What a job's folder is called where the host failed before it signed; no job's name begins with a dot.
pub(super) fn unsigned_name(name: &str) -> String {
    format!(".{name}.unsigned")
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::Output;
    use crate::error::exit_code;
    use crate::paths::Paths;

    fn root() -> (tempfile::TempDir, Paths) {
        (tempfile::tempdir().unwrap(), Paths::new(cap_std::ambient_authority()))
    }

    fn listing(root: &tempfile::TempDir) -> Vec<PathBuf> {
        let dir = cap_std::fs::Dir::open_ambient_dir(root.path(), cap_std::ambient_authority()).unwrap();
        let mut names: Vec<_> = dir.entries().unwrap().map(|e| PathBuf::from(e.unwrap().file_name())).collect();
        names.sort();
        names
    }

    #[test]
    fn results_appear_at_once_and_only_when_published() {
        let (root, paths) = root();
        let path = root.path().join("deep/out");
        let output = Output::create(paths, &path, false).unwrap();
        output.folder().unwrap().dir().write("losses.jsonl", "x").unwrap();
        output.subfolder("member").unwrap().file("log.txt").unwrap();
        output.subfolder("idle").unwrap();
        output.remove_subfolder("idle").unwrap();
        assert!(paths.open_dir(&path).is_err());
        output.publish().unwrap();
        drop(output);
        let published = paths.open_dir(&path).unwrap();
        assert_eq!(published.read_to_string("losses.jsonl").unwrap(), "x");
        assert!(published.is_file("member/log.txt") && !published.exists("idle"));
    }

    #[test]
    fn what_cannot_be_published_stays_and_is_named() {
        let (root, paths) = root();
        let path = root.path().join("out");
        let output = Output::create(paths, &path, false).unwrap();
        output.folder().unwrap().dir().write("losses.jsonl", "x").unwrap();
        paths.create_dir_all(&path).unwrap().write("theirs", "y").unwrap();
        let error = output.publish().unwrap_err();
        drop(output);
        assert!(error.to_string().contains(".out.partial") && exit_code(&error) == 2, "{error}");
        let made = paths.open_dir(&root.path().join(".out.partial")).unwrap();
        assert_eq!(made.read_to_string("losses.jsonl").unwrap(), "x");
    }

    #[test]
    fn an_unpublished_result_leaves_nothing_behind() {
        let (root, paths) = root();
        let output = Output::create(paths, &root.path().join("new/deep/out"), false).unwrap();
        output.subfolder("adapter").unwrap();
        drop(output);
        assert_eq!(listing(&root), Vec::<PathBuf>::new());
        let there = root.path().join("there");
        paths.create_dir_all(&there).unwrap();
        drop(Output::create(paths, &there.join("new/out"), false).unwrap());
        assert_eq!(listing(&root), [PathBuf::from("there")], "only what was made is removed");
        assert_eq!(paths.entries(&there).unwrap(), 0);
    }

    #[test]
    fn what_the_host_failed_at_is_left_and_set_aside() {
        let (root, paths) = root();
        let output = Output::create(paths, &root.path().join("out"), false).unwrap();
        output.subfolder("member").unwrap().file("log.txt").unwrap();
        output.set_aside("member").unwrap();
        output.leave();
        let made = output.partial_path();
        drop(output);
        assert!(paths.open_dir(&made).unwrap().is_file(".member.unsigned/log.txt"));
    }

    #[test]
    fn runs_that_start_at_once_never_take_one_folder_or_each_others() {
        let (root, paths) = root();
        for _ in 0..400 {
            let stale = paths.create_dir_all(&root.path().join(".out.partial")).unwrap();
            stale.write("half", "x").unwrap();
            drop(stale);
            let path = root.path().join("out");
            let start = std::sync::Barrier::new(8);
            let taken = std::thread::scope(|scope| {
                let run = || {
                    start.wait();
                    let output = Output::create(paths, &path, false);
                    start.wait();
                    match output {
                        Ok(output) => {
                            output.folder().unwrap().file("mine").unwrap();
                            assert!(paths.open_dir(&output.partial_path()).unwrap().is_file("mine"), "it was taken away");
                            true
                        }
                        Err(error) => {
                            assert!(error.to_string().contains("another run"), "{error}");
                            false
                        }
                    }
                };
                let threads = [(); 8].map(|()| scope.spawn(run));
                threads.into_iter().map(|thread| thread.join().unwrap()).filter(|taken| *taken).count()
            });
            assert_eq!(taken, 1);
        }
    }

    #[test]
    fn only_what_the_interrupted_run_put_there_makes_way_for_what_goes_on_with_it() {
        let (root, paths) = root();
        let path = root.path().join("out");
        let begun = Output::create(paths, &path, false).unwrap();
        begun.folder().unwrap().dir().write("part", "1").unwrap();
        assert_eq!(begun.published(), None);
        begun.publish().unwrap();
        let journal = paths.create_dir_all(&root.path().join(".out.journal")).unwrap();
        journal.write("run.json", "{}").unwrap();
        journal.write("published", begun.published().unwrap()).unwrap();
        drop(begun);
        // Given up, it has changed nothing.
        drop(Output::create(paths, &path, true).unwrap());
        assert_eq!(paths.open_dir(&path).unwrap().read_to_string("part").unwrap(), "1");
        paths.create_dir_all(&root.path().join(".out.killed")).unwrap();
        Output::create(paths, &path, true).unwrap().publish().unwrap();
        assert_eq!(paths.open_dir(&root.path().join(".out.killed-2")).unwrap().read_to_string("part").unwrap(), "1");
        paths.open_dir(&path).unwrap().write("theirs", "x").unwrap();
        let error = Output::create(paths, &path, true).err().unwrap();
        assert!(error.to_string().contains("exists and is not empty"), "{error}");
    }

    #[test]
    fn an_empty_folder_is_taken_a_full_one_or_a_file_refused() {
        let (root, paths) = root();
        let path = root.path().join("out");
        let dir = paths.create_dir_all(&path).unwrap();
        Output::create(paths, &path, false).unwrap().publish().unwrap();
        dir.write("theirs", "x").unwrap_err(); // the empty folder was replaced
        paths.open_dir(&path).unwrap().write("theirs", "x").unwrap();
        let full = Output::create(paths, &path, false).err().unwrap();
        assert!(full.to_string().contains("exists and is not empty"), "{full}");
        let file = Output::create(paths, &path.join("theirs"), false).err().unwrap();
        assert_eq!((exit_code(&full), exit_code(&file)), (2, 2));
    }

    #[test]
    fn two_runs_do_not_share_a_folder_and_a_dead_runs_is_set_aside() {
        let (root, paths) = root();
        let path = root.path().join("out");
        let living = Output::create(paths, &path, false).unwrap();
        let error = Output::create(paths, &path, false).err().unwrap();
        assert!(error.to_string().contains("another run"), "{error}");
        drop(living);
        let stale = paths.create_dir_all(&root.path().join(".out.partial")).unwrap();
        stale.write("half", "x").unwrap();
        drop(stale);
        for _ in 0..2 {
            // What the second finds holds nothing, and takes nothing's place.
            let output = Output::create(paths, &path, false).unwrap();
            assert!(!output.folder().unwrap().dir().exists("half"));
            output.folder().unwrap().file("losses.jsonl").unwrap();
            output.leave();
        }
        assert_eq!(paths.open_dir(&root.path().join(".out.killed")).unwrap().read_to_string("half").unwrap(), "x");
    }
}
