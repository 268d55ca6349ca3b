//! Shows how far a job is: on a bar where there is one, in plain lines elsewhere.
//!
//! Shows only escaped text; decides nothing and writes no file.

use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar};
use nodus_protocol::StepReport;
use nodus_sandbox::services::{Event, Level};

use super::display::{Lines, Total, say, say_line};
use super::record::level_name;
use super::told::data_name;
use crate::text::{duration, escape};

/// How often a plain line is written, beside the first and the last step's.
const CADENCE: Duration = Duration::from_secs(5);

/// How long a job has run at least before a rate is said of it.
const RATED: Duration = Duration::from_secs(1);

/// Where progress goes.
pub(super) enum Sink {
    /// A bar on a screen with others.
    Bar(MultiProgress, ProgressBar),
    /// A share of one bar, and which.
    Total(Total, usize),
    /// Lines, and when the last one was written.
    Lines { out: Lines, written: Option<Instant> },
}

/// The display of one job.
pub(crate) struct Progress {
    sink: Sink,
    name: Option<String>,
    began: Option<Instant>,
    tokens: u64,
    done: u64,
    total: u64,
}

impl Progress {
    /// Nothing is done yet. A name stands in front of every line.
    pub(super) fn new(sink: Sink, name: Option<String>) -> Self {
        Self { sink, name, began: None, tokens: 0, done: 0, total: 0 }
    }

    /// Shows what an event changes.
    pub(crate) fn show(&mut self, event: &Event) {
        match event {
            Event::Progress { done, total } => {
                (self.done, self.total) = (*done, *total);
                self.began.get_or_insert_with(Instant::now);
                match &self.sink {
                    Sink::Bar(_, bar) => {
                        bar.set_position(*done);
                        if *total > 0 {
                            bar.set_length(*total);
                        }
                    }
                    Sink::Total(all, job) => all.set(*job, *done, *total),
                    Sink::Lines { .. } => {}
                }
            }
            Event::Step { adapter, report, .. } => self.step(*adapter, report),
            Event::Evaluation { adapter, step, data, sums } => {
                let (which, loss) = (which(*adapter), sums.mean());
                self.note(&format!("{} loss{which} after step {step}: {loss:.4}", data_name(*data)));
            }
            Event::Evaluating { done, total } => self.tell(&format!("evaluating, {done} of {total} sequences"), done == total),
            Event::Log { level, message } if *level != Level::Debug => self.note(&format!("{}: {}", level_name(*level), escape(message))),
            Event::Saved { .. } | Event::Metric { .. } | Event::Log { .. } => {}
        }
    }

    /// A line of its own.
    pub(super) fn note(&self, text: &str) {
        let text = self.named(text);
        match &self.sink {
            Sink::Bar(screen, _) => screen.suspend(|| say(&mut std::io::stderr(), &text)),
            Sink::Total(all, _) => all.note(&text),
            Sink::Lines { out, .. } => say_line(out, &text),
        }
    }

    fn named(&self, text: &str) -> String {
        self.name.as_ref().map_or_else(|| text.to_owned(), |name| format!("{name}: {text}"))
    }

    fn step(&mut self, adapter: u32, report: &StepReport) {
        self.tokens += report.sums.labelled;
        if adapter == 0 && self.total > 0 {
            // A guest reports its progress after the step, if at all.
            self.done = self.done.max(report.step.min(self.total));
        }
        if report.step == 1 && report.grad_norm == 0.0 {
            let why = "nothing is learned from what is labelled; look at the data and the adapter's targets";
            self.note(&format!("warn: the gradient of the first step{} is exactly 0: {why}", which(adapter)));
        }
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        let text = self.text(adapter, report, now - began);
        if let Sink::Total(all, job) = &self.sink {
            all.set(*job, self.done, self.total);
        }
        self.tell(&text, self.total > 0 && report.step >= self.total);
    }

    /// Says where the job is: beside the bar, or on a line where it is time for one.
    fn tell(&mut self, text: &str, is_last: bool) {
        let line = self.named(text);
        match &mut self.sink {
            Sink::Bar(_, bar) => bar.set_message(line),
            Sink::Total(..) => {}
            Sink::Lines { out, written } => {
                if is_last || written.is_none_or(|at| at.elapsed() >= CADENCE) {
                    *written = Some(Instant::now());
                    say_line(out, &line);
                }
            }
        }
    }

