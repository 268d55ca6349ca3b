//! What is said of a run that ended, and the exit code that follows.
//!
//! Says it once, after everything is in its place.

use std::io::Write;

use anyhow::Context as _;
use nodus_sandbox::services::Source;

use super::conclude::{Kept, Status, Verdict};
use super::crew::{Fared, Post};
use super::display::Display;
use super::output::Output;
use super::record::{ADAPTER, Figures};
use super::summary::{self, CSV, JSON, Machine, Row};
use crate::error::{Ending, user};
use crate::paths::shown;
use crate::text::count;

/// The only job of a run.
///
/// # Errors
/// The user's where the job failed; ours where the host did.
pub(super) fn one(output: &Output, post: &Post, fared: &Fared, verdict: &Verdict, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let kept = verdict.kept_text(post, fared);
    match &verdict.status {
        Status::Completed | Status::Stopped => {
            let is_stopped = matches!(verdict.status, Status::Stopped);
            say(out, &success(fared, verdict, is_stopped, kept))?;
            Ok(if is_stopped { Ending::Interrupted } else { Ending::Done })
        }
        Status::Cancelled | Status::NotStarted => {
            say(out, &[format!("cancelled: {kept}")])?;
            Ok(Ending::Interrupted)
        }
        Status::Failed(reason) => Err(user(format!("the job failed: {reason}\n{kept}"))),
        Status::Broken(error) => {
            let place = if verdict.kept == Kept::Left { format!(", in {}", output.leave()) } else { String::new() };
            Err(anyhow::anyhow!("{error:#}")).context(format!("the host failed while it ran the job; {kept}{place}"))
        }
    }
}

/// Jobs that were cut off or failed by the host, while what lets them go on is there.
pub(super) fn rest(jobs: &[&Fared], display: &Display) {
    if jobs.iter().any(|fared| !fared.has_diverged()) {
        display.note("`--resume` goes on with what was cut off, from where it was");
    }
    if jobs.iter().any(|fared| fared.has_diverged()) {
        display.note("what did otherwise when it was run again would do so every time: it must be run anew, without `--resume`");
    }
}

/// A run that was interrupted before any job could start.
///
/// # Errors
/// Ours: standard output.
pub(super) fn not_begun(out: &mut dyn Write) -> anyhow::Result<Ending> {
    say(out, &["cancelled: nothing was kept, since no step was taken".to_owned()])?;
    Ok(Ending::Interrupted)
}

fn success(fared: &Fared, verdict: &Verdict, is_stopped: bool, kept: String) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(figures) = fared.figures() {
        let how = if is_stopped { "stopped on request after" } else { "completed" };
        let loss = figures.last_loss.map_or_else(String::new, |loss| format!(", last loss {loss:.4}"));
        lines.push(format!("{how} {}{loss}, {} with a label", count(figures.steps, "step"), count(figures.tokens, "token")));
        lines.extend(Source::ALL.into_iter().filter_map(|data| evaluated(figures, data)));
    }
    lines.push(kept);
    // A job that only evaluates has none to save.
    let has_trained = fared.figures().is_some_and(|figures| figures.steps > 0);
    if has_trained && matches!(&verdict.kept, Kept::All(adapters) if !adapters.iter().any(|name| name == ADAPTER)) {
        lines.push("the job saved no adapter named `adapter`".to_owned());
    }
    lines
}

/// The losses of the job's adapter on one kind of data.
fn evaluated(figures: &Figures, data: Source) -> Option<String> {
    let (first, last) = figures.result_on(data)?;
    let adapters = figures.evaluated.keys().filter(|(of, _)| *of == data).count();
    let whose = if adapters > 1 { format!(" of adapter {}", figures.result()) } else { String::new() };
    let losses = if first.to_bits() == last.to_bits() { format!("{last:.4}") } else { format!("{first:.4} first, {last:.4} last") };
    Some(format!("{} loss{whose}: {losses}", data_name(data)))
}

/// What kind of data that is, in front of `loss`.
pub(super) fn data_name(data: Source) -> &'static str {
    match data {
        Source::HeldOut => "held-out",
        Source::Train => "training-data",
        Source::Own => "own-data",
    }
}

