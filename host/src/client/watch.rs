//! `watch`: what jobs tell, as they tell it, until the last one ended.
//!
//! Resumes where it was cut off. Ends with the user's error where a job did not end well.

use std::cell::RefCell;
use std::io::Write;
use std::time::Duration;

use nodus_api::{Cohort, Event, Job, JobState};

use super::bars::Bars;
use super::http::{PAGE_MAX, Remote, segment};
use super::lines::Lines;
use super::{sse, table};
use crate::error::user;
use crate::text::escape;

/// How often places in the queue are looked at.
const LOOK: Duration = Duration::from_secs(3);

/// The jobs that an id names: one, or the members of a sweep; and the path of their events.
pub(super) async fn jobs_of(remote: &Remote, id: &str) -> anyhow::Result<(Vec<Job>, String)> {
    let part = segment(id);
    if let Some(Cohort { mut jobs, mut next, .. }) = remote.find(&format!("/v1/cohorts/{part}?limit={PAGE_MAX}")).await? {
        while let Some(after) = next {
            let page: Cohort = remote.get(&format!("/v1/cohorts/{part}?limit={PAGE_MAX}&after={after}")).await?;
            jobs.extend(page.jobs);
            next = page.next;
        }
        return Ok((jobs, format!("/v1/cohorts/{part}/events")));
    }
    let job = remote.get::<Job>(&format!("/v1/jobs/{part}")).await?;
    Ok((vec![job], format!("/v1/jobs/{part}/events")))
}

/// How what is told is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Every event as it came.
    Json,
    /// A line each.
    Lines,
    /// As bars: for a terminal.
    Bars,
}

impl Form {
    pub(super) fn new(as_json: bool, is_terminal: bool) -> Self {
        match (as_json, is_terminal) {
            (true, _) => Self::Json,
            (false, true) => Self::Bars,
            (false, false) => Self::Lines,
        }
    }
}

/// Follows a job or a sweep.
pub(super) async fn watch(remote: &Remote, id: &str, form: Form, out: &mut dyn Write) -> anyhow::Result<()> {
    let (jobs, path) = jobs_of(remote, id).await?;
    if form == Form::Bars {
        bars(remote, (id, &path), &jobs).await?;
    } else {
        lines(remote, &path, &jobs, form, out).await?;
    }
    let (jobs, _) = jobs_of(remote, id).await?;
    if form == Form::Lines {
        summary(&jobs, out)?;
    }
    let bad: Vec<&Job> = jobs.iter().filter(|job| !matches!(job.state, JobState::Succeeded | JobState::Stopped)).collect();
    match bad.as_slice() {
        [] => Ok(()),
        [job, ..] => {
            let message = job.message.as_deref().map(|message| format!(": {}", escape(message))).unwrap_or_default();
            Err(user(format!("{} of {} jobs did not end well; job {} is {}{message}", bad.len(), jobs.len(), job.id, job.state.as_str())))
        }
    }
}

/// What has become of them.
fn summary(jobs: &[Job], out: &mut dyn Write) -> anyhow::Result<()> {
    let row = |job: &Job| {
        let [step, loss, held_out] = table::progress(job);
        [job.id.clone(), job.name.clone(), job.state.as_str().to_owned(), step, loss, held_out]
    };
    writeln!(out)?;
    Ok(table::write(out, ["ID", "NAME", "STATE", "STEP", "LOSS", "HELD-OUT"], &jobs.iter().map(row).collect::<Vec<_>>())?)
}

/// Shows every event.
async fn lines(remote: &Remote, path: &str, jobs: &[Job], form: Form, out: &mut dyn Write) -> anyhow::Result<()> {
    let mut lines = Lines::new(jobs);
    sse::follow(remote, path, aloud, |frame| {
        if form == Form::Json {
            writeln!(out, "{}", frame.data)?;
        } else {
            let event: Event = serde_json::from_str(&frame.data)?;
            if let Some(text) = lines.of(&event) {
                writeln!(out, "{text}")?;
            }
        }
        Ok(out.flush()?)
    })
    .await
}

/// Shows how far each of them is. Places in the queue are asked for from time to time: they change without an event.
async fn bars(remote: &Remote, (id, path): (&str, &str), jobs: &[Job]) -> anyhow::Result<()> {
    let mut lines = Lines::new(jobs);
    let bars = RefCell::new(Bars::new(jobs));
    let say = |text: &str| bars.borrow().say(text);
    let followed = sse::follow(remote, path, say, |frame| {
        let event: Event = serde_json::from_str(&frame.data)?;
        bars.borrow_mut().take(&event, lines.of(&event).as_deref());
        Ok(())
    });
    let places = async {
        loop {
            tokio::time::sleep(LOOK).await;
            if bars.borrow().has_waiting()
                && let Ok((jobs, _)) = jobs_of(remote, id).await
            {
                bars.borrow_mut().see(&jobs);
            }
        }
    };
    let followed = tokio::select! {
        followed = followed => followed,
        () = places => Ok(()),
    };
    bars.borrow().finish();
    followed
}

/// Says what happens to a stream, beside what it tells.
pub(super) fn aloud(text: &str) {
    // Whoever reads neither has gone.
    drop(writeln!(std::io::stderr(), "{text}"));
}
