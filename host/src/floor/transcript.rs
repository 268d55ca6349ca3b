//! What a job tells, on its way into the state: numbered, gathered, and held against what it told when it was run before.
//!
//! Never writes an event twice, and never lets a repeated run tell something else than the first.

use std::collections::VecDeque;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use nodus_sandbox::services::Event;
use nodus_state::{Claim, EventKind, NewEvent, State};
use tokio::sync::watch;

use crate::machine::unix_ms;
use crate::run::record::json;
use crate::run::recorder::Audience;
use crate::text::one_line;

/// Events that are written together at most, or read.
const EVENTS_MAX: usize = 256;
/// Room in its tenant's quota that a job is granted at once for what it tells: asking is a read of the state's.
const GRANT_BYTES: u64 = 1 << 20;
/// Characters of an event that a fault shows.
const SHOWN_CHARS_MAX: usize = 200;

/// A repeated run told something else: a fault of the host that no further run can put right.
#[derive(Debug, thiserror::Error)]
#[error("run again, the job told something else than before: event {seq} was {before}, and is {now}")]
pub(super) struct Diverged {
    seq: u64,
    before: String,
    now: String,
}

/// The audience of one attempt.
pub(super) struct Transcript {
    state: Arc<State>,
    claim: Claim,
    /// Of the last event.
    seq: u64,
    waiting: Vec<NewEvent>,
    /// Bytes that it may write before it asks again.
    granted: u64,
    /// What was told before and is to be told again.
    before: VecDeque<NewEvent>,
    /// Whether there may be more of it in the state.
    has_more: bool,
    caught_up: watch::Sender<bool>,
}

impl Transcript {
    /// Of an attempt; tells when all is told again that was told before. Blocks.
    ///
    /// # Errors
    /// Ours: the state refuses.
    pub(super) fn new(state: Arc<State>, claim: Claim) -> anyhow::Result<(Self, watch::Receiver<bool>)> {
        let (caught_up, receiver) = watch::channel(false);
        let has_more = claim.attempt > 1;
        let mut transcript = Self { state, claim, seq: 0, waiting: Vec::new(), granted: 0, before: VecDeque::new(), has_more, caught_up };
        transcript.look_ahead()?;
        Ok((transcript, receiver))
    }

    /// Reads what was told before, where what was read of it is used up.
    fn look_ahead(&mut self) -> anyhow::Result<()> {
        if self.has_more && self.before.is_empty() {
            let more = self.state.told(&self.claim, self.seq, EVENTS_MAX).context("reading what the job told before")?;
            self.has_more = more.len() == EVENTS_MAX;
            self.before.extend(more);
        }
        if self.before.is_empty() {
            self.caught_up.send_replace(true);
        }
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        if !self.waiting.is_empty() {
            let bytes = self.waiting.iter().map(NewEvent::bytes).sum();
            if self.granted < bytes {
                self.granted = self.state.grant(&self.claim, bytes, GRANT_BYTES).context("asking for room for what the job tells")?;
            }
            self.granted -= bytes;
            self.state.append(&self.claim, &self.waiting).context("writing down what the job tells")?;
            self.waiting.clear();
        }
        Ok(())
    }
}

impl Audience for Transcript {
    fn hear(&mut self, event: Event) -> anyhow::Result<()> {
        let Some(body) = json(&event).context("writing an event")? else { return Ok(()) };
        self.seq += 1;
        let event = NewEvent { seq: self.seq, ms: unix_ms(), kind: kind(&event), body };
        if let Some(before) = self.before.pop_front() {
            if (before.seq, before.kind, &before.body) != (event.seq, event.kind, &event.body) {
                let shown = |event: &NewEvent| one_line(&format!("{} {}", event.kind, event.body), SHOWN_CHARS_MAX);
                bail!(Diverged { seq: event.seq, before: shown(&before), now: shown(&event) });
            }
            return self.look_ahead();
        }
        self.waiting.push(event);
        if self.waiting.len() >= EVENTS_MAX { self.flush() } else { Ok(()) }
    }

    fn pause(&mut self) -> anyhow::Result<()> {
        self.flush()
    }

    fn end(mut self: Box<Self>) -> anyhow::Result<()> {
        self.flush()
    }
}

