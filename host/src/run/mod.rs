//! A run, told once, top-down: what was asked becomes jobs, jobs become ends, ends become receipts and a summary.
//!
//! Never publishes an adapter of a job that did not end well.

pub(crate) mod alarm;
mod asked;
mod certify;
pub(crate) mod choice;
mod claim;
pub(crate) mod conclude;
pub(crate) mod content;
pub(crate) mod course;
pub(crate) mod crew;
pub(crate) mod device;
pub(crate) mod display;
pub(crate) mod inputs;
mod keep;
pub(crate) mod needs;
pub(crate) mod neighbours;
mod output;
pub(crate) mod plan;
mod progress;
pub(crate) mod record;
pub(crate) mod recorder;
pub(crate) mod rows;
pub(crate) mod services;
pub(crate) mod sharing;
pub(crate) mod sizes;
pub(crate) mod stop;
mod summary;
pub(crate) mod tokens;
mod told;
mod view;

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use nodus_sandbox::{Limits, Sandbox, SandboxOptions};

use crate::app::Surroundings;
use crate::books::{Account, Again, Books, fresh_run};
use crate::cli::{Lane, RunArgs};
use crate::error::{Ending, refusal_code};
use crate::guest::{Terms, Workshop};
use crate::limits::over;
use crate::store::{Store, write_synced};

use conclude::{Kept, Office, Verdict, conclude};
use crew::{Crew, Fared, Post};
use device::Rig;
use display::Display;
use inputs::{Job, Opener};
pub(crate) use keep::Keep;
pub(crate) use output::Folder;
use output::Output;
use sharing::Sharing;
use stop::Stopper;
use summary::Machine;

/// Runs jobs on this machine and leaves their results in `args.out`.
///
/// # Errors
/// The user's: a refusal, or a job failed. Ours: the machine.
pub fn run(store: &Store, surroundings: &Surroundings, args: &RunArgs, out: &mut dyn Write) -> anyhow::Result<Ending> {
    let paths = surroundings.paths;
    let stopper = Stopper::listen()?;
    // Before anything is read, since a place that cannot be written to is known at once.
    let output = Output::create(paths, &args.out, args.resume)?;
    let asked = asked::asked(paths, args)?;
    let upload = over(Limits::DEFAULT, &args.limits);
    let sandbox = Arc::new(Sandbox::new(SandboxOptions { upload })?);
    let terms = Terms::from(args.sandbox);
    let workshop = Workshop::open(store, &sandbox, terms)?;
    let mut opener = Opener::new(store, paths, &workshop, upload.component_bytes);
    let open = |(number, asked)| opener.open(asked).map(Arc::new).or_else(|error| refused(store, number, error));
    let wanted = asked.into_iter().enumerate().take_while(|_| !stopper.is_asked());
    let jobs = wanted.map(open).collect::<anyhow::Result<Vec<_>>>()?;
    if stopper.is_asked() {
        return told::not_begun(out);
    }
    let at_once = match args.lane {
        Lane::Solo => 1,
        Lane::Fused => args.jobs.map_or(jobs.len(), |most| most.get().min(jobs.len())),
    };
    let wanted = (args.device.device, args.device.dtype);
    let chosen = choice::choose(store, surroundings, wanted, jobs.iter().map(|job| &*job.model))?;
    let buffer_bytes_max = needs::admit(&jobs, args.lane, at_once, (&chosen, args.device), paths)?;
    let mut books = Books::open(store.dir()?)?;
    let keep = match args.resume {
        false => Keep::begin(output.journal(), &jobs, (args.snapshot_every, args.journal_bytes), &books)?,
        true => Keep::go_on(output.journal(), &jobs, (args.snapshot_every, args.journal_bytes), &books)?,
    };
    let keep = Arc::new(keep);
    let posts = posts(jobs, &output)?;

    let began = Instant::now();
    let display = Display::new(surroundings.is_terminal, posts.len());
    display.note(&format!("computing on {}", chosen.name()));
    let rig = Rig { chosen: &chosen, args: args.device, buffer_bytes_max, expected: None, weights: None };
    let crew = Crew::start(sandbox, terms, (display.clone(), stopper, Some(keep.clone())), at_once, rig)?;
    let (fared, sharing) = crew.run(&posts, args.lane, at_once, rig);
    let wall_seconds = began.elapsed().as_secs_f64();

    let mut office = Office { components: Some(store), books: &mut books, lane: args.lane.name() };
    let ends = posts.iter().zip(&fared).enumerate();
    let verdicts: Vec<Verdict> = ends.map(|(number, (post, fared))| conclude(&mut office, &keep.account(number), post, fared)).collect();
    let left = leave(&output, args, (&posts, &fared, &verdicts), (at_once, wall_seconds, sharing), out);
    // Not before all is in its place.
    let rest = fared.iter().zip(&verdicts).filter(|(fared, verdict)| !verdict.is_over(fared, args.resume));
    let rest: Vec<&Fared> = rest.map(|(fared, _)| fared).collect();
    if rest.is_empty() {
        keep.end(&books, posts.len());
    } else if keep.leave(output.published().as_deref()) {
        told::rest(&rest, &display);
    }
    left
}

