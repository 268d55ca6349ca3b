//! What a job tells, as lines in the run's files and as the figures of its receipt.
//!
//! Holds no clock: equal runs give equal bytes.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::Context as _;
use cap_std::fs::File;
use nodus_protocol::{Digest, LossSums, StepReport};
use nodus_sandbox::services::{Event, Level, Source};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::output::Folder;
use crate::receipt::EvaluationEntry;
use crate::text::escape;

/// One line a step.
pub(crate) const LOSSES: &str = "losses.jsonl";
/// One line an evaluation.
pub(crate) const HELD_OUT: &str = "held_out.jsonl";
/// One line a number that the guest reported.
pub(crate) const METRICS: &str = "metrics.jsonl";
/// The guest's log, escaped.
pub(crate) const LOG: &str = "log.txt";

/// The name of the adapter that a job is after.
pub(crate) const ADAPTER: &str = "adapter";

/// A line of `losses.jsonl`.
#[derive(Serialize)]
struct StepLine {
    step: u64,
    loss: f32,
    loss_bits: String,
    /// After normalisation, before clipping.
    grad_norm: f32,
    learning_rate: f32,
    /// With a label.
    tokens: u64,
    /// Which of the job's adapters; left out for the first.
    #[serde(skip_serializing_if = "is_first")]
    adapter: u32,
}

/// A line of `held_out.jsonl`.
#[derive(Serialize)]
struct EvaluationLine {
    step: u64,
    loss: f32,
    loss_bits: String,
    tokens: u64,
    sequences: u64,
    /// The data set by the job's name for it: `held-out` or `train`; `own` where the guest made the sequences itself.
    data: &'static str,
    #[serde(skip_serializing_if = "is_first")]
    adapter: u32,
}

/// A line of `metrics.jsonl`. A value that is not finite is a string, since JSON has no number for it.
#[derive(Serialize)]
struct MetricLine<'a> {
    name: &'a str,
    step: u64,
    value: serde_json::Value,
}

impl StepLine {
    fn of(adapter: u32, report: &StepReport, learning_rate: f32) -> Self {
        let StepReport { step, loss, grad_norm, sums } = *report;
        Self { step, loss, loss_bits: loss_bits(loss), grad_norm, learning_rate, tokens: sums.labelled, adapter }
    }
}

impl EvaluationLine {
    fn of(adapter: u32, step: u64, data: Source, sums: &LossSums) -> Self {
        let loss = sums.mean();
        let (tokens, sequences, data) = (sums.labelled, sums.sequences, data.name());
        Self { step, loss, loss_bits: loss_bits(loss), tokens, sequences, data, adapter }
    }
}

impl<'a> MetricLine<'a> {
    fn of(name: &'a str, step: u64, value: f64) -> Self {
        let number = serde_json::Number::from_f64(value);
        Self { name, step, value: number.map_or_else(|| value.to_string().into(), serde_json::Value::Number) }
    }
}

/// A line of a live log: what `log.txt` has, not escaped.
#[derive(Serialize)]
struct LogLine<'a> {
    level: &'static str,
    message: &'a str,
}

/// An adapter that was saved, live.
#[derive(Serialize)]
struct SavedLine<'a> {
    name: &'a str,
    digest: Digest,
    step: u64,
    adapter: u32,
}

/// How far the job says it is.
#[derive(Serialize)]
struct ProgressLine {
    done: u64,
    total: u64,
}

/// An event as one JSON object, the fields those of the files' lines; none of what is no event to its owner.
///
/// # Errors
/// None that any event has.
pub(crate) fn json(event: &Event) -> serde_json::Result<Option<String>> {
    let text = match event {
        Event::Step { adapter, report, learning_rate } => serde_json::to_string(&StepLine::of(*adapter, report, *learning_rate)),
        Event::Evaluation { adapter, step, data, sums } => serde_json::to_string(&EvaluationLine::of(*adapter, *step, *data, sums)),
        Event::Metric { name, step, value } => serde_json::to_string(&MetricLine::of(name, *step, *value)),
        Event::Log { level, message } => serde_json::to_string(&LogLine { level: level_name(*level), message }),
        Event::Saved { adapter, step, name, digest } => {
            serde_json::to_string(&SavedLine { name, digest: *digest, step: *step, adapter: *adapter })
        }
        Event::Progress { done, total } => serde_json::to_string(&ProgressLine { done: *done, total: *total }),
        Event::Evaluating { .. } => return Ok(None),
    };
    text.map(Some)
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_first(adapter: &u32) -> bool {
    *adapter == 0
}

/// A float32's bits, as every file and receipt writes them: `0x40b80d3c`.
pub(crate) fn loss_bits(loss: f32) -> String {
    format!("0x{:08x}", loss.to_bits())
}

/// An adapter that was saved, for the receipt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Saved {
    /// Which of the job's adapters.
    pub(crate) adapter: u32,
    /// Its step count at that time.
    pub(crate) step: u64,
    /// The artifact.
    pub(crate) digest: Digest,
}

