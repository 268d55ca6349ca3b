//! The work of a scribe: carries a job's calls, answers what is known, writes down what is new, and has the job kept now and then.
//!
//! Never answers a call otherwise than before, and never drops one: what cannot be answered is held until the attempt is over.

use std::sync::Arc;
use std::time::Duration;

use nodus_protocol::frame::{decode, encode};
use nodus_protocol::{Answer, Command, Digest, EngineError, ErrorKind, Inbox, JobState, Reply, Request};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::book::Book;
use super::call;
use super::keeper::Keeper;
use super::past::Past;
use super::record::frame;
use super::scribe::{Ask, Calls, Fault, Last, News, Tally, Terms};

/// When a snapshot that finds no room in memory is tried again.
const LATER: Duration = Duration::from_secs(1);

/// A call that the engine answered.
struct Answered {
    number: u64,
    asked: Digest,
    is_step: bool,
    answer: Answer,
    reply: Result<Reply, EngineError>,
}

/// Of one attempt.
pub(super) struct Carrier {
    terms: Terms,
    past: Past,
    keeper: Keeper,
    teller: watch::Sender<News>,
    tally: Tally,
    /// For who wants to know how many calls there were.
    made: Calls,
    /// The number of the job's next call.
    next: u64,
    in_flight: JoinSet<Answered>,
    /// Calls that nobody answers in this attempt.
    held: Vec<Answer>,
    /// Whether no further call is carried.
    is_closed: bool,
    /// Whether the engine was told to give the job up: what it was still asked is not answered.
    is_dropped: bool,
    /// Calls within the last snapshot.
    kept: u64,
    /// When the next is due.
    due: Instant,
    /// Tells when the last is on the disk.
    writing: Option<oneshot::Receiver<bool>>,
    /// Since when the job does new work.
    began: Instant,
    /// How long the calls of the snapshot had taken.
    kept_ms: u64,
}

impl Carrier {
    pub(super) fn new(terms: Terms, Book { past, keeper, .. }: Book, (teller, calls): (watch::Sender<News>, Calls)) -> Self {
        let (now, kept) = (Instant::now(), past.calls);
        let due = now + terms.every;
        let (tally, in_flight, held) = (Tally::default(), JoinSet::new(), Vec::new());
        Self {
            terms,
            past,
            keeper,
            teller,
            tally,
            made: calls,
            next: 0,
            in_flight,
            held,
            is_closed: false,
            is_dropped: false,
            kept,
            due,
            writing: None,
            began: now,
            kept_ms: 0,
        }
    }

    pub(super) async fn work(mut self, mut inbox: Inbox, mut asked: mpsc::Receiver<Ask>) {
        // A snapshot is due once all is answered that is under way; somebody may wait for it.
        let mut due: Option<Option<oneshot::Sender<()>>> = None;
        let ended = loop {
            if let Some(waiting) = due.take_if(|_| self.in_flight.is_empty()) {
                self.snapshot(waiting.is_some()).await;
                // Who asked may be gone.
                waiting.map(|waiting| waiting.send(()).ok());
            }
            let (is_quiet, may_keep, time) = (due.is_some(), self.may_keep(), self.due);
            tokio::select! {
                request = inbox.recv(), if !is_quiet => match request {
                    Some(request) => self.take(request).await,
                    None => break None,
                },
                Some(answered) = self.in_flight.join_next(), if !self.in_flight.is_empty() => match answered {
                    Ok(answered) => self.answered(answered).await,
                    Err(error) => self.fail(Fault::Host(format!("a task failed: {error}")), None),
                },
                ask = asked.recv() => match ask {
                    Some(Ask::Checkpoint(waiting)) => due = Some(Some(waiting)),
                    Some(Ask::End(waiting)) => break Some(waiting),
                    None => break None,
                },
                is_written = written(&mut self.writing), if self.writing.is_some() => self.written(is_written),
                () = sleep_until(time), if !is_quiet && may_keep => due = Some(None),
            }
        };
        let is_lost = matches!(self.teller.borrow().fault, Some(Fault::Lost(_)));
        let was_at_work = is_lost || !(self.is_dropped || self.in_flight.is_empty());
        let Self { keeper, mut writing, tally, .. } = self;
        drop(tokio::task::spawn_blocking(move || keeper.end()).await);
        let is_further = written(&mut writing).await || tally.snapshots > 0;
        if let Some(ended) = ended {
            ended.send(Last { was_at_work, is_further }).ok();
        }
    }

