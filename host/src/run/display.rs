//! The display of a run with many jobs: a bar for each, one bar for all of too many, or plain lines that name their job.
//!
//! Decides nothing; a closed terminal is no reason to end a run.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::progress::{Progress, Sink};

/// Most jobs with a bar of their own.
const BARS_MAX: usize = 16;
/// What does not fit the terminal's width is cut at its end.
const TEMPLATE: &str = "{bar:20} {wide_msg}";
const TEMPLATE_NAMED: &str = "{bar:10} {wide_msg}";
const TEMPLATE_ALL: &str = "{bar:20} {pos}/{len} steps, {wide_msg}";

/// Where lines go, from several threads.
pub(crate) type Lines = Arc<Mutex<Box<dyn Write + Send>>>;

/// The display of a run.
#[derive(Clone)]
pub(crate) struct Display(Kind);

#[derive(Clone)]
enum Kind {
    Bars(MultiProgress),
    Total(Total),
    Lines(Lines),
}

/// One bar for all jobs.
#[derive(Clone)]
pub(crate) struct Total {
    screen: MultiProgress,
    bar: ProgressBar,
    board: Arc<Mutex<Board>>,
}

#[derive(Default)]
struct Board {
    /// Done and total steps, by the job's number.
    steps: BTreeMap<usize, (u64, u64)>,
    ended: usize,
}

impl Display {
    /// For so many jobs: bars on a terminal, lines elsewhere; both on standard error.
    pub(crate) fn new(is_terminal: bool, jobs: usize) -> Self {
        if !is_terminal {
            return Self::lines(Box::new(std::io::stderr()));
        }
        let screen = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        if jobs <= BARS_MAX {
            return Self(Kind::Bars(screen));
        }
        let bar = screen.add(ProgressBar::new(0));
        bar.set_style(style(TEMPLATE_ALL));
        Self(Kind::Total(Total { screen, bar, board: Arc::default() }))
    }

    /// Plain lines.
    pub(crate) fn lines(out: Box<dyn Write + Send>) -> Self {
        Self(Kind::Lines(Arc::new(Mutex::new(out))))
    }

    /// The display of one job of it, named where there are several.
    pub(crate) fn job(&self, name: Option<&str>) -> Progress {
        let sink = match &self.0 {
            Kind::Lines(out) => Sink::Lines { out: out.clone(), written: None },
            Kind::Total(total) => Sink::Total(total.clone(), total.enter()),
            Kind::Bars(screen) => {
                let bar = screen.add(ProgressBar::no_length());
                bar.set_style(style(if name.is_some() { TEMPLATE_NAMED } else { TEMPLATE }));
                Sink::Bar(screen.clone(), bar)
            }
        };
        Progress::new(sink, name.map(str::to_owned))
    }

    /// A line of its own.
    pub(crate) fn note(&self, text: &str) {
        match &self.0 {
            Kind::Bars(screen) | Kind::Total(Total { screen, .. }) => screen.suspend(|| say(&mut std::io::stderr(), text)),
            Kind::Lines(out) => say_line(out, text),
        }
    }

    /// Takes what is left of it away.
    pub(crate) fn finish(&self) {
        if let Kind::Total(total) = &self.0 {
            total.bar.finish_and_clear();
        }
    }
}

/// The templates are ours and checked by a test; a plain bar is no reason to fail a run.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Total {
    fn enter(&self) -> usize {
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let job = board.steps.len();
        board.steps.insert(job, (0, 0));
        job
    }

    /// A job has come so far.
    pub(super) fn set(&self, job: usize, done: u64, total: u64) {
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        board.steps.insert(job, (done, total));
        let (done, total) =
            board.steps.values().fold((0, 0), |sum: (u64, u64), steps| (sum.0.saturating_add(steps.0), sum.1.saturating_add(steps.1)));
        self.bar.set_length(total.max(done));
        self.bar.set_position(done);
        self.bar.set_message(format!("{} jobs begun, {} ended", board.steps.len(), board.ended));
    }

    /// A job has ended.
    pub(super) fn leave(&self) {
        self.board.lock().unwrap_or_else(PoisonError::into_inner).ended += 1;
    }

    /// A line above the bar.
    pub(super) fn note(&self, text: &str) {
        self.screen.suspend(|| say(&mut std::io::stderr(), text));
    }
}

/// Writes a line to where several threads write.
pub(super) fn say_line(out: &Lines, text: &str) {
    say(&mut *out.lock().unwrap_or_else(PoisonError::into_inner), text);
}

/// Writes a line.
pub(super) fn say(out: &mut impl Write, text: &str) {
    if let Err(error) = writeln!(out, "{text}") {
        tracing::debug!(%error, "progress could not be shown");
    }
}

#[cfg(test)]
mod tests {
    use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

    use super::{TEMPLATE, TEMPLATE_ALL, TEMPLATE_NAMED, Total};

    #[test]
    fn the_templates_are_sound() {
        assert!([TEMPLATE, TEMPLATE_ALL, TEMPLATE_NAMED].iter().all(|template| ProgressStyle::with_template(template).is_ok()));
    }

    #[test]
    fn one_bar_adds_up_all_jobs() {
        let screen = MultiProgress::with_draw_target(ProgressDrawTarget::hidden());
        let total = Total { bar: screen.add(ProgressBar::new(0)), screen, board: std::sync::Arc::default() };
        let (first, second) = (total.enter(), total.enter());
        total.set(first, 3, 10);
        total.set(second, 10, 10);
        assert_eq!((total.bar.position(), total.bar.length()), (13, Some(20)));
    }
}
