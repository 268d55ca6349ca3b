//! The folder of all journals: one folder a job.
//!
//! Never keeps that of a job that has ended.

use std::io;
use std::sync::Arc;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_protocol::Digest;

use super::book::{self, Book};
use super::space::Space;

/// In the data folder.
const FOLDER: &str = "journals";

/// The folder.
pub(crate) struct Shelf {
    data: Dir,
    space: Arc<Space>,
}

impl Shelf {
    /// Opens it, and makes it where it is not there.
    ///
    /// # Errors
    /// What the operating system says.
    pub(crate) fn open(data: &Dir, space: Space) -> anyhow::Result<Self> {
        let shelf = Self { data: data.try_clone().context("opening the journals")?, space: Arc::new(space) };
        let dir = shelf.dir().context("opening the journals")?;
        for job in shelf.jobs()? {
            // One that cannot be measured is measured when its job goes on.
            let bytes = dir.open_dir(&job).and_then(|dir| bytes_of(&dir)).unwrap_or(0);
            shelf.space.found(&job, bytes);
        }
        Ok(shelf)
    }

    /// Made again where somebody took it away.
    fn dir(&self) -> io::Result<Dir> {
        self.data.create_dir_all(FOLDER)?;
        self.data.open_dir(FOLDER)
    }

    /// A job's journal, of the tenant of this number; see [`Book::open`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn book(&self, job: &str, tenant: u128, identity: Digest) -> anyhow::Result<Book> {
        let open = |all: Dir| all.create_dir_all(job).and_then(|()| all.open_dir(job));
        let dir = self.dir().and_then(open).context("opening a job's journal")?;
        Book::open(dir, identity, self.space.account(job, tenant))
    }

    /// What a job's journal is of; none where it has none.
    pub(crate) fn identity(&self, job: &str) -> Option<Digest> {
        book::identity_in(&self.dir().ok()?.open_dir(job).ok()?)
    }

    /// Forgets all but the first calls of a job, where it has a journal.
    ///
    /// # Errors
    /// What the operating system says; then it is done again.
    pub(crate) fn cut(&self, job: &str, calls: u64) -> anyhow::Result<()> {
        match self.dir().and_then(|all| all.open_dir(job)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            dir => dir.and_then(|dir| book::cut(&dir, calls)).context("cutting a job's journal"),
        }
    }

    /// The job has ended.
    pub(crate) fn remove(&self, job: &str) {
        self.space.gone(job);
        match self.dir().and_then(|all| all.remove_dir_all(job)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(job, "the journal of a job that ended could not be removed: {error}");
            }
            _ => {}
        }
    }

    /// Removes those of jobs that nobody will go on with. Each is asked for after its folder was seen: one that is made later is not touched.
    ///
    /// # Errors
    /// What the operating system says, or whoever is asked.
    pub(crate) fn sweep(&self, is_wanted: impl Fn(&str) -> anyhow::Result<bool>) -> anyhow::Result<()> {
        for job in self.jobs()? {
            if !is_wanted(&job)? {
                self.remove(&job);
            }
        }
        Ok(())
    }

    fn jobs(&self) -> anyhow::Result<Vec<String>> {
        let list = || -> io::Result<Vec<String>> {
            self.dir()?.entries()?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
        };
        list().context("listing the journals")
    }
}

/// Bytes of all files in a job's folder.
pub(super) fn bytes_of(dir: &Dir) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in dir.entries()? {
        bytes += entry?.metadata()?.len();
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::{Shelf, Space};

    /// A journal that is made while the folder is swept is of a job that began meanwhile: whoever is asked knows it only afterwards.
    #[test]
    fn a_sweep_asks_for_each_after_it_was_seen_and_touches_none_that_came_later() {
        let data = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let shelf = Shelf::open(&data, Space::new(1 << 20)).unwrap();
        let journals = data.open_dir("journals").unwrap();
        for job in ["ended", "runs"] {
            journals.create_dir(job).unwrap();
        }
        let asked = RefCell::new(Vec::new());
        let is_wanted = |job: &str| {
            asked.borrow_mut().push(job.to_owned());
            journals.create_dir_all("began").unwrap();
            Ok(job == "runs")
        };
        shelf.sweep(is_wanted).unwrap();
        asked.borrow_mut().sort();
        assert_eq!(*asked.borrow(), ["ended", "runs"]);
        assert!(!journals.exists("ended") && journals.exists("runs") && journals.exists("began"));
    }

    #[test]
    fn a_folder_that_was_taken_away_is_made_again_for_the_next_job() {
        let data = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let shelf = Shelf::open(&data, Space::new(1 << 20)).unwrap();
        data.remove_dir_all("journals").unwrap();
        assert!(shelf.book("job", 1, nodus_protocol::Digest::of(b"class")).unwrap().is_new);
        assert_eq!(shelf.identity("job"), Some(nodus_protocol::Digest::of(b"class")));
        shelf.remove("job");
        assert!(!data.exists("journals/job"));
    }
}