fn kind(event: &Event) -> EventKind {
    match event {
        Event::Step { .. } => EventKind::Step,
        Event::Evaluation { .. } => EventKind::Evaluation,
        Event::Metric { .. } => EventKind::Metric,
        Event::Progress { .. } | Event::Evaluating { .. } => EventKind::Progress,
        Event::Log { .. } => EventKind::Log,
        Event::Saved { .. } => EventKind::Artifact,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::Arc;

    use nodus_protocol::Digest;
    use nodus_sandbox::services::{Event, Level};
    use nodus_state::{Access, Claim, Common, HeldOut, ItemKind, JobSpec, Lane, Named, NewItem, Owner, Priority, Quota, State};

    use super::{Audience as _, Diverged, EVENTS_MAX, Transcript};

    /// A state with a job that was claimed.
    fn claimed() -> (tempfile::TempDir, Arc<State>, Claim) {
        let folder = tempfile::tempdir().unwrap();
        let dir = cap_std::fs::Dir::open_ambient_dir(folder.path(), cap_std::ambient_authority()).unwrap();
        let state = State::open(dir, folder.path(), Access::Whole).unwrap();
        let tenant = state.add_tenant("acme", Quota::DEFAULT).unwrap().id;
        let item = |kind| {
            let mut staged = state.stage(1 << 10).unwrap();
            staged.write_all(b"content").unwrap();
            let (kept, digest) = (staged.keep().unwrap(), Digest::of(b"content"));
            let (owner, files) = (Owner::Tenant(tenant), [("content".to_owned(), kept)]);
            state.add_item(&NewItem { kind, owner, name: Some("thing"), digest, about: &serde_json::Value::Null, files: &files }).unwrap();
            Named { name: "thing".to_owned(), digest }
        };
        let spec = JobSpec {
            name: String::new(),
            varied: serde_json::Map::new(),
            common: Common {
                component: item(ItemKind::Component),
                model: Named { name: "tiny".to_owned(), digest: Digest::of(b"tiny") },
                data: item(ItemKind::Data),
                held_out: HeldOut::Nothing,
                parameters: serde_json::Map::new(),
                seed: 0,
                limits: std::collections::BTreeMap::new(),
                lane: Lane::Fused,
                priority: Priority::Low,
            },
            init_adapter: None,
        };
        let job = state.submit(tenant, None, &spec.into()).unwrap().jobs[0];
        let claim = state.claim(&[job], "cpu").unwrap()[0];
        (folder, Arc::new(state), claim)
    }

    fn line(number: usize) -> Event {
        Event::Log { level: Level::Info, message: format!("line {number}") }
    }

    #[test]
    fn what_was_told_is_told_again_and_written_once() {
        let (_folder, state, first) = claimed();
        let (mut transcript, caught_up) = Transcript::new(state.clone(), first).unwrap();
        assert!(*caught_up.borrow(), "nothing was told before");
        let told = EVENTS_MAX + 7;
        (0..told).for_each(|number| transcript.hear(line(number)).unwrap());
        transcript.hear(Event::Evaluating { done: 1, total: 2 }).unwrap();
        transcript.pause().unwrap();

        let second = state.reclaim(first.job, "cpu").unwrap();
        let (mut transcript, caught_up) = Transcript::new(state.clone(), second).unwrap();
        for number in 0..told + 3 {
            assert_eq!(*caught_up.borrow(), number >= told, "{number}");
            transcript.hear(line(number)).unwrap();
        }
        Box::new(transcript).end().unwrap();
        let all = state.told(&second, 0, 2 * told).unwrap();
        assert_eq!(all.len(), told + 3);
        assert!((1..).zip(&all).all(|(seq, event)| event.seq == seq));
    }

    #[test]
    fn a_repeated_run_that_tells_something_else_is_a_fault() {
        let (_folder, state, first) = claimed();
        let (mut transcript, _) = Transcript::new(state.clone(), first).unwrap();
        (0..3).for_each(|number| transcript.hear(line(number)).unwrap());
        transcript.pause().unwrap();
        let second = state.reclaim(first.job, "cpu").unwrap();
        let (mut transcript, _) = Transcript::new(state.clone(), second).unwrap();
        transcript.hear(line(0)).unwrap();
        let error = transcript.hear(line(7)).unwrap_err();
        assert!(error.downcast_ref::<Diverged>().is_some(), "{error}");
        assert!(error.to_string().contains("line 1") && error.to_string().contains("line 7"), "{error}");
        assert!(transcript.state.append(&first, &[]).is_err(), "the first attempt holds no claim any more");
    }
}
