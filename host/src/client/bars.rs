//! `watch` on a terminal: a bar for each member with its loss or its place in the queue, one for all of too many.
//!
//! Shows only; what a job told is escaped before it is shown.

use std::collections::BTreeMap;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use nodus_api::{Event, EventKind, Job, JobState};
use serde_json::Value;

use crate::text::{escape, one_line};

/// Most members with a bar of their own.
const BARS_MAX: usize = 16;
const TEMPLATE: &str = "{bar:12} {wide_msg}";
/// Characters of a reason that are shown.
const REASON_CHARS_MAX: usize = 160;

/// The bars of what is watched.
pub(super) struct Bars {
    screen: MultiProgress,
    members: BTreeMap<String, Member>,
    /// One for each in their order, or one for all.
    bars: Vec<ProgressBar>,
}

/// What is known of a member.
#[derive(Clone, Debug, Default)]
struct Member {
    /// Its place in the sweep.
    number: usize,
    name: String,
    state: String,
    is_waiting: bool,
    is_ended: bool,
    /// While it waits: who goes before it, and why.
    queue: String,
    done: u64,
    total: u64,
    step: u64,
    loss: Option<f64>,
    held_out: Option<f64>,
}

impl Bars {
    pub(super) fn new(jobs: &[Job]) -> Self {
        Self::drawn_to(ProgressDrawTarget::stderr(), jobs)
    }

    fn drawn_to(target: ProgressDrawTarget, jobs: &[Job]) -> Self {
        let screen = MultiProgress::with_draw_target(target);
        let count = if jobs.len() <= BARS_MAX { jobs.len() } else { 1 };
        let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bars = (0..count).map(|_| screen.add(ProgressBar::new(0).with_style(style.clone()))).collect();
        let mut drawn = Self { screen, members: BTreeMap::new(), bars };
        drawn.see(jobs);
        drawn
    }

    /// Whether somebody waits, whose place changes without an event.
    pub(super) fn has_waiting(&self) -> bool {
        self.members.values().any(|member| member.is_waiting)
    }

    /// How the jobs are now.
    pub(super) fn see(&mut self, jobs: &[Job]) {
        for (number, job) in jobs.iter().enumerate() {
            let member = self.members.entry(job.id.clone()).or_default();
            member.number = number;
            member.name = if job.name.is_empty() { job.id.clone() } else { escape(&job.name) };
            let ahead = job.ahead.filter(|ahead| *ahead > 0).map(|ahead| format!("{ahead} of yours go before it"));
            let reason = job.reason.as_deref().map(|reason| one_line(reason, REASON_CHARS_MAX));
            member.queue = ahead.into_iter().chain(reason).collect::<Vec<_>>().join("; ");
            // An event may have been quicker than this answer.
            if !member.is_ended {
                member.be(job.state.as_str());
            }
        }
        self.draw();
    }

    /// Takes what was told. What is a line of its own is shown above the bars.
    pub(super) fn take(&mut self, event: &Event, line: Option<&str>) {
        let Some(member) = self.members.get_mut(&event.job) else { return };
        let number = |name: &str| event.body.get(name).and_then(Value::as_u64);
        let loss = event.body.get("loss").and_then(Value::as_f64);
        match event.kind {
            EventKind::State => member.be(event.body.get("state").and_then(Value::as_str).unwrap_or_default()),
            EventKind::Step => (member.step, member.loss) = (number("step").unwrap_or_default(), loss),
            EventKind::Evaluation => member.held_out = loss.or(member.held_out),
            EventKind::Progress => (member.done, member.total) = (number("done").unwrap_or_default(), number("total").unwrap_or_default()),
            EventKind::Metric | EventKind::Artifact | EventKind::Log => {}
        }
        if let (EventKind::Log, Some(line)) = (event.kind, line) {
            self.say(line);
        }
        self.draw();
    }

    /// Shows a line above them.
    pub(super) fn say(&self, line: &str) {
        // A terminal that is gone is no reason to end.
        drop(self.screen.println(line));
    }

    /// Leaves them as they are.
    pub(super) fn finish(&self) {
        self.bars.iter().for_each(ProgressBar::abandon);
    }

    fn draw(&self) {
        if let ([bar], true) = (self.bars.as_slice(), self.members.len() > 1) {
            let sum = |of: fn(&Member) -> u64| self.members.values().map(of).fold(0_u64, u64::saturating_add);
            set(bar, sum(|member| member.done), sum(|member| member.total), &self.summary());
            return;
        }
        for member in self.members.values() {
            let Some(bar) = self.bars.get(member.number) else { continue };
            set(bar, member.done, member.total, &member.to_string());
        }
    }