/// Puts the results in their place, and says what they are.
fn leave(
    output: &Output,
    args: &RunArgs,
    (posts, fared, verdicts): (&[Post], &[Fared], &[Verdict]),
    (at_once, wall_seconds, sharing): (usize, f64, Sharing),
    out: &mut dyn Write,
) -> anyhow::Result<Ending> {
    if let ([post], [fared], [verdict]) = (posts, fared, verdicts)
        && post.job.name.is_none()
    {
        match verdict.kept {
            // What is left is left by who says where it is.
            Kept::Nothing | Kept::Left => {}
            Kept::Records | Kept::All(_) => output.publish()?,
        }
        return told::one(output, post, fared, verdict, out);
    }
    let sequences = fared.iter().filter_map(Fared::figures).map(|figures| figures.sequences).sum();
    let reuse = if args.manifest.is_some() { None } else { sharing.reuse(sequences) };
    let machine = Machine::new(args.lane, at_once, wall_seconds, fared, (sharing, reuse));
    let rows = publish(output, posts, fared, verdicts, &machine).map_err(|error| {
        let place = output.leave();
        error.context(format!("what the jobs wrote stays in {place}"))
    })?;
    told::many(output, verdicts, &rows, &machine, out)
}

/// A job that was refused, nothing being started: where a stranger's component is to blame, the ledger says so.
fn refused<T>(store: &Store, number: usize, error: anyhow::Error) -> anyhow::Result<T> {
    if let Some(code) = refusal_code(&error) {
        Books::open(store.dir()?)?.fail(&Account::local(&fresh_run(), number, Again::Never), code)?;
    }
    Err(error)
}

/// Each job with its folder: the whole for the only one, else one named after it.
fn posts(jobs: Vec<Arc<Job>>, output: &Output) -> anyhow::Result<Vec<Post>> {
    let post = |job: Arc<Job>| {
        let folder = match &job.name {
            None => output.folder()?,
            Some(name) => output.subfolder(name)?,
        };
        Ok(Post { job, folder: Arc::new(folder) })
    };
    jobs.into_iter().map(post).collect()
}

/// Puts the results of several jobs in place with their summary, unless nothing was kept of any; the summary's rows.
fn publish(output: &Output, posts: &[Post], fared: &[Fared], verdicts: &[Verdict], machine: &Machine) -> anyhow::Result<Vec<summary::Row>> {
    let each = || posts.iter().zip(fared).zip(verdicts);
    let rows: Vec<_> = each().map(|((post, fared), verdict)| summary::row(post, fared, verdict)).collect();
    if verdicts.iter().all(|verdict| verdict.kept == Kept::Nothing) {
        return Ok(rows);
    }
    for ((post, _), verdict) in each() {
        match (&verdict.kept, post.job.name.as_deref()) {
            (Kept::Nothing, Some(name)) => output.remove_subfolder(name)?,
            (Kept::Left, Some(name)) => output.set_aside(name)?,
            _ => {}
        }
    }
    let whole = output.folder()?;
    write_synced(whole.dir(), summary::JSON, summary::json(&rows, machine)?.as_bytes())?;
    write_synced(whole.dir(), summary::CSV, summary::csv(&rows).as_bytes())?;
    output.publish()?;
    Ok(rows)
}
