//! Answers a job's questions from another process, within what the job was given.
//!
//! Every word is a stranger's: what no job could say ends the process that said it.

use nodus_protocol::wire::Grants;
use nodus_protocol::{AdapterWeights, Digest, JobSlot};
use nodus_sandbox::services::{Event, Refusal, Services as _};
use nodus_sandbox::{JobEnd, Limits, Outcome};
use serde_bytes::ByteBuf;

use super::bounds::Bounds;
use super::words::{Answer, Question, RowsWords, TrunkWords};
use crate::run::services::{RunServices, ours};

/// Bytes of a data set in one answer.
const CHUNK_BYTES: usize = 1 << 20;

/// The parent's side of one job.
pub(super) struct Broker {
    job: JobSlot,
    services: RunServices,
    bounds: Bounds,
    grants: Grants,
}

/// An answer for the job, or why its process must end.
type Answered = Result<Result<Answer, Refusal>, &'static str>;

impl Broker {
    pub(super) fn new(job: JobSlot, services: RunServices, limits: Limits, grants: Grants) -> Self {
        Self { job, services, bounds: Bounds::new(limits), grants }
    }

    /// # Errors
    /// What no job could have told.
    pub(super) fn event(&mut self, event: Event) -> Result<(), &'static str> {
        let is_answered = match &event {
            Event::Step { adapter, report, learning_rate } => self.grants.told_step(self.job, *adapter, report, *learning_rate),
            Event::Evaluation { adapter, step, sums, .. } => self.grants.told_evaluation(self.job, *adapter, *step, sums),
            _ => true,
        };
        if !is_answered {
            return Err("a result that the engine did not answer");
        }
        self.bounds.event(&event, self.grants.commands(self.job))?;
        self.services.event(event);
        Ok(())
    }

    /// How the job ended.
    ///
    /// # Errors
    /// What no job could have kept back.
    pub(super) fn end(&self, end: &JobEnd) -> Result<(), &'static str> {
        let is_whole = !matches!(end.outcome, Outcome::Completed) || self.grants.is_all_told(self.job);
        if is_whole { Ok(()) } else { Err("that a job is completed of which it did not tell every step") }
    }

    pub(super) async fn answer(&mut self, question: Question) -> Answered {
        let answer = match question {
            Question::Save(name, weights) => return self.save(&name, &weights).await,
            Question::Trunk(name) => self.trunk(&name).await,
            Question::Text => Ok(Answer::Text(self.services.text_files().clone())),
            Question::Rows(name) => {
                self.services.rows(&name).map(|rows| Answer::Rows(RowsWords { id: rows.id(), part: rows.part().clone() }))
            }
            Question::Bytes { rows, offset } => return self.bytes(rows, offset),
            Question::Load(digest) => self.load(digest).await,
            Question::Stopping(question) => {
                self.bounds.stopping()?;
                self.services.stopping(question).await.map(|()| Answer::Noted)
            }
        };
        Ok(answer.map_err(without_our_words))
    }

    async fn trunk(&mut self, name: &str) -> Result<Answer, Refusal> {
        let trunk = self.services.open_trunk(name).await?;
        Ok(Answer::Trunk(TrunkWords { config: trunk.config, digest: trunk.digest, slot: trunk.slot, has_text: trunk.text.is_some() }))
    }

    async fn load(&mut self, digest: Digest) -> Result<Answer, Refusal> {
        let trunk = self.services.trunk().clone();
        self.services.load_artifact(&trunk, digest).await.map(Answer::Weights)
    }

    async fn save(&mut self, name: &str, weights: &AdapterWeights) -> Answered {
        let trunk = self.services.trunk().clone();
        let bytes = self.bounds.save(name, weights, &trunk.config)?;
        let origins = self.grants.exported(self.job, weights);
        if origins.is_empty() {
            return Err("an adapter with other weights than the engine's");
        }
        let saved = self.services.save_artifact(&trunk, name, weights).await;
        if let Ok(digest) = saved {
            self.bounds.saved(name, bytes, digest, origins);
        }
        Ok(saved.map(Answer::Saved).map_err(without_our_words))
    }

    fn bytes(&self, rows: u64, offset: u64) -> Answered {
        let rows = self.services.all_rows().find(|known| known.id() == rows).ok_or("a data set that it was not given")?;
        Ok(match rows.bytes_at(offset, CHUNK_BYTES) {
            Ok(bytes) => Ok(Answer::Bytes(ByteBuf::from(bytes))),
            Err(error) => Err(ours("reading the data", &error)),
        })
    }
}

/// Our own errors may name files; they are for our log.
fn without_our_words(refusal: Refusal) -> Refusal {
    match refusal {
        Refusal::Internal(text) => {
            tracing::error!("{text}");
            Refusal::Internal("see the host's log".to_owned())
        }
        other => other,
    }
}