/// What the events amount to.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    /// Optimiser steps of all adapters.
    pub(crate) steps: u64,
    /// Labelled tokens of all steps.
    pub(crate) tokens: u64,
    /// Sequences of all steps and evaluations.
    pub(crate) sequences: u64,
    /// Evaluations, in order.
    pub(crate) evaluations: Vec<EvaluationEntry>,
    /// The latest adapter of each name.
    pub(crate) saved: BTreeMap<String, Saved>,
    /// The last step's loss.
    pub(crate) last_loss: Option<f32>,
    /// First and last loss of each adapter on each data set.
    pub(crate) evaluated: BTreeMap<(Source, u32), (f32, f32)>,
    /// Over the `loss_bits` of every line of `losses.jsonl`, each with a newline: `jq -r .loss_bits losses.jsonl | sha256sum`.
    pub(crate) loss_digest: Digest,
}

impl Figures {
    /// The adapter that the job is after: the one saved as `adapter`, else the first.
    pub(crate) fn result(&self) -> u32 {
        self.saved.get(ADAPTER).map_or(0, |saved| saved.adapter)
    }

    /// Its first and last loss on a data set.
    pub(crate) fn result_on(&self, data: Source) -> Option<(f32, f32)> {
        self.evaluated.get(&(data, self.result())).copied()
    }

    fn new() -> Self {
        let (evaluations, saved) = (Vec::new(), BTreeMap::new());
        Self {
            steps: 0,
            tokens: 0,
            sequences: 0,
            evaluations,
            saved,
            last_loss: None,
            evaluated: BTreeMap::new(),
            loss_digest: Digest::of(b""),
        }
    }
}

/// The open files of a run.
pub(crate) struct Record {
    losses: File,
    held_out: File,
    metrics: File,
    log: File,
    loss_hash: Sha256,
    figures: Figures,
}

impl Record {
    /// Creates the files in a run's folder.
    pub(crate) fn create(folder: &Folder) -> anyhow::Result<Self> {
        Ok(Self {
            losses: folder.file(LOSSES)?,
            held_out: folder.file(HELD_OUT)?,
            metrics: folder.file(METRICS)?,
            log: folder.file(LOG)?,
            loss_hash: Sha256::new(),
            figures: Figures::new(),
        })
    }

    /// Writes down one event.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(crate) fn take(&mut self, event: &Event) -> anyhow::Result<()> {
        match event {
            Event::Step { adapter, report, learning_rate } => self.step(*adapter, report, *learning_rate),
            Event::Evaluation { adapter, step, data, sums } => self.evaluation(*adapter, *step, *data, sums),
            Event::Saved { adapter, step, name, digest } => {
                let saved = Saved { adapter: *adapter, step: *step, digest: *digest };
                self.figures.saved.insert(name.clone(), saved);
                Ok(())
            }
            Event::Metric { name, step, value } => line(&mut self.metrics, METRICS, &MetricLine::of(name, *step, *value)),
            Event::Log { level, message } => {
                let text = format!("{}: {}\n", level_name(*level), escape(message));
                self.log.write_all(text.as_bytes()).with_context(|| format!("writing {LOG}"))
            }
            Event::Progress { .. } | Event::Evaluating { .. } => Ok(()),
        }
    }

    fn step(&mut self, adapter: u32, report: &StepReport, learning_rate: f32) -> anyhow::Result<()> {
        let line_of = StepLine::of(adapter, report, learning_rate);
        self.loss_hash.update(&line_of.loss_bits);
        self.loss_hash.update("\n");
        self.figures.steps += 1;
        self.figures.tokens += report.sums.labelled;
        self.figures.sequences += report.sums.sequences;
        self.figures.last_loss = Some(report.loss);
        line(&mut self.losses, LOSSES, &line_of)
    }

    fn evaluation(&mut self, adapter: u32, step: u64, data: Source, sums: &LossSums) -> anyhow::Result<()> {
        let line_of = EvaluationLine::of(adapter, step, data, sums);
        self.figures.sequences += sums.sequences;
        self.figures.evaluations.push(EvaluationEntry { adapter, step, loss_bits: line_of.loss_bits.clone() });
        self.figures.evaluated.entry((data, adapter)).or_insert((line_of.loss, line_of.loss)).1 = line_of.loss;
        line(&mut self.held_out, HELD_OUT, &line_of)
    }

    /// Waits until everything is on the disk; the figures.
    ///
    /// # Errors
    /// Ours: the disk refuses.
    pub(crate) fn finish(mut self) -> anyhow::Result<Figures> {
        for (file, name) in [(&self.losses, LOSSES), (&self.held_out, HELD_OUT), (&self.metrics, METRICS), (&self.log, LOG)] {
            file.sync_all().with_context(|| format!("writing {name}"))?;
        }
        self.figures.loss_digest = Digest::from_bytes(self.loss_hash.finalize().into());
        Ok(self.figures)
    }
}

fn line(file: &mut File, name: &str, value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    file.write_all(&text).with_context(|| format!("writing {name}"))
}

/// A level's name.
pub(crate) fn level_name(level: Level) -> &'static str {
    match level {
        Level::Debug => "debug",
        Level::Info => "info",
        Level::Warn => "warn",
        Level::Error => "error",
    }
}

