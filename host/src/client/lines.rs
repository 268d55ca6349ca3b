//! Events as lines for people: one for a step, and nothing that was said already.
//!
//! Shows what a component and a service say with its control characters escaped.

use std::collections::BTreeMap;

use nodus_api::{Event, EventKind, Job};
use serde_json::Value;

use crate::text::escape;

/// What the host tells of a step, as components like to tell it once more.
const OF_STEP: [&str; 3] = ["loss", "grad_norm", "learning_rate"];

/// The lines of what is watched.
pub(super) struct Lines {
    names: BTreeMap<String, String>,
    /// What the host told last of each job's steps and evaluations.
    told: BTreeMap<String, [Vec<f64>; 2]>,
}

impl Lines {
    pub(super) fn new(jobs: &[Job]) -> Self {
        let names = jobs.iter().map(|job| (job.id.clone(), job.name.clone())).collect();
        Self { names, told: BTreeMap::new() }
    }

    /// An event's line, behind its member's name; none where it says nothing new.
    pub(super) fn of(&mut self, event: &Event) -> Option<String> {
        let name = self.names.get(&event.job).map(String::as_str).unwrap_or_default();
        let before = if name.is_empty() { String::new() } else { format!("[{}] ", escape(name)) };
        if self.is_known(event) { None } else { line(event).map(|text| format!("{before}{text}")) }
    }

    /// Whether it is a metric of a value that the host told itself of the last step or evaluation.
    fn is_known(&mut self, event: &Event) -> bool {
        let value = |name: &str| event.body.get(name).and_then(Value::as_f64);
        let [step, evaluation] = self.told.entry(event.job.clone()).or_default();
        match event.kind {
            EventKind::Step => *step = OF_STEP.into_iter().filter_map(value).collect(),
            EventKind::Evaluation => *evaluation = value("loss").into_iter().collect(),
            EventKind::Metric => {
                return value("value").is_some_and(|value| step.iter().chain(evaluation.iter()).any(|told| short(*told) == short(value)));
            }
            EventKind::State | EventKind::Progress | EventKind::Log | EventKind::Artifact => {}
        }
        false
    }
}

/// A number as it is read: one that was an f32 with as few digits as tell it from other f32s.
#[expect(clippy::cast_possible_truncation, reason = "that is what is asked")]
fn short(value: f64) -> String {
    let single = value as f32;
    if f64::from(single) == value { single.to_string() } else { value.to_string() }
}

/// An event, for people.
fn line(event: &Event) -> Option<String> {
    let field = |name: &str| event.body.get(name);
    let text = |name: &str| field(name).and_then(Value::as_str).map(escape).unwrap_or_default();
    let number = |name: &str| match field(name) {
        Some(Value::Number(number)) if number.is_f64() => number.as_f64().map(short).unwrap_or_default(),
        other => other.map(Value::to_string).unwrap_or_default(),
    };
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
        EventKind::Step => {
            let told = OF_STEP.into_iter().filter(|name| field(name).is_some_and(Value::is_number));
            let told: Vec<String> = told.map(|name| format!("  {name} {}", number(name))).collect();
            format!("step {}{}", number("step"), told.concat())
        }
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
    use serde_json::{Value, json};

    use super::{Lines, line};

    fn event(kind: EventKind, body: Value) -> Event {
        Event { position: 1, job: "j".into(), ms: 0, kind, body }
    }

    #[test]
    fn events_read_well_and_move_no_cursor() {
        let line = |kind, body| line(&event(kind, body));
        assert_eq!(line(EventKind::State, json!({"state": "running", "placed": "cpu"})).unwrap(), "running (placed cpu)");
        assert_eq!(line(EventKind::Step, json!({"step": 3, "loss": 1.5})).unwrap(), "step 3  loss 1.5");
        assert_eq!(line(EventKind::Log, json!({"level": "info", "message": "a\u{1b}[2J"})).unwrap(), "info: a\\u{1b}[2J");
    }

    #[test]
    fn a_step_is_one_line_with_short_numbers_and_nothing_is_said_twice() {
        let mut lines = Lines::new(&[]);
        let rate = f64::from(1e-4_f32);
        let step = json!({"step": 7, "loss": 2.25, "grad_norm": 0.1, "learning_rate": rate, "tokens": 3});
        assert_eq!(lines.of(&event(EventKind::Step, step)).unwrap(), "step 7  loss 2.25  grad_norm 0.1  learning_rate 0.0001");
        let metric = |name: &str, value: f64| event(EventKind::Metric, json!({"name": name, "step": 7, "value": value}));
        for (name, value) in [("loss", 2.25), ("grad_norm", 0.1), ("learning_rate", rate)] {
            assert_eq!(lines.of(&metric(name, value)), None, "{name}");
        }
        assert_eq!(lines.of(&metric("accuracy", 0.5)).unwrap(), "step 7  accuracy 0.5");
        let evaluation = event(EventKind::Evaluation, json!({"step": 7, "data": "held-out", "loss": 2.125}));
        assert_eq!(lines.of(&evaluation).unwrap(), "step 7  held-out loss 2.125");
        assert_eq!(lines.of(&metric("held_out_loss", 2.125)), None);
    }
}