    /// `step 12/60, loss 3.4120, 410 tokens/s, 1 min 02 s left`. Tokens are those with a label.
    #[expect(clippy::cast_precision_loss, reason = "shown without decimals")]
    fn text(&self, adapter: u32, report: &StepReport, elapsed: Duration) -> String {
        let of = if self.total > 0 { format!("/{}", self.total) } else { String::new() };
        let mut text = format!("step {}{of}{}, loss {:.4}", report.step, which(adapter), report.loss);
        let seconds = elapsed.as_secs_f64();
        // A run that goes on tells at once what it did before: no rate follows from that, nor a time.
        let is_told = elapsed >= RATED;
        if is_told {
            text.push_str(&format!(", {:.0} tokens/s", self.tokens as f64 / seconds));
        }
        if is_told && self.done > 0 && self.total > self.done {
            // What the guest says of its progress can be anything: no time that a Duration cannot hold is shown.
            let left = seconds * ((self.total - self.done) as f64 / self.done as f64);
            if let Ok(left) = Duration::try_from_secs_f64(left) {
                text.push_str(&format!(", {} left", duration(left)));
            }
        }
        text
    }

    /// Takes the bar away.
    pub(crate) fn finish(&mut self) {
        match &self.sink {
            Sink::Bar(screen, bar) => {
                bar.finish_and_clear();
                screen.remove(bar);
            }
            Sink::Total(all, _) => all.leave(),
            Sink::Lines { .. } => {}
        }
    }
}

/// Which of the job's adapters; the first goes without saying.
fn which(adapter: u32) -> String {
    if adapter > 0 { format!(" of adapter {adapter}") } else { String::new() }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use nodus_protocol::{LossSums, StepReport};
    use nodus_sandbox::services::{Event, Level, Source};

    use super::super::display::Display;
    use super::Progress;

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

    fn lines(out: impl Write + Send + 'static, name: Option<&str>) -> Progress {
        Display::lines(Box::new(out)).job(name)
    }

    fn step(step: u64) -> Event {
        let sums = LossSums { loss_sum: 6.0, weight_sum: 2.0, labelled: 2, sequences: 1 };
        Event::Step { adapter: 0, report: StepReport { step, sums, loss: sums.mean(), grad_norm: 1.0 }, learning_rate: 0.1 }
    }

    #[test]
    fn plain_lines_come_at_the_first_and_last_step_and_nothing_is_unescaped() {
        let shared = Shared::default();
        let mut progress = lines(shared.clone(), None);
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
        let mut progress = lines(io::sink(), None);
        (progress.tokens, progress.done, progress.total) = (100, 5, 20);
        let Event::Step { report, .. } = step(5) else { unreachable!() };
        assert_eq!(progress.text(0, &report, Duration::from_secs(10)), "step 5/20, loss 3.0000, 10 tokens/s, 30 s left");
        assert_eq!(progress.text(0, &report, Duration::from_millis(10)), "step 5/20, loss 3.0000", "all of it was done before a resume");
        assert_eq!(progress.text(2, &report, Duration::from_secs(10)), "step 5/20 of adapter 2, loss 3.0000, 10 tokens/s, 30 s left");
    }

    #[test]
    fn what_a_guest_says_of_its_progress_can_be_anything() {
        let mut progress = lines(io::sink(), None);
        (progress.done, progress.total) = (1, u64::MAX);
        let Event::Step { report, .. } = step(1) else { unreachable!() };
        let text = progress.text(0, &report, Duration::from_secs(10));
        assert!(text.starts_with("step 1/18446744073709551615") && !text.contains("left"), "{text}");
    }

    #[test]
    fn a_first_gradient_of_nothing_and_what_was_evaluated_are_said() {
        let shared = Shared::default();
        let mut progress = lines(shared.clone(), None);
        let Event::Step { adapter, mut report, learning_rate } = step(1) else { unreachable!() };
        let sums = report.sums;
        report.grad_norm = 0.0;
        progress.show(&Event::Step { adapter, report, learning_rate });
        progress.show(&Event::Evaluation { adapter: 0, step: 1, data: Source::HeldOut, sums });
        progress.show(&Event::Evaluation { adapter: 2, step: 1, data: Source::Train, sums });
        progress.show(&Event::Evaluating { done: 5, total: 5 });
        let text = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("warn: the gradient of the first step is exactly 0: "), "{text}");
        assert_eq!(lines[2..4], ["held-out loss after step 1: 3.0000", "training-data loss of adapter 2 after step 1: 3.0000"]);
        assert_eq!(lines[4], "evaluating, 5 of 5 sequences");
    }

    #[test]
    fn lines_of_several_jobs_name_theirs() {
        let shared = Shared::default();
        lines(shared.clone(), Some("rank=4")).show(&step(1));
        let text = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        assert!(text.starts_with("rank=4: step 1, loss 3.0000"), "{text}");
    }
}
