//! A job that is cut off anywhere goes on to the same answers, and its engine does again no more than what no snapshot has.

mod room;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cap_tempfile::TempDir;
use nodus_protocol::{
    AdamW, AdapterSlot, AdapterState, Client, Command, Digest, EngineError, ErrorKind, JobSlot, JobState, LayerSelection, LoraConfig,
    LossSums, Module, Normalisation, Reply, StepReport, TrunkSlot, channel,
};

use super::book::Book;
use super::space::{Account, Space};
use super::{BegunElsewhere, Fault, Scribe, Tally, Terms};

const JOB: JobSlot = JobSlot(4);
const SLOT: AdapterSlot = AdapterSlot { job: JOB, index: 0 };
/// Calls of the whole job: an adapter is made, then steps are taken.
const CALLS: u64 = 12;
const NEVER: Duration = Duration::from_secs(3600);

fn config() -> LoraConfig {
    LoraConfig {
        rank: 1,
        alpha: 1.0,
        rslora: false,
        dropout: 0.0,
        targets: vec![Module::QProj],
        layers: LayerSelection::All,
        overrides: Vec::new(),
    }
}

/// What an engine of these tests does that none should.
#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    None,
    /// Its steps are others.
    Off,
    /// It has lost its device after so many steps.
    LostAfter(u64),
    /// What it holds is more than it can hand out.
    TooMuch,
    /// It refuses every step, in many words.
    Wordy,
}

/// An engine whose steps say how many were taken before them; what it was asked.
fn engine(flaw: Flaw) -> (Client, Arc<Mutex<Vec<String>>>) {
    let (client, mut inbox) = channel(16);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heard = seen.clone();
    std::thread::spawn(move || {
        let mut steps = 0;
        while let Some(request) = inbox.blocking_recv() {
            let (what, reply) = match &request.command {
                Command::CreateAdapter { .. } => ("create", Ok(Reply::Done)),
                Command::DropAdapter { .. } => ("drop", Ok(Reply::Done)),
                Command::OptimStep { .. } => {
                    steps += 1;
                    let sums = LossSums { loss_sum: 1.0 / steps as f64, weight_sum: 1.0, labelled: 1, sequences: 1 };
                    let grad_norm = if flaw == Flaw::Off { 2.0 } else { 1.0 };
                    match flaw {
                        Flaw::Wordy => ("step", Err(refusal())),
                        Flaw::LostAfter(after) if steps > after => ("step", Err(EngineError::new(ErrorKind::DeviceLost, "gone wrong"))),
                        _ => ("step", Ok(Reply::Step(StepReport { step: steps, sums, loss: sums.mean(), grad_norm }))),
                    }
                }
                Command::Snapshot { .. } if flaw == Flaw::TooMuch => {
                    ("snapshot", Err(EngineError::new(ErrorKind::QuotaExceeded, "too much")))
                }
                Command::Snapshot { .. } => ("snapshot", Ok(Reply::State(Box::new(state(steps))))),
                Command::Restore { state, .. } => {
                    steps = state.adapters[0].steps;
                    ("restore", Ok(Reply::Done))
                }
                other => panic!("{other:?}"),
            };
            heard.lock().unwrap().push(what.to_owned());
            request.answer(reply);
        }
    });
    (client, seen)
}

/// A reply that is read again only where it is needed.
fn refusal() -> EngineError {
    EngineError::new(ErrorKind::InvalidArgument, "no. ".repeat(200))
}

fn state(steps: u64) -> JobState {
    let (config, sums, poison) = (config(), LossSums::default(), None);
    let (params, moments, grads) = (vec![f32::NAN, -0.0], None, None);
    JobState { adapters: vec![AdapterState { index: 0, config, seed: 7, steps, count: steps, sums, poison, params, moments, grads }] }
}

fn call(number: u64) -> Command {
    let optimiser = AdamW {
        learning_rate: 1.0 / (number + 1) as f32,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: None,
        normalisation: Normalisation::WeightSum,
    };
    match number {
        0 => Command::CreateAdapter { slot: SLOT, trunk: TrunkSlot(0), config: config(), seed: 7, cohort: None },
        _ => Command::OptimStep { slot: SLOT, optimiser },
    }
}

fn account() -> Account {
    Arc::new(Space::new(1 << 30)).account("job", 1)
}

fn open(dir: &TempDir) -> anyhow::Result<Book> {
    Book::open(dir.try_clone().unwrap(), Digest::of(b"class"), account())
}

fn begin(dir: &TempDir, engine: &Client, every: Duration) -> Scribe {
    let terms = Terms { engine: engine.clone(), job: JOB, trunk: TrunkSlot(0), cohort: None, every };
    Scribe::start(terms, open(dir).unwrap())
}

/// Makes calls; their answers as text.
async fn calls(scribe: &Scribe, numbers: std::ops::Range<u64>) -> Vec<String> {
    let mut answers = Vec::new();
    for number in numbers {
        answers.push(format!("{:?}", scribe.client().call(call(number)).await));
    }
    answers
}

