//! The folder of all journals: one folder a job.
//!
//! Never keeps that of a job that has ended.

use std::io;

use anyhow::Context as _;
use cap_std::fs::Dir;

/// In the data folder.
const FOLDER: &str = "journals";

/// The folder.
pub(crate) struct Shelf(Dir);

impl Shelf {
    /// Opens it, and makes it where it is not there.
    ///
    /// # Errors
    /// What the operating system says.
    pub(crate) fn open(data: &Dir) -> anyhow::Result<Self> {
        data.create_dir_all(FOLDER).and_then(|()| data.open_dir(FOLDER)).map(Self).context("opening the journals")
    }

    /// The folder of a job.
    ///
    /// # Errors
    /// What the operating system says.
    pub(crate) fn of(&self, job: &str) -> anyhow::Result<Dir> {
        self.0.create_dir_all(job).and_then(|()| self.0.open_dir(job)).context("opening a job's journal")
    }

    /// The job has ended.
    pub(crate) fn remove(&self, job: &str) {
        match self.0.remove_dir_all(job) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(job, "the journal of a job that ended could not be removed: {error}");
            }
            _ => {}
        }
    }

    /// Removes those of all other jobs.
    ///
    /// # Errors
    /// What the operating system says.
    pub(crate) fn sweep(&self, is_wanted: impl Fn(&str) -> bool) -> anyhow::Result<()> {
        for entry in self.0.entries().context("listing the journals")? {
            let name = entry.context("listing the journals")?.file_name();
            let name = name.to_string_lossy();
            if !is_wanted(&name) {
                self.remove(&name);
            }
        }
        Ok(())
    }
}
