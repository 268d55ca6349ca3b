//! Shows a run on the terminal: a bar where there is one, plain lines elsewhere.
//!
//! Shows only escaped text; decides nothing and writes no file.

use std::io::Write;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nodus_protocol::StepReport;
use nodus_sandbox::services::{Event, Level};

use super::record::level_name;
use crate::text::{duration, escape};

/// How often a plain line is written, beside the first and the last step's.
const CADENCE: Duration = Duration::from_secs(5);

/// Where progress goes.
enum Sink {
    Bar(ProgressBar),
    Lines { out: Box<dyn Write + Send>, written: Option<Instant> },
}

/// The display of one run.
pub(crate) struct Progress {
    sink: Sink,
    began: Option<Instant>,
    tokens: u64,
    done: u64,
    total: u64,
}

impl Progress {
    /// A bar on standard error.
    pub(crate) fn bar() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        // The template is ours and checked by a test; a plain bar is no reason to fail a run.
        bar.set_style(ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self::new(Sink::Bar(bar))
    }

    /// Plain lines.
    pub(crate) fn lines(out: Box<dyn Write + Send>) -> Self {
        Self::new(Sink::Lines { out, written: None })
    }

    fn new(sink: Sink) -> Self {
        Self { sink, began: None, tokens: 0, done: 0, total: 0 }
    }

    /// Shows what an event changes.
    pub(crate) fn show(&mut self, event: &Event) {
        match event {
            Event::Progress { done, total } => {
                (self.done, self.total) = (*done, *total);
                self.began.get_or_insert_with(Instant::now);
                if let Sink::Bar(bar) = &self.sink {
                    bar.set_position(*done);
                    if *total > 0 {
                        bar.set_length(*total);
                    }
                }
            }
            Event::Step { adapter, report, .. } => self.step(*adapter, report),
            Event::Evaluation { step, sums, .. } => self.note(&format!("held-out loss after step {step}: {:.4}", sums.mean())),
            Event::Log { level, message } if *level != Level::Debug => self.note(&format!("{}: {}", level_name(*level), escape(message))),
            Event::Saved { .. } | Event::Metric { .. } | Event::Log { .. } => {}
        }
    }

    /// A line of its own.
    pub(crate) fn note(&mut self, text: &str) {
        match &mut self.sink {
            Sink::Bar(bar) => bar.suspend(|| say(&mut std::io::stderr(), text)),
            Sink::Lines { out, .. } => say(out, text),
        }
    }

    fn step(&mut self, adapter: u32, report: &StepReport) {
        self.tokens += report.sums.labelled;
        if adapter == 0 && self.total > 0 {
            // A guest reports its progress after the step, if at all.
            self.done = self.done.max(report.step.min(self.total));
        }
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let text = self.text(adapter, report, now - began);
        match &mut self.sink {
            Sink::Bar(bar) => bar.set_message(text),
            Sink::Lines { out, written } => {
                let is_last = self.total > 0 && report.step >= self.total;
                if is_last || written.is_none_or(|at| now - at >= CADENCE) {
                    *written = Some(now);
                    say(out, &text);
                }
            }
        }
    }

    /// `step 12/60, loss 3.4120, 410 tokens/s, 1 min 02 s left`. Tokens are those with a label.
    #[expect(clippy::cast_precision_loss, reason = "shown without decimals")]
    fn text(&self, adapter: u32, report: &StepReport, elapsed: Duration) -> String {
        let of = if self.total > 0 { format!("/{}", self.total) } else { String::new() };
        let which = if adapter > 0 { format!(" of adapter {adapter}") } else { String::new() };
        let mut text = format!("step {}{of}{which}, loss {:.4}", report.step, report.loss);
        let seconds = elapsed.as_secs_f64();
        if seconds > 0.0 {
            text.push_str(&format!(", {:.0} tokens/s", self.tokens as f64 / seconds));
        }
        if self.done > 0 && self.total > self.done {
            let left = elapsed.mul_f64((self.total - self.done) as f64 / self.done as f64);
            text.push_str(&format!(", {} left", duration(left)));
        }
        text
    }

    /// Takes the bar away.
    pub(crate) fn finish(&mut self) {
        if let Sink::Bar(bar) = &self.sink {
            bar.finish_and_clear();
        }
    }
}

const TEMPLATE: &str = "{bar:30} {msg}";

/// Writes a line; a closed terminal is no reason to end a run.
fn say(out: &mut impl Write, text: &str) {
    if let Err(error) = writeln!(out, "{text}") {
        tracing::debug!(%error, "progress could not be shown");
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use indicatif::ProgressStyle;
    use nodus_protocol::{LossSums, StepReport};
    use nodus_sandbox::services::{Event, Level};

    use super::{Progress, TEMPLATE};

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(buffer);
            Ok(buffer.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn step(step: u64) -> Event {
        let sums = LossSums { loss_sum: 6.0, weight_sum: 2.0, labelled: 2, sequences: 1 };
        Event::Step { adapter: 0, report: StepReport { step, sums, loss: sums.mean(), grad_norm: 1.0 }, learning_rate: 0.1 }
    }

    #[test]
    fn plain_lines_come_at_the_first_and_last_step_and_nothing_is_unescaped() {
        let shared = Shared::default();
        let mut progress = Progress::lines(Box::new(shared.clone()));
        progress.show(&Event::Progress { done: 0, total: 4 });
        for n in 1..=4 {
            progress.show(&step(n));
            progress.show(&Event::Progress { done: n, total: 4 });
        }
        progress.show(&Event::Log { level: Level::Info, message: "\u{1b}]0;owned\u{7}".into() });
        progress.show(&Event::Log { level: Level::Debug, message: "hidden".into() });
        let text = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].starts_with("step 1/4, loss 3.0000") && lines[1].starts_with("step 4/4"), "{text}");
        assert_eq!(lines[2], "info: \\u{1b}]0;owned\\u{7}");
    }

    #[test]
    fn rate_and_time_left_follow_from_what_is_done() {
        let mut progress = Progress::lines(Box::new(io::sink()));
        (progress.tokens, progress.done, progress.total) = (100, 5, 20);
        let Event::Step { report, .. } = step(5) else { unreachable!() };
        assert_eq!(progress.text(0, &report, Duration::from_secs(10)), "step 5/20, loss 3.0000, 10 tokens/s, 30 s left");
        assert_eq!(progress.text(2, &report, Duration::from_secs(10)), "step 5/20 of adapter 2, loss 3.0000, 10 tokens/s, 30 s left");
    }

    #[test]
    fn the_template_is_sound() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
