//! `watch`: what jobs tell, as they tell it, until the last one ended.
//!
//! Resumes where it was cut off. Ends with the user's error where a job did not end well.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use nodus_api::{Cohort, Event, EventKind, Job, JobState};
use serde_json::Value;

use super::bars::Bars;
use super::http::{Remote, segment};
use super::sse;
use crate::error::user;
use crate::text::escape;

/// How often places in the queue are looked at.
const LOOK: Duration = Duration::from_secs(3);

/// The jobs that an id names: one, or the members of a sweep; and the path of their events.
pub(super) async fn jobs_of(remote: &Remote, id: &str) -> anyhow::Result<(Vec<Job>, String)> {
    let part = segment(id);
    if let Some(cohort) = remote.find::<Cohort>(&format!("/v1/cohorts/{part}")).await? {
        return Ok((cohort.jobs, format!("/v1/cohorts/{part}/events")));
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
        lines(remote, &path, jobs, form, out).await?;
    }
    let (jobs, _) = jobs_of(remote, id).await?;
    let bad: Vec<&Job> = jobs.iter().filter(|job| !matches!(job.state, JobState::Succeeded | JobState::Stopped)).collect();
    match bad.as_slice() {
        [] => Ok(()),
        [job, ..] => {
            let message = job.message.as_deref().map(|message| format!(": {}", escape(message))).unwrap_or_default();
            Err(user(format!("{} of {} jobs did not end well; job {} is {}{message}", bad.len(), jobs.len(), job.id, job.state.as_str())))
        }
    }
}

/// Shows every event.
async fn lines(remote: &Remote, path: &str, jobs: Vec<Job>, form: Form, out: &mut dyn Write) -> anyhow::Result<()> {
    let names: BTreeMap<String, String> = jobs.into_iter().map(|job| (job.id, job.name)).collect();
    sse::follow(remote, path, aloud, |frame| {
        if form == Form::Json {
            writeln!(out, "{}", frame.data)?;
        } else {
            let event: Event = serde_json::from_str(&frame.data)?;
            if let Some(text) = named(&event, &names) {
                writeln!(out, "{text}")?;
            }
        }
        Ok(out.flush()?)
    })
    .await
}

/// Shows how far each of them is. Places in the queue are asked for from time to time: they change without an event.
async fn bars(remote: &Remote, (id, path): (&str, &str), jobs: &[Job]) -> anyhow::Result<()> {
    let names: BTreeMap<String, String> = jobs.iter().map(|job| (job.id.clone(), job.name.clone())).collect();
    let bars = RefCell::new(Bars::new(jobs));
    let say = |text: &str| bars.borrow().say(text);
    let followed = sse::follow(remote, path, say, |frame| {
        let event: Event = serde_json::from_str(&frame.data)?;
        bars.borrow_mut().take(&event, named(&event, &names).as_deref());
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

/// An event's line, behind its member's name.
fn named(event: &Event, names: &BTreeMap<String, String>) -> Option<String> {
    let name = names.get(&event.job).map(String::as_str).unwrap_or_default();
    let before = if name.is_empty() { String::new() } else { format!("[{}] ", escape(name)) };
    line(event).map(|text| format!("{before}{text}"))
}

/// An event, for people.
fn line(event: &Event) -> Option<String> {
    let field = |name: &str| event.body.get(name);
    let text = |name: &str| field(name).and_then(Value::as_str).map(escape).unwrap_or_default();
    let number = |name: &str| field(name).map(Value::to_string).unwrap_or_default();
    Some(match event.kind {
        EventKind::State => {
            let more: Vec<String> = ["placed", "reason", "message", "stop"]
                .into_iter()
                .filter(|name| field(name).is_some())
                .map(|name| format!("{name} {}", text(name)))
                .collect();
            let more = if more.is_empty() { String::new() } else { format!(" ({})", more.join(", ")) };
            format!("{}{more}", text("state"))
        }
        EventKind::Step => format!("step {}  loss {}", number("step"), number("loss")),
        EventKind::Evaluation => format!("step {}  {} loss {}", number("step"), text("data"), number("loss")),
        EventKind::Metric => format!("step {}  {} {}", number("step"), text("name"), number("value")),
        EventKind::Progress => return None,
        EventKind::Log => format!("{}: {}", text("level"), text("message")),
        EventKind::Artifact => format!("step {}  saved {}", number("step"), text("name")),
    })
}

#[cfg(test)]
mod tests {
    use nodus_api::{Event, EventKind};
    use serde_json::json;

    use super::line;

    #[test]
    fn events_read_well_and_move_no_cursor() {
        let line = |kind, body| line(&Event { position: 1, job: "j".into(), ms: 0, kind, body });
        assert_eq!(line(EventKind::State, json!({"state": "running", "placed": "cpu"})).unwrap(), "running (placed cpu)");
        assert_eq!(line(EventKind::Step, json!({"step": 3, "loss": 1.5})).unwrap(), "step 3  loss 1.5");
        assert_eq!(line(EventKind::Log, json!({"level": "info", "message": "a\u{1b}[2J"})).unwrap(), "info: a\\u{1b}[2J");
    }
}
