//! The job: what it was submitted with, and what it tells its owner.
//!
//! Never knows where it runs, beside whom, or what time it is.

use serde::de::DeserializeOwned;

use crate::bindings::job::{self, Level, Limit};
use crate::{Dataset, Error, Result, Trunk, parse_params};

/// The job that this component runs.
#[derive(Debug)]
pub struct Job {
    _only_the_host_starts_jobs: (),
}

impl Job {
    /// The parameters, by serde. See [`parse_params`] for what is refused, and how.
    ///
    /// # Errors
    /// [`Error::User`] that names the parameter.
    pub fn params<P: DeserializeOwned>(&self) -> Result<P> {
        parse_params(&job::params())
    }

    /// The seed the job was submitted with.
    #[must_use]
    pub fn seed(&self) -> u64 {
        job::seed()
    }

    /// The model the job was submitted with.
    ///
    /// # Errors
    /// As [`Trunk::open`].
    pub fn trunk(&self) -> Result<Trunk> {
        Trunk::open("model")
    }

    /// The data to train on, each example cut to `max_length` tokens (none: the trunk's context).
    ///
    /// # Errors
    /// As [`Dataset::open`].
    pub fn train_data(&self, trunk: &Trunk, max_length: impl Into<Option<u32>>) -> Result<Dataset> {
        Dataset::open("train", trunk, max_length)
    }

    /// The data to evaluate on, where the job has some.
    ///
    /// # Errors
    /// As [`Dataset::open`], but for `NotFound`.
    pub fn held_out(&self, trunk: &Trunk, max_length: impl Into<Option<u32>>) -> Result<Option<Dataset>> {
        match Dataset::open("held-out", trunk, max_length) {
            Ok(data) => Ok(Some(data)),
            Err(Error::NotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reports a number under a name, for a step. Not finite is allowed, and shown as such.
    pub fn metric(&self, name: &str, step: u64, value: impl Into<f64>) {
        job::metric(name, step, value.into());
    }

    /// How far the job is, in units of its own choice; a `total` of 0 means unknown.
    pub fn progress(&self, done: u64, total: u64) {
        job::progress(done, total);
    }

    /// Writes one line to the job's log.
    pub fn log(&self, level: Level, message: impl AsRef<str>) {
        job::log(level, message.as_ref());
    }

    /// A log line for whoever debugs the component.
    pub fn debug(&self, message: impl AsRef<str>) {
        self.log(Level::Debug, message);
    }

    /// A log line for the owner.
    pub fn info(&self, message: impl AsRef<str>) {
        self.log(Level::Info, message);
    }

    /// A log line about something the owner should look at.
    pub fn warn(&self, message: impl AsRef<str>) {
        self.log(Level::Warn, message);
    }

    /// A log line about something that went wrong.
    pub fn error(&self, message: impl AsRef<str>) {
        self.log(Level::Error, message);
    }

    /// Whether the job is asked to stop soon: it should save what it wants kept and return.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        job::should_stop()
    }

    /// Every limit of this job.
    #[must_use]
    pub fn limits(&self) -> Vec<Limit> {
        job::limits()
    }

    /// One limit by its name, for example `batch-tokens`, in the unit that its name ends with.
    #[must_use]
    pub fn limit(&self, name: &str) -> Option<u64> {
        self.limits().into_iter().find(|limit| limit.name == name).map(|limit| limit.value)
    }
}

/// A function that [`job!`](crate::job!) can run: from a [`Job`], or from a [`Job`] and typed parameters, to a result.
pub trait Train<Arguments> {
    /// Runs it; the text of an error is shown to the job's owner.
    ///
    /// # Errors
    /// The function's own, or the parameters'.
    fn run(self, job: Job) -> Result<(), String>;
}

impl<F, E> Train<(Job,)> for F
where
    F: FnOnce(Job) -> Result<(), E>,
    E: ToString,
{
    fn run(self, job: Job) -> Result<(), String> {
        self(job).map_err(|error| error.to_string())
    }
}

impl<F, P, E> Train<(Job, P)> for F
where
    F: FnOnce(Job, P) -> Result<(), E>,
    P: DeserializeOwned,
    E: ToString,
{
    fn run(self, job: Job) -> Result<(), String> {
        let params = job.params().map_err(|error| error.to_string())?;
        self(job, params).map_err(|error| error.to_string())
    }
}

/// What the exported `run` does; [`job!`](crate::job!) calls it.
#[doc(hidden)]
pub fn run<Arguments>(train: impl Train<Arguments>) -> Result<(), String> {
    train.run(Job { _only_the_host_starts_jobs: () })
}