/// Several jobs.
///
/// # Errors
/// Ours where the host failed one of them, else the user's where one failed.
pub(super) fn many(output: &Output, verdicts: &[Verdict], rows: &[Row], machine: &Machine, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let is_kept = verdicts.iter().any(|verdict| verdict.kept != Kept::Nothing);
    let kept = match is_kept {
        true => format!("kept in {}: a folder for each job, {JSON}, {CSV}", shown(output.path())),
        false => "nothing was kept, since no job took a step".to_owned(),
    };
    let mut lines: Vec<String> = summary::table(rows).lines().map(str::to_owned).collect();
    lines.push(format!("{} in {:.1} s, lane {}", count(rows.len() as u64, "job"), machine.wall_seconds, machine.lane));
    lines.extend(machine.sharing.lines(machine.reuse));
    lines.push(kept);
    say(out, &lines)?;
    ending(verdicts, rows)
}

fn ending(verdicts: &[Verdict], rows: &[Row]) -> anyhow::Result<Ending> {
    let named = |is_wanted: fn(&Status) -> bool| {
        let wanted = verdicts.iter().zip(rows).filter(|(verdict, _)| is_wanted(&verdict.status));
        wanted.map(|(_, row)| row.name.as_str()).collect::<Vec<_>>()
    };
    let broken = named(|status| matches!(status, Status::Broken(_)));
    if !broken.is_empty() {
        let (jobs, names) = (count(rows.len() as u64, "job"), broken.join(", "));
        anyhow::bail!("the host failed {} of {jobs}: {names}; what they wrote is left in folders named .NAME.unsigned", broken.len());
    }
    let failed = named(|status| matches!(status, Status::Failed(_)));
    if !failed.is_empty() {
        return Err(user(format!("{} of {} failed: {}", failed.len(), count(rows.len() as u64, "job"), failed.join(", "))));
    }
    let is_whole = verdicts.iter().all(|verdict| matches!(verdict.status, Status::Completed));
    Ok(if is_whole { Ending::Done } else { Ending::Interrupted })
}

fn say(out: &mut dyn Write, lines: &[String]) -> anyhow::Result<()> {
    lines.iter().try_for_each(|line| writeln!(out, "{line}")).context("writing to standard output")
}

#[cfg(test)]
mod tests {
    use super::{Row, Status, Verdict, ending};
    use crate::error::{Ending, exit_code};
    use crate::run::conclude::Kept;

    fn ends(statuses: Vec<Status>) -> anyhow::Result<Ending> {
        let row = |name: usize| Row {
            name: format!("job{name}"),
            parameters: serde_json::Map::new(),
            status: "",
            reason: None,
            steps: 0,
            loss: None,
            loss_bits: None,
            held_out_loss: None,
            held_out_loss_bits: None,
            adapter: None,
        };
        let rows: Vec<Row> = (0..statuses.len()).map(row).collect();
        let verdicts: Vec<Verdict> = statuses.into_iter().map(|status| Verdict { status, kept: Kept::Records }).collect();
        ending(&verdicts, &rows)
    }

    #[test]
    fn the_exit_code_says_whose_fault_it_is() {
        assert_eq!(ends(vec![Status::Completed, Status::Completed]).unwrap(), Ending::Done);
        assert_eq!(ends(vec![Status::Completed, Status::Stopped]).unwrap(), Ending::Interrupted);
        assert_eq!(ends(vec![Status::NotStarted, Status::Cancelled]).unwrap(), Ending::Interrupted);
        let theirs = ends(vec![Status::Completed, Status::Failed("bad".into()), Status::Stopped]).unwrap_err();
        assert_eq!((exit_code(&theirs), theirs.to_string().as_str()), (2, "1 of 3 jobs failed: job1"));
        let ours = ends(vec![Status::Failed("bad".into()), Status::Broken(anyhow::anyhow!("disk"))]).unwrap_err();
        assert_eq!(
            (exit_code(&ours), ours.to_string().as_str()),
            (1, "the host failed 1 of 2 jobs: job1; what they wrote is left in folders named .NAME.unsigned")
        );
    }
}
