//! What a guest process may say of a job: no more than the job's limits let it, and nothing that contradicts what its parent knows.
//!
//! An honest process never meets these bounds, since the sandbox in it keeps the same limits.

use std::collections::BTreeMap;

use nodus_protocol::{AdapterWeights, Digest, ModelConfig};
use nodus_sandbox::Limits;
use nodus_sandbox::limits::METRIC_NAME_BYTES_MAX;
use nodus_sandbox::services::Event;

/// What one job has said so far.
pub(super) struct Bounds {
    limits: Limits,
    log_bytes: u64,
    metrics: u64,
    progress_reports: u64,
    evaluations: u64,
    /// Reports of how far an evaluation is: each follows a piece, which is a command too.
    pieces: u64,
    /// Whether it was told to stop.
    is_stopping: bool,
    /// By name.
    saved: BTreeMap<String, Saved>,
}

/// An adapter that was saved.
struct Saved {
    /// Of its weights.
    bytes: u64,
    digest: Digest,
    /// Adapters that it can be, each with its step count, until it is told which.
    origins: Vec<(u32, u64)>,
}

/// Log lines that the sandbox itself adds at a job's end.
const CLOSING_BYTES: u64 = 1024;

impl Bounds {
    pub(super) fn new(limits: Limits) -> Self {
        let (log_bytes, metrics, progress_reports, evaluations, pieces) = Default::default();
        Self { limits, log_bytes, metrics, progress_reports, evaluations, pieces, is_stopping: false, saved: BTreeMap::new() }
    }

    /// Counts an event; `commands` is how many the job has sent to its engine.
    ///
    /// # Errors
    /// What no job could have said.
    pub(super) fn event(&mut self, event: &Event, commands: u64) -> Result<(), &'static str> {
        let count = |so_far: &mut u64, more: u64, most: u64, what: &'static str| {
            *so_far = so_far.saturating_add(more);
            if *so_far <= most { Ok(()) } else { Err(what) }
        };
        match event {
            Event::Log { message, .. } => {
                let most = self.limits.log_bytes.saturating_add(CLOSING_BYTES);
                count(&mut self.log_bytes, message.len() as u64 + 1, most, "a longer log than its limit")
            }
            Event::Metric { name, .. } if name.len() > METRIC_NAME_BYTES_MAX => Err("a longer metric name than there is"),
            Event::Metric { .. } => count(&mut self.metrics, 1, self.limits.metrics, "more metrics than its limit"),
            Event::Progress { .. } => count(&mut self.progress_reports, 1, self.limits.progress_reports, "more reports than its limit"),
            // These are held against the engine's own answers.
            Event::Step { .. } => Ok(()),
            Event::Evaluation { .. } => count(&mut self.evaluations, 1, self.limits.evaluations, "more evaluations than its limit"),
            Event::Evaluating { .. } => count(&mut self.pieces, 1, commands, "more pieces of evaluations than it asked for"),
            Event::Saved { adapter, step, name, digest } => {
                let saved = self.saved.get_mut(name).filter(|saved| saved.digest == *digest);
                // Told once for each time that it was saved.
                let origins = saved.map(|saved| std::mem::take(&mut saved.origins)).unwrap_or_default();
                if origins.contains(&(*adapter, *step)) { Ok(()) } else { Err("an adapter that it did not save") }
            }
        }
    }

    /// It learns that it is to stop.
    ///
    /// # Errors
    /// It knew already.
    pub(super) fn stopping(&mut self) -> Result<(), &'static str> {
        if std::mem::replace(&mut self.is_stopping, true) { Err("twice that it was told to stop") } else { Ok(()) }
    }

    /// Whether these weights may be saved under this name.
    ///
    /// # Errors
    /// What the sandbox would have refused.
    pub(super) fn save(&self, name: &str, weights: &AdapterWeights, model: &ModelConfig) -> Result<u64, &'static str> {
        weights.validate(model).map_err(|_| "an adapter that does not fit its model")?;
        let bytes = weights.modules.iter().map(|module| size_of::<f32>() as u64 * (module.a.len() + module.b.len()) as u64).sum::<u64>();
        let others = || self.saved.iter().filter(|(other, _)| *other != name);
        let total = others().map(|(_, saved)| saved.bytes).sum::<u64>().saturating_add(bytes);
        if others().count() as u64 + 1 > self.limits.artifacts || total > self.limits.artifact_bytes {
            return Err("more adapters than its limit");
        }
        Ok(bytes)
    }

    /// It was saved, being one of these adapters.
    pub(super) fn saved(&mut self, name: &str, bytes: u64, digest: Digest, origins: Vec<(u32, u64)>) {
        self.saved.insert(name.to_owned(), Saved { bytes, digest, origins });
    }
}