    fn written(&mut self, is_written: bool) {
        self.writing = None;
        self.tally.snapshots += u64::from(is_written);
    }

    async fn take(&mut self, request: Request) {
        let (command, answer) = request.into_parts();
        let asked = match call::fingerprint(&command) {
            Ok(Some(asked)) => asked,
            Ok(None) => return self.pass(command, answer).await,
            Err(error) => return self.fail(Fault::Host(format!("a call cannot be written down: {error}")), Some(answer)),
        };
        if self.is_closed {
            return self.held.push(answer);
        }
        let number = self.next;
        self.next += 1;
        self.made.one_more();
        match self.past.look(number).await {
            Ok(Some(entry)) if entry.asked != asked => {
                let text = format!("run again, the job asked something else than before: its call {number}, to {}", call::name(&command));
                return self.fail(Fault::Diverged(text), Some(answer));
            }
            Ok(_) => {}
            Err(error) => return self.fail(Fault::Host(format!("the journal cannot be read: {error}")), Some(answer)),
        }
        if number < self.past.calls {
            return self.answer_again(number, answer).await;
        }
        if let Some(state) = self.past.state.take()
            && let Err(fault) = self.restore(state).await
        {
            return self.fail(fault, Some(answer));
        }
        self.carry(number, asked, command, answer).await;
    }

    async fn carry(&mut self, number: u64, asked: Digest, command: Command, answer: Answer) {
        let is_step = matches!(command, Command::OptimStep { .. } | Command::TrainStep { .. });
        let pending = self.terms.engine.send(command).await;
        self.in_flight.spawn(async move {
            let reply = match pending {
                Ok(pending) => pending.await,
                Err(error) => Err(error),
            };
            Answered { number, asked, is_step, answer, reply }
        });
    }

    /// What the host asks of the job's engine passes at any time.
    async fn pass(&mut self, command: Command, answer: Answer) {
        // Nothing of the job comes after its end.
        let is_drop = matches!(command, Command::DropJob { .. });
        (self.is_closed, self.is_dropped) = (self.is_closed || is_drop, self.is_dropped || is_drop);
        match self.terms.engine.send(command).await {
            Ok(pending) => drop(tokio::spawn(async move { answer.give(pending.await) })),
            Err(error) => answer.give(Err(error)),
        }
    }

    async fn answer_again(&mut self, number: u64, answer: Answer) {
        let Some(entry) = self.past.take(number) else {
            return self.fail(Fault::Host(format!("the journal lacks the reply to call {number}")), Some(answer));
        };
        self.kept_ms = self.kept_ms.max(entry.work_ms);
        match self.past.reply(entry).await.map(|reply| decode(&reply)) {
            Ok(Ok(reply)) => {
                self.tally.answered += 1;
                answer.give(reply);
                self.tell();
            }
            Ok(Err(error)) => self.fail(Fault::Host(format!("the reply to call {number} cannot be read: {error}")), Some(answer)),
            Err(error) => self.fail(Fault::Host(format!("the journal cannot be read: {error}")), Some(answer)),
        }
    }

    /// Gives the engine what it held.
    async fn restore(&mut self, state: Arc<JobState>) -> Result<(), Fault> {
        let Terms { job, trunk, cohort, every, .. } = self.terms;
        let restored = self.terms.engine.call(Command::Restore { job, trunk, cohort, state }).await;
        self.due = Instant::now() + every;
        restored.map(drop).map_err(|error| match error.kind {
            ErrorKind::DeviceLost => Fault::Lost(error.message),
            _ => Fault::Host(format!("an engine did not take a job's snapshot: {error}")),
        })
    }

