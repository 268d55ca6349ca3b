//! What is kept of a job that ended, and at whose door a failure lies.
//!
//! A job that completed, or stopped on request, gets its adapters and a receipt. Any other keeps its records alone, and nothing
//! where it took no step and evaluated nothing.

use std::io;

use anyhow::Context as _;
use cap_std::fs::Dir;
use nodus_engine::JobBytes;
use nodus_receipts::ledger::BytesEvent;
use nodus_sandbox::{Failure, JobEnd, Outcome, Usage};

use super::certify::certify;
use super::claim::holds_anything;
use super::course::Ended;
use super::crew::{Fared, Post};
use super::record::{Figures, HELD_OUT, LOG, LOSSES, METRICS};
use crate::books::{Account, Again, Books};
use crate::error::{exit_code, refusal_code};
use crate::paths::shown;
use crate::store::Store;
use crate::text::{count, one_line};

/// How the ledger calls a failure of ours.
pub(crate) const INTERNAL: &str = "internal";
/// How it calls a job that was not started for what its user asked.
pub(crate) const REFUSED: &str = "refused";
/// How it calls a job that was cut off.
pub(crate) const CANCELLED: &str = "cancelled";
/// Most of a guest's message that is shown.
const MESSAGE_CHARS_MAX: usize = 2000;

/// How a job ended, as the user sees it.
#[derive(Debug)]
pub(crate) enum Status {
    /// It did what it was to do.
    Completed,
    /// It was asked to stop, and ended well.
    Stopped,
    /// It was cut off, or asked to stop and did not end well.
    Cancelled,
    /// It was not started, since the run was to stop.
    NotStarted,
    /// Its own fault, and which.
    Failed(String),
    /// Our fault.
    Broken(anyhow::Error),
}

/// What is kept in a job's folder.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Nothing,
    /// Records without an adapter.
    Records,
    /// What was written when the host failed: no result, since nothing was signed, and nothing is taken away.
    Left,
    /// Everything, and the folders of these adapters.
    All(Vec<String>),
}

/// What became of a job.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) status: Status,
    pub(crate) kept: Kept,
}

/// What a run signs and enters with.
pub(crate) struct Office<'a> {
    /// Where components are kept that receipts name; nowhere where the service's state has them, as long as it has their jobs.
    pub(crate) components: Option<&'a Store>,
    pub(crate) books: &'a mut Books,
    /// As the receipt writes it.
    pub(crate) lane: &'static str,
}

/// Enters what a job's adapters used, decides what is kept of it, and signs its receipt.
pub(crate) fn conclude(office: &mut Office<'_>, account: &Account, post: &Post, fared: &Fared) -> Verdict {
    let entered = enter(office.books, account, &fared.bytes);
    decide(office, account, post, entered.map(|()| fared))
}

/// The same of a job whose use is entered ([`enter`]), or why that failed. Where the disk refuses, it may be done again.
pub(crate) fn decide(office: &mut Office<'_>, account: &Account, post: &Post, fared: anyhow::Result<&Fared>) -> Verdict {
    let broken = |error| (Verdict { status: Status::Broken(error), kept: left(post.folder.dir()) }, Some(INTERNAL));
    let (verdict, failed) = fared.and_then(|fared| judge(office, account, post, fared)).unwrap_or_else(broken);
    // What the host failed and runs again has not failed yet.
    let failed = failed.filter(|_| account.again != Again::Attempt || !matches!(verdict.status, Status::Broken(_)));
    match failed.map(|code| office.books.fail(account, code)) {
        Some(Err(error)) if !matches!(verdict.status, Status::Broken(_)) => broken(error).0,
        // One failure of ours is told, the first.
        _ => verdict,
    }
}

/// What becomes of a job; where it gets no receipt, why, as the ledger has it.
fn judge(office: &mut Office<'_>, account: &Account, post: &Post, fared: &Fared) -> anyhow::Result<(Verdict, Option<&'static str>)> {
    let ended = match &fared.ended {
        Ok(Some(ended)) => ended,
        Ok(None) => return Ok((Verdict { status: Status::NotStarted, kept: Kept::Nothing }, None)),
        // Its engine or its process was not started, and that may be the user's to put right.
        Err(error) if exit_code(error) == 2 => {
            let code = refusal_code(error).unwrap_or(REFUSED);
            return Ok((Verdict { status: Status::Failed(error.to_string()), kept: Kept::Nothing }, Some(code)));
        }
        Err(error) => return Err(anyhow::anyhow!("{error:#}")),
    };
    match status(ended, fared) {
        Ok((status, usage)) => {
            let kept = certify(office, account, post, (ended, fared, usage))?;
            Ok((Verdict { status, kept: Kept::All(kept) }, None))
        }
        Err((Status::Broken(error), _)) => Err(error),
        Err((status, code)) => {
            let kept = keep_records(&ended.figures, post.folder.dir())?;
            Ok((Verdict { status, kept }, Some(code)))
        }
    }
}

/// What is kept of a job that the host failed: what it had written.
fn left(folder: &Dir) -> Kept {
    if holds_anything(folder) { Kept::Left } else { Kept::Nothing }
}

