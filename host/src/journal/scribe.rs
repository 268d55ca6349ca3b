//! Stands between a job and its engine, and writes down what the job is answered; where that is known from before, it answers itself.
//!
//! Never delivers that an engine died: whoever runs the job is told, and the job, run again, does not know.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use nodus_protocol::{Client, JobSlot, TrunkSlot, channel};
use tokio::sync::{mpsc, oneshot, watch};

use super::book::Book;
use super::carrier::Carrier;

/// Commands that may wait before the job must.
const QUEUE: usize = 64;

/// Where a job's calls go, and how often it is kept.
pub(crate) struct Terms {
    pub(crate) engine: Client,
    pub(crate) job: JobSlot,
    pub(crate) trunk: TrunkSlot,
    pub(crate) cohort: Option<u64>,
    /// How long after a snapshot the next is made.
    pub(crate) every: Duration,
}

/// Why a job cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Its engine has no device any more, or is gone.
    Lost(String),
    /// The host failed it: its journal, or a task.
    Host(String),
    /// It asked something else than before, or was answered something else: no further run can put that right.
    Diverged(String),
}

/// What became of the calls of one attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Answered from the journal.
    pub(crate) answered: u64,
    /// Computed again, and equal.
    pub(crate) repeated: u64,
    /// Optimiser steps among them.
    pub(crate) repeated_steps: u64,
    /// Snapshots that were made, and are on the disk.
    pub(crate) snapshots: u64,
    /// Work that was done again, in milliseconds of the time that it took at first.
    pub(crate) repeated_ms: u64,
}

/// What is told of it.
#[derive(Clone, Debug, Default)]
pub(super) struct News {
    pub(super) is_caught_up: bool,
    pub(super) fault: Option<Fault>,
    pub(super) tally: Tally,
}

/// What is asked of it.
pub(super) enum Ask {
    Checkpoint(oneshot::Sender<()>),
    End(oneshot::Sender<Last>),
}

/// How an attempt was at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Last {
    /// Whether the job was at work in its engine, or lost it at work.
    pub(crate) was_at_work: bool,
    /// Whether the job was kept further on than it had been before: what comes next is no repetition of this attempt.
    pub(crate) is_further: bool,
}

/// How many calls a job has made, as far as they were taken: at most as many as it has.
#[derive(Clone, Debug, Default)]
pub(crate) struct Calls(Arc<AtomicU64>);

impl Calls {
    pub(crate) fn made(&self) -> u64 {
        self.0.load(SeqCst)
    }

    pub(super) fn one_more(&self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// The scribe of one attempt at a job.
pub(crate) struct Scribe {
    client: Client,
    calls: Calls,
    asks: mpsc::Sender<Ask>,
    news: watch::Receiver<News>,
}

impl Scribe {
    /// From now on calls are carried.
    pub(crate) fn start(terms: Terms, book: Book) -> Self {
        let (client, inbox) = channel(QUEUE);
        let (asks, asked) = mpsc::channel(2);
        let (teller, news) = watch::channel(News { is_caught_up: book.is_new, ..News::default() });
        let calls = Calls::default();
        tokio::spawn(Carrier::new(terms, book, (teller, calls.clone())).work(inbox, asked));
        Self { client, calls, asks, news }
    }

    /// What the job has in place of its engine.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// How many calls the job makes.
    pub(crate) fn calls(&self) -> Calls {
        self.calls.clone()
    }

    /// Resolves when the job cannot go on.
    pub(crate) async fn failed(&self) -> Fault {
        let mut news = self.news.clone();
        let fault = news.wait_for(|news| news.fault.is_some()).await.ok().and_then(|news| news.fault.clone());
        fault.unwrap_or_else(|| Fault::Host("a task failed".to_owned()))
    }

    /// Why it could not go on, where it could not.
    pub(crate) fn fault(&self) -> Option<Fault> {
        self.news.borrow().fault.clone()
    }

    /// What became of its calls so far.
    pub(crate) fn tally(&self) -> Tally {
        self.news.borrow().tally
    }

    /// Whether every call of before was made again.
    pub(crate) fn is_caught_up(&self) -> bool {
        self.news.borrow().is_caught_up
    }

    /// Resolves when it is so.
    pub(crate) async fn caught_up(&self) {
        let mut news = self.news.clone();
        if news.wait_for(|news| news.is_caught_up).await.is_err() {
            std::future::pending().await
        }
    }

    /// Keeps the job as it is now, where that can be done, and carries none of its calls any more.
    pub(crate) async fn checkpoint(&self) {
        // A task that is gone keeps nothing any more.
        self.ask(Ask::Checkpoint).await;
    }

    /// Waits until all is written. The job has ended, or will hear nothing any more.
    pub(crate) async fn end(self) -> Last {
        self.ask(Ask::End).await.unwrap_or_default()
    }

    /// None where the task is gone.
    async fn ask<T>(&self, ask: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Option<T> {
        let (teller, done) = oneshot::channel();
        self.asks.send(ask(teller)).await.ok()?;
        done.await.ok()
    }
}