    async fn answered(&mut self, Answered { number, asked, is_step, answer, reply }: Answered) {
        match &reply {
            Err(error) if error.kind == ErrorKind::DeviceLost && self.is_dropped => return self.held.push(answer),
            Err(error) if error.kind == ErrorKind::DeviceLost => return self.fail(Fault::Lost(error.message.clone()), Some(answer)),
            // A defect of the host ends the job as such; what comes of it is not to be repeated.
            Err(error) if error.kind == ErrorKind::Internal => {
                self.is_closed = true;
                return answer.give(reply);
            }
            _ => {}
        }
        let bytes = match encode(&reply) {
            Ok(bytes) => bytes,
            Err(error) => return self.fail(Fault::Host(format!("a reply cannot be written down: {error}")), Some(answer)),
        };
        match self.past.take(number) {
            Some(entry) => {
                let work_ms = entry.work_ms;
                match self.past.reply(entry).await {
                    Ok(before) if before == bytes => {}
                    Ok(_) => {
                        let text = format!("run again, the job was answered something else than before, bit for bit: to its call {number}");
                        return self.fail(Fault::Diverged(text), Some(answer));
                    }
                    Err(error) => return self.fail(Fault::Host(format!("the journal cannot be read: {error}")), Some(answer)),
                }
                self.tally.repeated += 1;
                self.tally.repeated_steps += u64::from(is_step);
                self.tally.repeated_ms = self.tally.repeated_ms.max(work_ms.saturating_sub(self.kept_ms));
            }
            None => {
                let work_ms = self.past.work_ms + u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
                if let Some(frame) = frame(number, work_ms, asked, &bytes) {
                    self.keeper.keep(frame).await;
                }
            }
        }
        answer.give(reply);
        self.tell();
    }

    /// Whether there is something to be kept that can be.
    fn may_keep(&self) -> bool {
        let is_news = self.past.state.is_none() && self.next > self.kept;
        is_news && self.writing.is_none() && !self.is_closed && !self.keeper.is_given_up()
    }

    /// Has the job kept as it is; the last time, nothing of it is carried afterwards.
    async fn snapshot(&mut self, is_last: bool) {
        if is_last && let Some(writing) = self.writing.take() {
            self.written(writing.await.unwrap_or(false));
        }
        if self.may_keep() {
            self.snapshot_now(is_last).await;
        }
        self.is_closed |= is_last;
    }

    async fn snapshot_now(&mut self, is_last: bool) {
        // Those of other jobs may be on their way to the disk: so many are in memory at once. A job that goes on does not stand still for them: their
        // engines may take long.
        let room = if is_last { self.keeper.room_for_snapshot().await } else { self.keeper.room_for_snapshot_now() };
        if room.is_none() {
            self.due = Instant::now() + LATER.min(self.terms.every);
            return;
        }
        match self.terms.engine.call(Command::Snapshot { job: self.terms.job }).await {
            Ok(Reply::State(state)) => {
                self.kept = self.next;
                self.due = Instant::now() + self.terms.every;
                let written = self.keeper.keep_snapshot(self.next, (state, room)).await;
                if is_last {
                    self.written(written.await.unwrap_or(false));
                } else {
                    self.writing = Some(written);
                }
            }
            Ok(_) => self.fail(Fault::Host("a snapshot was answered by something else".to_owned()), None),
            Err(error) if error.kind == ErrorKind::DeviceLost => self.fail(Fault::Lost(error.message), None),
            Err(error) => {
                tracing::warn!(%error, "a job is not kept as it is: what it does is done again where it is interrupted");
                self.due = Instant::now() + self.terms.every;
            }
        }
    }

    /// The job cannot go on in this attempt.
    fn fail(&mut self, fault: Fault, answer: Option<Answer>) {
        self.held.extend(answer);
        self.is_closed = true;
        self.teller.send_modify(|news| news.fault = news.fault.take().or(Some(fault)));
    }

    /// Tells how far it is; wakes those who wait only where that is news to them.
    fn tell(&mut self) {
        if self.past.is_read() {
            self.keeper.read();
        }
        let (is_over, tally) = (self.past.is_over(), self.tally);
        let is_news = self.teller.send_if_modified(|news| {
            news.tally = tally;
            !std::mem::replace(&mut news.is_caught_up, is_over) && is_over
        });
        if is_news {
            self.began = Instant::now();
        }
    }
}

/// Waits until a snapshot is on the disk, or is not going to be, which is told where it was tried; whether it is.
async fn written(writing: &mut Option<oneshot::Receiver<bool>>) -> bool {
    match writing {
        Some(writing) => writing.await.unwrap_or(false),
        None => false,
    }
}