/// Enters the engine's own figures.
///
/// # Errors
/// Ours: the disk refuses.
pub(crate) fn enter(books: &mut Books, account: &Account, bytes: &JobBytes) -> anyhow::Result<()> {
    let events = bytes.adapters.iter().flat_map(|(adapter, bytes)| {
        let events = [
            (BytesEvent::Allocated, bytes.granted),
            (BytesEvent::Written, bytes.written),
            (BytesEvent::Exported, bytes.exported),
            (BytesEvent::Zeroed, bytes.zeroed),
        ];
        events.map(|(event, bytes)| (*adapter, event, bytes))
    });
    books.enter(account, events)
}

/// The status of a job that gets a receipt, with what it used; else of one that gets none, and why.
fn status(ended: &Ended, fared: &Fared) -> Result<(Status, Usage), (Status, &'static str)> {
    let failure = match &ended.end {
        Some(JobEnd { outcome: Outcome::Completed, usage, .. }) => {
            return Ok((if ended.stopped_at().is_some() { Status::Stopped } else { Status::Completed }, *usage));
        }
        Some(JobEnd { outcome: Outcome::Failed(failure), .. }) => failure,
        None => return Err((Status::Cancelled, CANCELLED)),
    };
    let status = match (failure, &fared.engine) {
        (Failure::Internal(error), _) => Status::Broken(anyhow::anyhow!("{error:#}")),
        (Failure::Cancelled(_), _) => Status::Cancelled,
        (_, Err(error)) => Status::Broken(anyhow::Error::from(error.clone()).context("the engine failed")),
        (failure, Ok(())) => Status::Failed(one_line(&failure.to_string(), MESSAGE_CHARS_MAX)),
    };
    Err((status, failure.code()))
}

/// Removes the adapters of a job that did not end well.
fn keep_records(figures: &Figures, folder: &Dir) -> anyhow::Result<Kept> {
    if figures.steps == 0 && figures.evaluations.is_empty() {
        return Ok(Kept::Nothing);
    }
    let remove = || -> io::Result<()> {
        for entry in folder.entries()? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folder.remove_dir_all(entry.file_name())?;
            }
        }
        Ok(())
    };
    remove().context("removing the adapters of a failed job")?;
    Ok(Kept::Records)
}

impl Verdict {
    /// Whether nothing is left to be done of the job: it was neither cut off nor failed by the host. One that was to go on and was not started has
    /// what it did before.
    pub(crate) fn is_over(&self, fared: &Fared, goes_on: bool) -> bool {
        match self.status {
            Status::Completed | Status::Stopped => true,
            Status::NotStarted => !goes_on,
            Status::Failed(_) => !goes_on || fared.ended.is_ok(),
            Status::Cancelled => matches!(&fared.ended, Ok(Some(Ended { end: Some(_), .. }))),
            Status::Broken(_) => false,
        }
    }

    /// What is said about what was kept.
    pub(crate) fn kept_text(&self, post: &Post, fared: &Fared) -> String {
        let place = shown(post.folder.path());
        match &self.kept {
            Kept::Nothing => "nothing was kept, since no step was taken".to_owned(),
            Kept::Left => "what it wrote is left, unsigned".to_owned(),
            Kept::Records => {
                let steps = fared.figures().map_or(0, |figures| figures.steps);
                format!("kept in {place}: {LOSSES} ({}), {HELD_OUT}, {METRICS}, {LOG}; no adapter", count(steps, "step"))
            }
            Kept::All(adapters) => {
                let mut names: Vec<String> = adapters.iter().map(|name| format!("{name}/")).collect();
                names.extend([LOSSES, HELD_OUT, METRICS, LOG, crate::receipt::FILE].map(str::to_owned));
                format!("kept in {place}: {}", names.join(", "))
            }
        }
    }
}

impl Fared {
    /// Whether the job came to a good end of its own.
    pub(crate) fn has_completed(&self) -> bool {
        let end = self.ended.as_ref().ok().and_then(Option::as_ref).and_then(|ended| ended.end.as_ref());
        matches!(end, Some(JobEnd { outcome: Outcome::Completed, .. }))
    }

    /// What the job used, where it was started and not cut off.
    pub(crate) fn usage(&self) -> Option<&Usage> {
        self.ended.as_ref().ok().and_then(Option::as_ref)?.end.as_ref().map(|end| &end.usage)
    }

    /// What the job's events amount to, where it was started.
    pub(crate) fn figures(&self) -> Option<&Figures> {
        self.ended.as_ref().ok().and_then(Option::as_ref).map(|ended| &ended.figures)
    }
}

#[cfg(test)]
mod tests {
    use super::{Kept, left};

    #[test]
    fn what_a_job_wrote_before_the_host_failed_is_left() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        root.write("losses.jsonl", "").unwrap();
        assert_eq!(left(&root), Kept::Nothing);
        root.write("log.txt", "info: begun\n").unwrap();
        assert_eq!(left(&root), Kept::Left);
    }
}
