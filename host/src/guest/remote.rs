//! A job's services within a guest process: every one of them is asked of the parent.
//!
//! Holds no authority; it can ask, and be refused.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use nodus_protocol::{AdapterWeights, Client, Digest, JobSlot};
use nodus_sandbox::services::{Dataset, Event, Refusal, Services, Text, Trunk};
use tokio::sync::{mpsc, oneshot};

use super::shelf::{Shelf, ShelfText};
use super::words::{Answer, FromJob, Question, RowsWords, ToParent, TrunkWords};
use crate::run::services::ours;

/// The way to the parent. All clones are one.
#[derive(Clone)]
pub(super) struct Parent {
    /// Never waits: what a job tells is bounded by its limits, and by its waiting for answers.
    out: mpsc::UnboundedSender<ToParent>,
    asking: Arc<Mutex<Asking>>,
}

#[derive(Default)]
struct Asking {
    next: u64,
    waiting: HashMap<u64, oneshot::Sender<Result<Answer, Refusal>>>,
}

impl Parent {
    pub(super) fn new(out: mpsc::UnboundedSender<ToParent>) -> Self {
        Self { out, asking: Arc::default() }
    }

    pub(super) fn tell(&self, words: ToParent) {
        // Without a parent this process ends.
        drop(self.out.send(words));
    }

    /// The parent answered.
    pub(super) fn answered(&self, ask: u64, answer: Result<Answer, Refusal>) {
        if let Some(asker) = self.lock().waiting.remove(&ask) {
            drop(asker.send(answer));
        }
    }

    async fn ask(&self, job: JobSlot, question: Question) -> Result<Answer, Refusal> {
        let (sender, answer) = oneshot::channel();
        let ask = {
            let mut asking = self.lock();
            let ask = asking.next;
            asking.next += 1;
            asking.waiting.insert(ask, sender);
            ask
        };
        self.tell(ToParent::Of(job, FromJob::Ask(ask, question)));
        answer.await.unwrap_or_else(|_| Err(ours("asking the parent process", &"it is gone")))
    }

    fn lock(&self) -> MutexGuard<'_, Asking> {
        self.asking.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The services of one job.
pub(super) struct Remote {
    pub(super) job: JobSlot,
    pub(super) parent: Parent,
    pub(super) engine: Client,
    pub(super) shelf: Arc<Shelf>,
}

impl Remote {
    async fn ask(&self, question: Question) -> Result<Answer, Refusal> {
        self.parent.ask(self.job, question).await
    }

    async fn text(&self, words: &TrunkWords) -> Result<Option<Arc<ShelfText>>, Refusal> {
        if !words.has_text {
            return Ok(None);
        }
        if let Some(text) = self.shelf.text(words.digest) {
            return Ok(Some(text));
        }
        match self.ask(Question::Text).await? {
            Answer::Text(files) => Ok(Some(self.shelf.put_text(words.digest, files))),
            other => Err(strange(&other)),
        }
    }

    async fn whole(&self, rows: u64) -> Result<Vec<u8>, Refusal> {
        let mut whole = Vec::new();
        loop {
            match self.ask(Question::Bytes { rows, offset: whole.len() as u64 }).await? {
                Answer::Bytes(bytes) if bytes.is_empty() => return Ok(whole),
                Answer::Bytes(bytes) => whole.extend_from_slice(&bytes),
                other => return Err(strange(&other)),
            }
        }
    }
}

fn strange(answer: &Answer) -> Refusal {
    Refusal::Internal(format!("the parent process gave an answer to another question: {answer:?}").chars().take(200).collect())
}

#[async_trait]
impl Services for Remote {
    async fn open_trunk(&mut self, name: &str) -> Result<Trunk, Refusal> {
        match self.ask(Question::Trunk(name.to_owned())).await? {
            Answer::Trunk(words) => {
                let text = self.text(&words).await?.map(|text| text as Arc<dyn Text>);
                Ok(Trunk { config: words.config, digest: words.digest, engine: self.engine.clone(), slot: words.slot, text })
            }
            other => Err(strange(&other)),
        }
    }

    async fn open_dataset(&mut self, name: &str, trunk: &Trunk, max_length: usize) -> Result<Dataset, Refusal> {
        let words = match self.ask(Question::Rows(name.to_owned())).await? {
            Answer::Rows(words) => words,
            other => return Err(strange(&other)),
        };
        let RowsWords { id, .. } = words;
        let rows = self.shelf.rows(words);
        let _reading = rows.reading.lock().await;
        if let Some(data) = rows.peek(trunk, max_length) {
            return Ok(data);
        }
        let whole = self.whole(id).await?;
        let (read, trunk, text) = (rows.clone(), trunk.clone(), self.shelf.text(trunk.digest));
        let work = move || read.tokenise(whole, &trunk, text.as_deref(), max_length);
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(ours("tokenising the data", &error)))
    }

    async fn load_artifact(&mut self, _: &Trunk, digest: Digest) -> Result<Arc<AdapterWeights>, Refusal> {
        match self.ask(Question::Load(digest)).await? {
            Answer::Weights(weights) => Ok(weights),
            other => Err(strange(&other)),
        }
    }

    async fn save_artifact(&mut self, _: &Trunk, name: &str, weights: &AdapterWeights) -> Result<Digest, Refusal> {
        match self.ask(Question::Save(name.to_owned(), Box::new(weights.clone()))).await? {
            Answer::Saved(digest) => Ok(digest),
            other => Err(strange(&other)),
        }
    }

    async fn stopping(&mut self, question: u64) -> Result<(), Refusal> {
        match self.ask(Question::Stopping(question)).await? {
            Answer::Noted => Ok(()),
            other => Err(strange(&other)),
        }
    }

    fn event(&mut self, event: Event) {
        self.parent.tell(ToParent::Of(self.job, FromJob::Event(event)));
    }
}