/// Waits until so many snapshots are there.
async fn kept(dir: &TempDir, name: &str) {
    while !dir.exists(name) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn count(seen: &Mutex<Vec<String>>, what: &str) -> usize {
    seen.lock().unwrap().iter().filter(|heard| *heard == what).count()
}

#[tokio::test]
async fn a_job_cut_off_anywhere_goes_on_to_the_same_answers() {
    let (alone, _) = engine(Flaw::None);
    let mut expected = Vec::new();
    for number in 0..CALLS {
        expected.push(format!("{:?}", alone.call(call(number)).await));
    }
    for cut in 0..=CALLS {
        let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
        let (first, _) = engine(Flaw::None);
        let scribe = begin(&dir, &first, NEVER);
        calls(&scribe, 0..cut / 2).await;
        scribe.checkpoint().await;
        scribe.end().await;
        let (next, _) = engine(Flaw::None);
        let scribe = begin(&dir, &next, NEVER);
        assert_eq!(calls(&scribe, 0..cut).await, expected[..cut as usize]);
        scribe.end().await;

        let (second, seen) = engine(Flaw::None);
        let scribe = begin(&dir, &second, NEVER);
        assert_eq!(scribe.is_caught_up(), cut == 0);
        assert_eq!(calls(&scribe, 0..CALLS).await, expected, "cut off after {cut} calls");
        assert!(scribe.is_caught_up() && scribe.fault().is_none());
        let Tally { answered, repeated, repeated_steps, .. } = scribe.tally();
        assert_eq!((answered, repeated), (cut / 2, cut - cut / 2));
        assert_eq!(repeated_steps, repeated - u64::from(cut == 1));
        let mut asked = vec!["create"; usize::from(cut < 2)];
        asked.extend(vec!["restore"; usize::from(cut >= 2)]);
        asked.extend(vec!["step"; (CALLS - (cut / 2).max(1)) as usize]);
        assert_eq!(*seen.lock().unwrap(), asked, "cut off after {cut} calls");
        scribe.end().await;
    }
}

/// Nobody waits for a drop: the end of a job may come before it the second time, and not the first.
#[tokio::test]
async fn an_adapter_dropped_at_a_jobs_end_need_not_be_dropped_again() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    for (attempt, is_dropped) in [true, false].into_iter().enumerate() {
        let (engine, _) = engine(Flaw::None);
        let scribe = begin(&dir, &engine, NEVER);
        calls(&scribe, 0..3).await;
        assert!(scribe.is_caught_up(), "attempt {attempt}");
        if is_dropped {
            scribe.client().call(Command::DropAdapter { slot: SLOT }).await.unwrap();
        }
        scribe.end().await;
    }
}

#[tokio::test]
async fn snapshots_are_made_as_often_as_wished_and_two_are_kept() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (engine, seen) = engine(Flaw::None);
    let scribe = begin(&dir, &engine, Duration::ZERO);
    for number in 0..6 {
        calls(&scribe, number..number + 1).await;
        kept(&dir, &format!("snapshot-{}", number + 1)).await;
    }
    scribe.end().await;
    assert_eq!(count(&seen, "snapshot"), 6);
    let mut names: Vec<_> = dir.entries().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["replies", "snapshot-5", "snapshot-6"]);
    // The last is damaged: the one before it serves.
    dir.write("snapshot-6", "not a snapshot").unwrap();
    let book = open(&dir).unwrap();
    assert_eq!((book.past.calls, book.past.state.map(|state| state.adapters[0].steps)), (5, Some(4)));
    // Both lie beyond what is left of the journal: it begins anew.
    let bytes = dir.read("replies").unwrap();
    dir.write("replies", &bytes[..bytes.len() / 2]).unwrap();
    let book = open(&dir).unwrap();
    assert!(book.past.calls == 0 && book.past.state.is_none() && !book.is_new);
}

#[tokio::test]
async fn what_was_torn_off_is_done_again() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (first, _) = engine(Flaw::None);
    let scribe = begin(&dir, &first, NEVER);
    let expected = calls(&scribe, 0..CALLS).await;
    scribe.end().await;
    let whole = dir.read("replies").unwrap();
    for torn in (0..whole.len()).step_by(17) {
        dir.write("replies", &whole[..torn]).unwrap();
        let (second, _) = engine(Flaw::None);
        let scribe = begin(&dir, &second, NEVER);
        assert_eq!(calls(&scribe, 0..CALLS).await, expected);
        scribe.end().await;
        let numbers = |bytes: &[u8]| -> Vec<u64> {
            let mut frames = super::record::Frames::new(&bytes[32..], 0, bytes.len() as u64 - 32);
            std::iter::from_fn(|| frames.next().unwrap()).map(|(call, _)| call).collect()
        };
        let (again, before) = (numbers(&dir.read("replies").unwrap()), numbers(&whole));
        assert_eq!(again, before);
    }
}