#[cfg(test)]
pub(super) mod tests {
    use nodus_protocol::{Digest, LossSums, StepReport};
    use nodus_sandbox::services::{Event, Level, Source};

    use super::super::output::{Folder, Output};
    use super::{Figures, Record};
    use crate::paths::Paths;

    impl Record {
        /// With a log that no byte can be written to, as on a full disk.
        pub(in super::super) fn with_unwritable_log(mut self, folder: &Folder) -> Self {
            self.log = folder.dir().open(super::LOG).unwrap();
            self
        }
    }

    /// Events of a small run.
    pub(in super::super) fn events() -> Vec<Event> {
        let sums = LossSums { loss_sum: 23.006, weight_sum: 4.0, labelled: 4, sequences: 2 };
        let report = |step| StepReport { step, sums, loss: sums.mean(), grad_norm: 0.5 };
        vec![
            Event::Evaluation { adapter: 0, step: 0, data: Source::HeldOut, sums },
            Event::Evaluating { done: 1, total: 2 },
            Event::Progress { done: 0, total: 2 },
            Event::Step { adapter: 0, report: report(1), learning_rate: 1e-3 },
            Event::Step { adapter: 1, report: report(1), learning_rate: 2e-3 },
            Event::Metric { name: "reward".into(), step: 1, value: f64::NAN },
            Event::Log { level: Level::Warn, message: "red \u{1b}[31m\nforged: line".into() },
            Event::Saved { adapter: 0, step: 1, name: "adapter".into(), digest: Digest::of(b"first") },
            Event::Saved { adapter: 0, step: 1, name: "adapter".into(), digest: Digest::of(b"second") },
        ]
    }

    fn record() -> (Figures, [String; 4]) {
        let root = tempfile::tempdir().unwrap();
        let output = Output::create(Paths::new(cap_std::ambient_authority()), &root.path().join("out"), false).unwrap();
        let folder = output.folder().unwrap();
        let mut record = Record::create(&folder).unwrap();
        for event in events() {
            record.take(&event).unwrap();
        }
        let figures = record.finish().unwrap();
        let read = |name| folder.dir().read_to_string(name).unwrap();
        (figures, [super::LOSSES, super::HELD_OUT, super::METRICS, super::LOG].map(read))
    }

    #[test]
    fn each_event_is_one_line_in_its_file() {
        let (figures, [losses, held_out, metrics, log]) = record();
        assert_eq!(
            losses,
            "{\"step\":1,\"loss\":5.7515,\"loss_bits\":\"0x40b80c4a\",\"grad_norm\":0.5,\"learning_rate\":0.001,\"tokens\":4}\n\
             {\"step\":1,\"loss\":5.7515,\"loss_bits\":\"0x40b80c4a\",\"grad_norm\":0.5,\"learning_rate\":0.002,\"tokens\":4,\"adapter\":1}\n"
        );
        assert_eq!(
            held_out,
            "{\"step\":0,\"loss\":5.7515,\"loss_bits\":\"0x40b80c4a\",\"tokens\":4,\"sequences\":2,\"data\":\"held-out\"}\n"
        );
        assert_eq!(metrics, "{\"name\":\"reward\",\"step\":1,\"value\":\"NaN\"}\n");
        assert_eq!(log, "warn: red \\u{1b}[31m\\nforged: line\n");
        assert_eq!((figures.steps, figures.tokens, figures.sequences, figures.evaluations.len()), (2, 8, 6, 1));
        assert_eq!(figures.saved["adapter"].digest, Digest::of(b"second"));
        assert_eq!(figures.loss_digest, Digest::of(b"0x40b80c4a\n0x40b80c4a\n"));
    }

    #[test]
    fn the_figures_are_those_of_the_adapter_that_was_kept() {
        let root = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let folder = Folder::new(root.try_clone().unwrap(), "out".into());
        let mut record = Record::create(&folder).unwrap();
        let mut evaluate = |adapter, data, loss_sum| {
            let sums = LossSums { loss_sum, weight_sum: 1.0, labelled: 1, sequences: 1 };
            record.take(&Event::Evaluation { adapter, step: 0, data, sums }).unwrap();
        };
        for (adapter, data, loss) in [
            (0, Source::HeldOut, 5.0),
            (1, Source::HeldOut, 4.0),
            (1, Source::HeldOut, 3.0),
            (1, Source::Train, 1.0),
            (0, Source::HeldOut, 9.0),
        ] {
            evaluate(adapter, data, loss);
        }
        record.take(&Event::Saved { adapter: 1, step: 2, name: "adapter".into(), digest: Digest::of(b"x") }).unwrap();
        let figures = record.finish().unwrap();
        assert_eq!(figures.result_on(Source::HeldOut), Some((4.0, 3.0)));
        assert_eq!((figures.result_on(Source::Train), figures.result_on(Source::Own)), (Some((1.0, 1.0)), None));
    }

    #[test]
    fn the_same_events_give_the_same_bytes() {
        assert_eq!(record().1, record().1);
    }
}