    /// All of them in one line.
    fn summary(&self) -> String {
        let count = |is: fn(&Member) -> bool| self.members.values().filter(|member| is(member)).count();
        let (waiting, ended) = (count(|member| member.is_waiting), count(|member| member.is_ended));
        let running = self.members.len() - waiting - ended;
        let held_out = self.members.values().filter_map(|member| member.held_out).fold(f64::INFINITY, f64::min);
        let lowest = if held_out.is_finite() { format!(", lowest held-out loss {held_out:.4}") } else { String::new() };
        format!("{} jobs: {waiting} wait, {running} run, {ended} ended{lowest}", self.members.len())
    }
}

impl Member {
    fn be(&mut self, state: &str) {
        self.state = escape(state);
        self.is_waiting = state == JobState::Queued.as_str();
        self.is_ended = !self.is_waiting && state != JobState::Running.as_str();
    }
}

impl std::fmt::Display for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.name, self.state)?;
        if self.is_waiting && !self.queue.is_empty() {
            write!(f, ", {}", self.queue)?;
        }
        if let Some(loss) = self.loss {
            write!(f, ", step {}, loss {loss:.4}", self.step)?;
        }
        self.held_out.map_or(Ok(()), |loss| write!(f, ", held-out {loss:.4}"))
    }
}

fn set(bar: &ProgressBar, done: u64, total: u64, message: &str) {
    bar.set_length(total.max(done).max(1));
    bar.set_position(done);
    bar.set_message(message.to_owned());
}

#[cfg(test)]
mod tests {
    use indicatif::{ProgressDrawTarget, ProgressStyle};
    use nodus_api::{Event, EventKind, Job};
    use serde_json::{Value, json};

    use super::{BARS_MAX, Bars, TEMPLATE};

    fn job(number: usize, name: &str) -> Job {
        let job = json!({
            "id": format!("job-{number}"), "cohort": "c", "member": number, "name": name, "state": "queued", "ahead": number, "reason": "waiting for a seat",
            "attempts": 0, "component": "sft", "component_id": "x", "model": "m", "data": "d", "parameters": {}, "seed": 0, "limits": {},
            "lane": "fused", "priority": "low", "receipt": false, "device_ms": 0, "submitted_ms": 0,
        });
        serde_json::from_value(job).unwrap()
    }

    fn event(number: usize, kind: EventKind, body: Value) -> Event {
        Event { position: 1, job: format!("job-{number}"), ms: 0, kind, body }
    }

    fn messages(bars: &Bars) -> Vec<String> {
        bars.bars.iter().map(indicatif::ProgressBar::message).collect()
    }

    #[test]
    fn each_member_has_its_place_then_its_loss() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
        let mut bars = Bars::drawn_to(ProgressDrawTarget::hidden(), &[job(0, "rank=4"), job(1, "rank=8\u{1b}")]);
        assert!(bars.has_waiting());
        let waiting = "rank=8\\u{1b}: queued, 1 of yours go before it; waiting for a seat";
        assert_eq!(messages(&bars), ["rank=4: queued, waiting for a seat", waiting]);
        bars.take(&event(0, EventKind::State, json!({"state": "running"})), None);
        bars.take(&event(0, EventKind::Progress, json!({"done": 3, "total": 60})), None);
        bars.take(&event(0, EventKind::Step, json!({"step": 3, "loss": 2.5})), None);
        bars.take(&event(0, EventKind::Evaluation, json!({"step": 3, "loss": 2.25})), None);
        bars.take(&event(7, EventKind::Step, json!({"step": 3, "loss": 2.5})), None);
        assert_eq!(messages(&bars), ["rank=4: running, step 3, loss 2.5000, held-out 2.2500", waiting]);
        assert_eq!((bars.bars[0].position(), bars.bars[0].length()), (3, Some(60)));
    }

    #[test]
    fn of_too_many_one_bar_adds_up() {
        let jobs: Vec<Job> = (0..=BARS_MAX).map(|number| job(number, &number.to_string())).collect();
        let mut bars = Bars::drawn_to(ProgressDrawTarget::hidden(), &jobs);
        bars.take(&event(0, EventKind::Progress, json!({"done": 3, "total": 60})), None);
        bars.take(&event(0, EventKind::State, json!({"state": "failed"})), None);
        bars.take(&event(1, EventKind::State, json!({"state": "running"})), None);
        bars.take(&event(1, EventKind::Evaluation, json!({"step": 3, "loss": 2.25})), None);
        assert_eq!(messages(&bars), ["17 jobs: 15 wait, 1 run, 1 ended, lowest held-out loss 2.2500"]);
        assert_eq!((bars.bars[0].position(), bars.bars[0].length()), (3, Some(60)));
    }
}