/// Waits for a call that is never answered, and gives why.
async fn unanswered(scribe: &Scribe, command: Command) -> Fault {
    let client = scribe.client();
    let asking = client.call(command);
    tokio::pin!(asking);
    let fault = tokio::select! {
        answer = &mut asking => panic!("{answer:?}"),
        fault = scribe.failed() => fault,
    };
    assert!(tokio::time::timeout(Duration::from_millis(20), asking).await.is_err(), "it was answered all the same");
    fault
}

#[tokio::test]
async fn another_call_or_another_answer_than_before_is_told_and_not_answered() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (first, _) = engine(Flaw::None);
    let scribe = begin(&dir, &first, NEVER);
    calls(&scribe, 0..4).await;
    scribe.end().await;

    let (second, _) = engine(Flaw::None);
    let scribe = begin(&dir, &second, NEVER);
    calls(&scribe, 0..2).await;
    let Fault::Diverged(text) = unanswered(&scribe, call(7)).await else { panic!() };
    assert!(text.contains("asked something else than before: its call 2, to optim-step"), "{text}");
    scribe.end().await;

    let (second, _) = engine(Flaw::Off);
    let scribe = begin(&dir, &second, NEVER);
    calls(&scribe, 0..1).await;
    let Fault::Diverged(text) = unanswered(&scribe, call(1)).await else { panic!() };
    assert!(text.contains("answered something else than before, bit for bit: to its call 1"), "{text}");
    scribe.end().await;

    let error = Book::open(dir.try_clone().unwrap(), Digest::of(b"another class"), account()).map(drop).unwrap_err();
    assert_eq!(error.downcast::<BegunElsewhere>().unwrap().identity, Digest::of(b"class"));
}

#[tokio::test]
async fn that_the_device_was_lost_is_no_answer() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (first, _) = engine(Flaw::LostAfter(2));
    let scribe = begin(&dir, &first, NEVER);
    calls(&scribe, 0..3).await;
    assert_eq!(unanswered(&scribe, call(3)).await, Fault::Lost("gone wrong".to_owned()));
    scribe.end().await;
    let (second, _) = engine(Flaw::None);
    let scribe = begin(&dir, &second, NEVER);
    assert!(calls(&scribe, 0..CALLS).await.iter().all(|answer| answer.starts_with("Ok")));
    assert_eq!(scribe.tally().repeated, 3);
    scribe.end().await;
}

#[tokio::test]
async fn a_job_that_cannot_be_kept_goes_on_and_is_done_again_from_its_start() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (first, seen) = engine(Flaw::TooMuch);
    let scribe = begin(&dir, &first, Duration::from_millis(1));
    calls(&scribe, 0..4).await;
    while count(&seen, "snapshot") == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(scribe.fault().is_none());
    let expected = calls(&scribe, 4..CALLS).await;
    scribe.end().await;
    let (second, _) = engine(Flaw::None);
    let scribe = begin(&dir, &second, NEVER);
    assert_eq!(calls(&scribe, 0..CALLS).await[4..], expected);
    assert_eq!((scribe.tally().answered, scribe.tally().repeated), (0, CALLS));
    scribe.end().await;
}

/// However long a journal is, a job that goes on has few of its replies in memory; and it hears the same where they were written out of order.
#[tokio::test]
async fn a_long_journal_is_read_as_the_job_comes_to_it() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    let (first, _) = engine(Flaw::None);
    let scribe = begin(&dir, &first, NEVER);
    let expected = calls(&scribe, 0..2000).await;
    scribe.end().await;
    // Neighbours change places, as replies of calls that are under way together do.
    let bytes = dir.read("replies").unwrap();
    let mut frames: Vec<&[u8]> = Vec::new();
    let mut rest = &bytes[32..];
    while !rest.is_empty() {
        let length = 12 + u32::from_le_bytes(rest[..4].try_into().unwrap()) as usize;
        frames.push(&rest[..length]);
        rest = &rest[length..];
    }
    frames.chunks_mut(3).for_each(<[_]>::reverse);
    dir.write("replies", [&bytes[..32], &frames.concat()].concat()).unwrap();

    let mut book = open(&dir).unwrap();
    for call in 0..2000 {
        assert!(book.past.look(call).await.unwrap().is_some(), "call {call}");
        assert!(book.past.take(call).is_some() && book.past.at_hand() < 70, "{} entries at hand", book.past.at_hand());
    }
    assert!(book.past.is_over());
    book.keeper.end();
    let (second, _) = engine(Flaw::None);
    let scribe = begin(&dir, &second, NEVER);
    assert_eq!(calls(&scribe, 0..2000).await, expected);
    assert!(scribe.is_caught_up());
    scribe.end().await;
}

#[tokio::test]
async fn an_attempt_tells_whether_it_was_kept_further_on() {
    let dir = cap_tempfile::tempdir(cap_tempfile::ambient_authority()).unwrap();
    for (calls_made, is_kept) in [(4, false), (4, true), (4, false), (8, true)] {
        let (engine, _) = engine(Flaw::None);
        let scribe = begin(&dir, &engine, NEVER);
        calls(&scribe, 0..calls_made).await;
        if is_kept {
            scribe.checkpoint().await;
        }
        assert_eq!(scribe.end().await.is_further, is_kept, "{calls_made}");
    }
}
